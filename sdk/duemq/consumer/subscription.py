"""What a consumer names to subscribe to.  Pure."""

from collections.abc import Iterable, Mapping

from duemq.errors import InvalidArgument
from duemq.tag_filter import TagFilter

Topics = str | Iterable[str] | Mapping[str, str | None]

SUBSCRIPTIONS_MAX = 1_000  # the coordinator's limit


def subscriptions_of(topics: Topics) -> dict[str, tuple[str, TagFilter]]:
    """Answers topic → (filter as written, filter).  Raises InvalidArgument."""
    if isinstance(topics, str):
        topics = (topics,)
    named: Mapping[str, str | None]
    named = topics if isinstance(topics, Mapping) else dict.fromkeys(topics)
    if not named or len(named) > SUBSCRIPTIONS_MAX or "" in named:
        limit = f"1 to {SUBSCRIPTIONS_MAX} names"
        raise InvalidArgument(
            f"a consumer needs topics, {limit}", field="topics", value=topics, limit=limit
        )
    return {topic: (text or "", TagFilter.parse(text or "")) for topic, text in named.items()}
