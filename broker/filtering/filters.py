"""What a subscription's filter text means, by its type; compiled once.  Pure.

A filter is what `parse` answers: None takes every record, a set of hashes those whose tag hashes to
one of them, a SqlFilter those that it matches.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.filters import SQL92, TAG, TagFilter
from duemq_server.broker.filtering.sql_filter import SqlFilter

# Of all the expressions that are kept compiled, and of those that one request may bring along.
CHARACTERS_KEPT_MAX = 256 * 1024
# An entry of the cache costs at least as much as so many characters.
ENTRY_CHARACTERS = 64

Filter: TypeAlias = frozenset[int] | SqlFilter | None
T = TypeVar("T")


class TextCache(Generic[T]):
    """What was made of the texts that were used last.

    Owned by: one event loop.  Bounded by the characters of the texts.
    """

    def __init__(self, make: Callable[[str], T], characters_max: int = CHARACTERS_KEPT_MAX) -> None:
        self._make = make
        self._characters_max = characters_max
        self._made: OrderedDict[str, T] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._made)

    def get(self, text: str) -> T:
        """Made anew if it is not kept.  Raises what the making raises."""
        found = self._made.get(text)
        if found is not None:
            self._made.move_to_end(text)
            return found
        made = self._made[text] = self._make(text)
        self._characters += len(text) + ENTRY_CHARACTERS
        while self._characters > self._characters_max and len(self._made) > 1:
            oldest, _ = self._made.popitem(last=False)
            self._characters -= len(oldest) + ENTRY_CHARACTERS
        return made


def parse_filter(text: str) -> frozenset[int] | None:
    """Hashes of the tags in `a || b`; None: every record.  Raises InvalidArgument."""
    wanted = TagFilter.parse(text)
    return None if wanted.takes_all else wanted.hashes


def _compile(text: str) -> SqlFilter | InvalidArgument:
    """Errors are kept too: who repeats one is answered quickly."""
    try:
        return SqlFilter(text)
    except InvalidArgument as error:
        return error


_compiled = TextCache(_compile)


def parse(text: str, filter_type: int = TAG) -> Filter:
    """The filter of a pull.  Raises InvalidArgument, for SQL naming line and column."""
    if filter_type == TAG:
        return parse_filter(text)
    if filter_type == SQL92:
        made = _compiled.get(text)
        if isinstance(made, SqlFilter):
            return made
        raise InvalidArgument(made.message, field=made.field, value=made.value, limit=made.limit)
    raise checks.wrong("filter_type", filter_type, f"{TAG} (tags) or {SQL92} (SQL-92)")


class Expressions:
    """The SQL expressions of one request; bounds what it may cost to compile them."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Filter] = {}
        self._characters = 0

    def parse(self, text: str, filter_type: int) -> Filter:
        """As `parse`, each once.

        Raises InvalidArgument also when there are too many different ones.
        """
        if filter_type == TAG:
            return parse_filter(text)
        key = (text, filter_type)
        if key not in self._made:
            characters = self._characters + len(text)
            checks.count("filter", characters, 0, CHARACTERS_KEPT_MAX, "characters in one request")
            self._made[key] = parse(text, filter_type)
            self._characters = characters
        return self._made[key]


def check_filter(text: str, filter_type: int, among: Expressions) -> None:
    """Raises InvalidArgument unless a subscription may have this filter.

    `among`: the expressions of the same request.
    """
    if filter_type == TAG:
        TagFilter.parse(text)
    else:
        among.parse(text, filter_type)
