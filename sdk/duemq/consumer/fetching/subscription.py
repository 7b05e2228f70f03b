"""What a consumer names to subscribe to.  Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from duemq.protocol import checks, limits
from duemq.protocol.filters import SQL92, TAG, Sql, TagFilter

Topics = str | Iterable[str] | Mapping[str, str | Sql | None]

SUBSCRIPTIONS_MAX = limits.SUBSCRIPTIONS_MAX - 1
"""The group's retry topic is one, too."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which of a topic's messages are wanted, as brokers are told."""

    text: str = ""
    filter_type: int = TAG
    tags: TagFilter = field(default_factory=TagFilter)
    """What is left to check here: brokers compare hashes of tags, but are exact with SQL."""

    @classmethod
    def of(cls, wanted: str | Sql | None) -> Self:
        """`wanted`: tags as `a || b`, an expression, or None for all.  Raises InvalidArgument."""
        if isinstance(wanted, Sql):
            return cls(wanted.expression, SQL92)
        if not isinstance(wanted, str | None):
            raise checks.wrong("filter", wanted, "tags as 'a || b', Sql, or None")
        return cls(wanted or "", TAG, TagFilter.parse(wanted or ""))

    @property
    def takes_all(self) -> bool:
        """Everything that a broker gives is wanted."""
        return self.tags.takes_all

    def takes(self, tag: str | None) -> bool:
        """Tells whether a message that a broker gave is wanted."""
        return self.tags.takes(tag)


ALL = Filter()


def subscriptions_of(topics: Topics) -> dict[str, Filter]:
    """Answers topic → filter.  Raises InvalidArgument."""
    if isinstance(topics, str):
        topics = (topics,)
    named: Mapping[str, str | Sql | None] = {}
    if isinstance(topics, Mapping):
        named = topics
    elif isinstance(topics, Iterable):
        named = dict.fromkeys(topics)
    if not 1 <= len(named) <= SUBSCRIPTIONS_MAX or not all(map(_is_name, named)):
        raise checks.wrong("topics", topics, f"1 to {SUBSCRIPTIONS_MAX} names")
    return {topic: Filter.of(wanted) for topic, wanted in named.items()}


def _is_name(topic: object) -> bool:
    return isinstance(topic, str) and bool(topic)
