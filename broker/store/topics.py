"""The topics of this broker.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A topic has an id of its own beside its name, so that a topic deleted and made again never meets
the files of the one before, and who reads it knows the two apart.  Ids grow by random steps: what
comes after the loss of the log's end, or of the whole disk, meets no id that was given there.
Changes are entries of the commit log (journal.py), so they are durable in order with the messages.
"""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from duemq.errors import (
    InvalidArgument,
    QueueNotFound,
    TopicExists,
    TopicNotFound,
    TopicReplaced,
)
from duemq.protocol import checks, names
from duemq.protocol.limits import QUEUES_MAX, SERVICE_IDS_FROM, TOPICS_MAX

OWN = "the broker's own"
# Two million topics before an id has more than the 53 bits that every JSON reader keeps.
ID_STEP_BITS = 32


@dataclass(frozen=True, slots=True)
class Topic:
    """`message_bytes_max` is of a message's body; 0: the broker's own limit."""

    name: str
    id: int
    queues: int
    message_bytes_max: int = 0


class Topics:
    """The table of topics, by name."""

    def __init__(
        self, default_queues: int, message_bytes_max: int, *, auto_create: bool = True
    ) -> None:
        """`auto_create`: the first good batch to a topic makes it."""
        self._auto_create = auto_create
        self._default_queues = default_queues
        self._message_bytes_max = message_bytes_max
        self._topics: dict[str, Topic] = {}
        self._next_id = 1

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: str) -> bool:
        return name in self._topics

    def find(self, name: str) -> Topic:
        """Raises TopicNotFound."""
        topic = self._topics.get(name)
        if topic is None:
            raise TopicNotFound(f"topic: {name!r} is not here", field="topic", value=name)
        return topic

    def meant(self, name: str, topic_id: int) -> Topic:
        """The topic, if it is the one that is meant of all that ever have the name.

        `topic_id` 0: whichever is here.  Raises TopicNotFound, TopicReplaced.
        """
        topic = self.find(name)
        if topic_id and topic_id != topic.id:
            raise TopicReplaced(
                f"topic_id: topic {name!r} was deleted and made anew, it is {topic.id} now",
                field="topic_id",
                value=topic_id,
                limit=topic.id,
            )
        return topic

    def queue(self, name: str, queue_id: int, topic_id: int = 0) -> Topic:
        """The topic, if it has that queue; `topic_id` as in `meant`.

        Raises TopicNotFound, TopicReplaced, QueueNotFound.
        """
        topic = self.meant(name, topic_id)
        if not 0 <= queue_id < topic.queues:
            raise no_queue(topic, queue_id)
        return topic

    def limit(self, topic: Topic) -> int:
        """The most bytes of a message's body."""
        return min(topic.message_bytes_max or self._message_bytes_max, self._message_bytes_max)

    def to_send(self, name: str, producer_id: int) -> Topic:
        """The topic that a batch goes to, or the one that the first good batch will make.

        Raises PermissionDenied, InvalidArgument, TopicNotFound.
        """
        if producer_id < SERVICE_IDS_FROM:
            names.check_sent_to(name)
        if name in self._topics:
            if name == names.TIMER_TOPIC:
                raise InvalidArgument(
                    f"topic: {name} is the broker's own: send to a topic, with a due time",
                    field="topic",
                    value=name,
                    limit="not %TIMER%",
                )
            return self._topics[name]
        if not self._auto_create:
            raise TopicNotFound(
                f"topic: {name!r} is not here, and auto_create_topics is off",
                field="topic",
                value=name,
            )
        return self.plan(name)

    def plan(self, name: str, queues: int = 0, message_bytes_max: int = 0) -> Topic:
        """The topic that would be made; raises InvalidArgument, TopicExists."""
        names.check_topic(name)
        if name in self._topics:
            raise TopicExists(f"topic: {name!r} exists", field="topic", value=name)
        checks.between("queues", queues, 1, QUEUES_MAX, zero=OWN)
        most = self._message_bytes_max
        checks.between("message_bytes_max", message_bytes_max, 1, most, zero=OWN)
        if len(self._topics) >= TOPICS_MAX:
            raise checks.wrong("topic", name, f"at most {TOPICS_MAX} topics, and so many exist")
        own = 1 if names.group_of(name) else self._default_queues
        topic_id = self._next_id + secrets.randbits(ID_STEP_BITS)
        return Topic(name, topic_id, queues or own, message_bytes_max)

    def put(self, topic: Topic) -> None:
        """Makes the topic, or replaces it by its successor."""
        self._topics[topic.name] = topic
        self._next_id = max(self._next_id, topic.id + 1)

    def check_deletable(self, name: str, topic_id: int = 0) -> None:
        """Raises as `meant`, and InvalidArgument for the topic that the broker lives on."""
        self.meant(name, topic_id)
        if name == names.TIMER_TOPIC:
            raise InvalidArgument(
                f"topic: {name} is the broker's own: it can be neither deleted nor purged",
                field="topic",
                value=name,
                limit="not %TIMER%",
            )

    def remove(self, name: str) -> Topic:
        """Takes the topic out.  Raises TopicNotFound."""
        topic = self.find(name)
        del self._topics[name]
        return topic

    def freeze(self) -> Callable[[], dict[str, Any]]:
        """What makes its part of the checkpoint, as of now; any thread may call it."""
        next_id, topics = self._next_id, list(self)
        return lambda: {"next_id": next_id, "topics": [asdict(topic) for topic in topics]}

    def load(self, state: dict[str, Any]) -> None:
        """Puts back what `freeze` gave."""
        self._topics = {row["name"]: Topic(**row) for row in state["topics"]}
        self._next_id = state["next_id"]


def no_queue(topic: Topic, queue_id: int, lowest: int = 0) -> QueueNotFound:
    """The topic has no such queue."""
    limit = f"{lowest} to {topic.queues - 1}"
    return QueueNotFound(
        f"queue_id: {queue_id} is not a queue of topic {topic.name}: {limit}",
        field="queue_id",
        value=queue_id,
        limit=limit,
    )
