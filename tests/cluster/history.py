"""Records what a cluster test does and sees, for `checker.judge`.

Thread-safe: consumers record from their own threads.  Epoch milliseconds throughout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from duemq import Message, Producer, Receipt
from duemq.errors import DuemqError
from tests.cluster.checker import Event


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class History:
    """The events of one test.  A message's key is its id."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()  # guards events

    def add(self, event: str, id: str, **fields: object) -> None:
        with self._lock:
            self.events.append({"event": event, "id": id, **fields})

    def count(self, event: str, **fields: object) -> int:
        """How many distinct ids have such an event."""
        with self._lock:
            return len(
                {
                    e["id"]
                    for e in self.events
                    if e["event"] == event and all(e.get(k) == v for k, v in fields.items())
                }
            )

    def send(self, producer: Producer, topic: str, id: str, **options: object) -> Receipt | None:
        """Sends and records; None when the send failed."""
        self.add("sent", id, at_ms=now_ms(), key=options.get("ordering_key"))
        try:
            receipt = producer.send(topic, id.encode(), key=id, **options)  # type: ignore[arg-type]
        except DuemqError as error:
            self.add("failed", id, at_ms=now_ms(), error=str(error))
            return None
        self.add("acked", id, at_ms=now_ms(), due_ms=receipt.due_ms or 0)
        return receipt

    def receiver(self, group: str):  # type: ignore[no-untyped-def]
        """A callback for a push consumer of `group`."""

        def receive(message: Message) -> None:
            place = {"broker": message.broker, "queue": message.queue, "offset": message.offset}
            self.add("received", message.key or "", group=group, at_ms=now_ms(), **place)

        return receive

    def stored(self, messages: Iterable[Message]) -> None:
        """Records the topic's whole log, read at the end."""
        for message in messages:
            place = {"broker": message.broker, "queue": message.queue, "offset": message.offset}
            self.add("stored", message.key or "", store_ms=message.store_ms, **place)
