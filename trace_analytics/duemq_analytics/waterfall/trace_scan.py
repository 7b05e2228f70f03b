"""Reads what the trace topic has since a moment, without a group.  Blocking."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Self

from duemq import Message, PullConsumer
from duemq.descriptions import TopicDescription
from duemq.errors import MissingBroker
from duemq.protocol.balance import MessageQueue

POLL_S = 0.2
POLL_MESSAGES = 500
# A broker that sends nothing for so long before the end of its queues is away.
SILENCE_S_MAX = 10.0


class TraceScan(AbstractContextManager["TraceScan"]):
    """May be read more than once: each time the same, up to what was there when it was made."""

    def __init__(
        self,
        consumer: PullConsumer,
        described: TopicDescription,
        since_ms: int,
        silence_s: float = SILENCE_S_MAX,
    ) -> None:
        """`since_ms`: by store time; brokers find it by their time index."""
        self.silent: set[str] = set()
        """Brokers that did not answer to the end."""
        self._consumer = consumer
        self._since = datetime.fromtimestamp(since_ms / 1_000, UTC)
        self._silence_s = silence_s
        self._ends = {
            MessageQueue(described.name, each.broker, each.queue): each.max_offset
            for each in described.queues
            if each.max_offset > each.min_offset
        }

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def __enter__(self) -> Self:
        self._consumer.start()
        return self

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """The same, as answers name them."""
        return tuple(MissingBroker(name, "it went silent") for name in sorted(self.silent))

    def messages(self) -> Iterator[Message]:
        """Of all queues of brokers that answer."""
        queues = [queue for queue in self._ends if queue.broker not in self.silent]
        if queues:
            self._consumer.assign(queues, start_from=self._since)
        heard = time.monotonic()
        while behind := self._behind(queues):
            for message in self._consumer.poll(POLL_S, POLL_MESSAGES):
                heard = time.monotonic()
                queue = MessageQueue(message.stored_topic, message.broker, message.queue)
                if message.offset < self._ends[queue]:
                    yield message
            if time.monotonic() - heard > self._silence_s:
                self.silent |= {queue.broker for queue in self._behind(behind)}
                return

    def _behind(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        return [q for q in queues if self._consumer.position(q) < self._ends[q]]
