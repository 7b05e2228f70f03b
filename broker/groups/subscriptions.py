"""What members of a group read; all read the same.  Pure.

Each queue is read by one member, with that member's filter.  If members wanted different things,
what one of them leaves out would be lost to the others as well.
"""

from collections.abc import Mapping
from typing import NamedTuple

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.filters import TAG, TagFilter
from duemq.protocol.limits import SUBSCRIPTIONS_MAX
from duemq.protocol.names import check_topic, retry_topic


class TopicFilter(NamedTuple):
    """Which of a topic's messages a member takes."""

    text: str = ""
    filter_type: int = TAG

    def says(self) -> object:
        """What two filters have in common that take the same, however they are spelt."""
        if self.filter_type == TAG:
            return TagFilter.parse(self.text).tags
        return self.filter_type, self.text.strip()

    def __str__(self) -> str:
        return repr(self.text or "*") + (" (SQL)" if self.filter_type != TAG else "")


Subscriptions = Mapping[str, TopicFilter]  # by topic


def check(subscriptions: Subscriptions) -> None:
    """Raises InvalidArgument for none, too many, or an illegal topic."""
    check_count(len(subscriptions))
    for topic in subscriptions:
        check_topic(topic)


def check_count(subscriptions: int) -> None:
    """Raises InvalidArgument for none, or too many."""
    checks.count("subscriptions", subscriptions, 1, SUBSCRIPTIONS_MAX)


def difference(group: str, one: Subscriptions, other: Subscriptions) -> str | None:
    """Answers the first topic that the two read differently; None: they read the same.

    Not counted is the group's own topic of retries, which plain clients may leave out.
    """
    for topic in sorted({*one, *other} - {retry_topic(group)}):
        if topic not in one or topic not in other or one[topic].says() != other[topic].says():
            return topic
    return None


def check_same(group: str, wanted: Subscriptions, others: Subscriptions) -> None:
    """Raises InvalidArgument if a member wants something else than the others of its group."""
    topic = difference(group, wanted, others)
    if topic is None:
        return
    mine, theirs = _said(wanted, topic), _said(others, topic)
    raise InvalidArgument(
        f"subscriptions: topic {topic!r}: {mine} here, {theirs} at the other members of group"
        f" {group!r}; all members of a group read the same.  Use a group of its own (`duemq group"
        " clone` gives it this one's offsets), or start this member when the others have left",
        field="subscriptions",
        value=f"{topic}: {mine}",
        limit=f"{topic}: {theirs}",
    )


def _said(wanted: Subscriptions, topic: str) -> str:
    return f"filter {wanted[topic]}" if topic in wanted else "not subscribed"
