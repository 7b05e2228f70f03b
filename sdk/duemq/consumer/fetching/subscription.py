"""What a consumer names to subscribe to.  Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from duemq.errors import InvalidArgument
from duemq.protocol.sql import Sql
from duemq.protocol.tag_filter import TagFilter

Topics = str | Iterable[str] | Mapping[str, str | Sql | None]

SUBSCRIPTIONS_MAX = 999  # the coordinator's limit, less one for the group's %RETRY% topic

# Numbers of duemq.v1.FilterType.
TAG, SQL92 = 0, 1


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
            limit = "tags as 'a || b', Sql, or None"
            raise InvalidArgument(
                f"a filter is {limit}, not {wanted!r}", field="filter", value=wanted, limit=limit
            )
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
        limit = f"1 to {SUBSCRIPTIONS_MAX} names"
        raise InvalidArgument(
            f"a consumer needs topics, {limit}, not {topics!r:.200}",
            field="topics",
            value=topics,
            limit=limit,
        )
    return {topic: Filter.of(wanted) for topic, wanted in named.items()}


def _is_name(topic: object) -> bool:
    return isinstance(topic, str) and bool(topic)
