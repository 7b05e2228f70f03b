"""The twin's topics, and what is stored in their queues.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from duemq.errors import TooLarge, TopicNotFound
from duemq.message import Message, Origin
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT, QUEUES_MAX
from duemq.protocol.names import check_topic
from duemq.v1.message_pb2 import Record

NAME = "memory"


class StoredEntry(NamedTuple):
    """A stored message.  `number`: in the order of storing, whatever the queue."""

    number: int
    message: Message


class MemoryLogs:
    """Of one broker, `memory`."""

    def __init__(self, now_ms: int, queues: int) -> None:
        """`queues`: of a topic, unless it is made with others."""
        self.now_ms = now_ms
        self._default_queues = queues
        self._topics: dict[str, list[list[StoredEntry]]] = {}
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._stored = 0

    def create_topic(self, topic: str, queues: int | None = None) -> None:
        """If it is missing.  Raises InvalidArgument."""
        check_topic(topic)
        checks.whole("queues", queues or 0, 0, QUEUES_MAX)
        self._make(topic, queues or self._default_queues)

    def delete_topic(self, topic: str) -> None:
        """With its messages; what waits for its time stays.  Raises TopicNotFound."""
        if self._topics.pop(topic, None) is None:
            raise TopicNotFound(f"no topic {topic!r}", field="name", value=topic)
        self._turns.pop(topic, None)

    def holds(self, queue: MessageQueue, entry: StoredEntry) -> bool:
        """Whether it is there: its topic was not deleted since, nor made anew."""
        logs = self._topics.get(queue.topic, ())
        log = logs[queue.queue_id] if queue.queue_id < len(logs) else ()
        offset = entry.message.offset
        return offset < len(log) and log[offset] is entry

    def queues_of(self, topic: str) -> list[MessageQueue]:
        """Answers none if there is no such topic."""
        count = len(self._topics.get(topic, ()))
        return [MessageQueue(topic, NAME, queue_id) for queue_id in range(count)]

    def log(self, queue: MessageQueue) -> Sequence[StoredEntry]:
        """All that was stored in a queue; an entry's index is its offset."""
        return self._topics[queue.topic][queue.queue_id]

    def messages(self, topic: str) -> list[Message]:
        """Of all queues, in the order of storing."""
        logs = self._topics.get(topic, ())
        return [message for _, message in sorted(entry for log in logs for entry in log)]

    def has_topic(self, topic: str) -> bool:
        """Whether messages may be sent there."""
        return topic in self._topics

    def append(self, topic: str, queue_id: int, record: Record) -> None:
        """Stores one record; a group's own topics are made."""
        self._make(topic, 1)
        log = self._topics[topic][queue_id]
        message = Message(record, Origin(topic, NAME, queue_id), len(log), self.now_ms)
        log.append(StoredEntry(self._stored, message))
        self._stored += 1

    def queue_for(self, topic: str, wanted: int | None) -> int:
        """Where a message goes; None: to the next in turn.  A group's own topics are made."""
        self._make(topic, 1)
        if wanted is None:
            wanted = self._turns[topic]
            self._turns[topic] += 1
        return wanted % len(self._topics[topic])  # it may have been made anew with fewer queues

    def _make(self, topic: str, queues: int) -> None:
        if topic not in self._topics:
            self._topics[topic] = [[] for _ in range(queues)]

    def check(self, topic: str, records: Sequence[Record]) -> None:
        """Raises TopicNotFound, TooLarge."""
        if topic not in self._topics:
            raise TopicNotFound(f"topic {topic!r} does not exist", field="topic", value=topic)
        longest = max(len(record.body) for record in records)
        if longest > MESSAGE_BYTES_DEFAULT:
            raise TooLarge(
                f"body: {longest} bytes, at most {MESSAGE_BYTES_DEFAULT}",
                field="body",
                value=longest,
                limit=MESSAGE_BYTES_DEFAULT,
            )
