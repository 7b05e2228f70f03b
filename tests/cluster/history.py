"""Records what a cluster test does and sees, for `checker.judge`.

Thread-safe: consumers record from their own threads.  Epoch milliseconds throughout.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from duemq import Message, PendingReceipt, Producer, Receipt
from duemq.errors import DuemqError
from tests.cluster.checker import PLACE, Event


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class History:
    """The events of one test.  A message's key is its id."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids: dict[tuple[str, object], set[str]] = defaultdict(set)
        self._lock = threading.Lock()  # guards events, _ids

    def add(self, event: str, id: str, **fields: object) -> None:
        with self._lock:
            self.events.append({"event": event, "id": id, **fields})
            self._ids[event, fields.get("group")].add(id)

    def count(self, event: str, *, group: str | None = None) -> int:
        """How many different ids have such an event; those of `received` need a group."""
        with self._lock:
            return len(self._ids[event, group])

    def ids(self, event: str) -> set[str]:
        """Of all that have such an event; not of `received`."""
        with self._lock:
            return set(self._ids[event, None])

    def send(self, producer: Producer, topic: str, id: str, **options: object) -> Receipt | None:
        """Sends and records; None when the send failed."""
        (receipt,) = self.send_burst(producer, topic, [id], **options)
        return receipt

    def send_burst(
        self, producer: Producer, topic: str, ids: Sequence[str], **options: object
    ) -> list[Receipt | None]:
        """Sends all without waiting in between, then records what became of each."""
        pending = []
        for id in ids:
            self.add("sent", id, at_ms=now_ms(), key=options.get("ordering_key"))
            pending.append(producer.submit(topic, id.encode(), key=id, **options))  # type: ignore[arg-type]
        return [self._outcome(id, sent) for id, sent in zip(ids, pending, strict=True)]

    def _outcome(self, id: str, sent: PendingReceipt) -> Receipt | None:
        try:
            receipt = sent.result()
        except DuemqError as error:
            self.add("failed", id, at_ms=now_ms(), error=str(error))
            return None
        place = {} if receipt.due_ms else {name: getattr(receipt, name) for name in PLACE}
        self.add("acked", id, at_ms=now_ms(), due_ms=receipt.due_ms or 0, **place)
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
