"""Filters of subscriptions, by tag or in SQL.  Pure.

Of tags `a || b` takes messages of tag a or b, `*` or nothing takes all.  A broker compares
hashes (CRC-32 of UTF-8, 0 for no tag); the consumer compares the tags themselves.
"""

from dataclasses import dataclass

from duemq.protocol import checks
from duemq.protocol.limits import FILTER_CHARACTERS_MAX
from duemq.protocol.record_bytes import text_hash

ALL = "*"
SEPARATOR = "||"
TAGS_MAX = 64
# Numbers of duemq.v1.FilterType.
TAG, SQL92 = 0, 1


def tag_hash(tag: str | None) -> int:
    """Answers the hash that stands for a tag; 0 only for none."""
    return text_hash(tag.encode()) if tag else 0


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Which messages a subscription takes."""

    tags: frozenset[str] = frozenset()
    """Empty: all messages."""

    @classmethod
    def parse(cls, text: str) -> "TagFilter":
        """Raises InvalidArgument for an empty alternative, too many of them, or too long a text."""
        checks.length("filter", text, 0, FILTER_CHARACTERS_MAX)
        if text.strip() in ("", ALL):
            return cls()
        tags = [tag.strip() for tag in text.split(SEPARATOR)]
        if "" in tags:
            raise checks.wrong("filter", text, f"tags as a {SEPARATOR} b: one is missing")
        checks.count("filter", len(tags), 1, TAGS_MAX, "tags")
        return cls() if ALL in tags else cls(frozenset(tags))

    @property
    def takes_all(self) -> bool:
        """True when nothing is filtered."""
        return not self.tags

    @property
    def hashes(self) -> frozenset[int]:
        """What to compare with a record's tag hash."""
        return frozenset(map(tag_hash, self.tags))

    def takes(self, tag: str | None) -> bool:
        """Tells whether a message of this tag is wanted."""
        return not self.tags or tag in self.tags


@dataclass(frozen=True, slots=True)
class Sql:
    """A filter in SQL-92, for where a filter's text goes.

        PushConsumer("eu", {"orders": Sql("price > 10 AND region IN ('eu', 'uk')")}, callback)

    Names are those of message properties; TAGS and KEYS are the message's tag and key.  Brokers
    evaluate it, and are exact; they refuse what is no expression, naming line and column.
    """

    expression: str

    def __post_init__(self) -> None:
        """Raises InvalidArgument if the expression is no text, blank or too long."""
        if not isinstance(self.expression, str):
            raise checks.wrong("filter", self.expression, "an SQL filter as text")
        checks.length("filter", self.expression, 0, FILTER_CHARACTERS_MAX)
        checks.filled("filter", self.expression.strip())

    def __str__(self) -> str:
        return self.expression
