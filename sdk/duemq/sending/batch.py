"""Messages that travel together, and what became of them.

A batch grows in the outbox (columns, under the outbox's lock) until the pump seals it; then its
columns become bytes, and at last an answer or an error.  Receipts are views of a batch, so a
message costs no object of its own while it is on its way.

    growing ──seal──► sealed ──number──► in flight ──► done (stored, or error)
                        └──────── refused, renumbered ◄─┘
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from duemq import handle
from duemq.sending import encoding
from duemq.sending.encoding import Extras, Numbers

if TYPE_CHECKING:
    from duemq.errors import DuemqError
    from duemq.route import Queue
    from duemq.sending.lane import Lane
    from duemq.tracing import SendSpan

_DUE_MS = struct.Struct("<q")
# Per message, beside body and extras: id, times, framing.
RECORD_BYTES = 64


Way = tuple["Queue | None", int]
"""How messages of a topic travel: their queue (None: any) and the field of their due times."""


class Batch:
    """Messages of one topic and one way to travel."""

    __slots__ = (
        "base_offset",
        "bodies",
        "born",
        "broker",
        "count",
        "deadline",
        "done",
        "due_field",
        "due_ms",
        "due_values",
        "encoded",
        "epoch",
        "error",
        "extras",
        "growing",
        "id_head",
        "in_flight",
        "key_hashes",
        "lane",
        "number",
        "opened",
        "queue",
        "queue_id",
        "sequence",
        "size",
        "spans",
        "store_id",
        "store_ms",
        "tag_hashes",
        "topic",
        "waiters",
        "way",
    )

    def __init__(
        self,
        topic: str,
        way: Way,
        growing: dict[Way, Batch],
        number: int,
        id_head: bytes,
        opened: float,
        deadline: float,
    ) -> None:
        """`growing`: where it stands as long as it grows.  Times in the monotonic clock's s."""
        self.topic = topic
        self.way = way
        self.queue, self.due_field = way
        self.growing = growing
        self.number = number
        self.id_head = id_head
        self.opened = opened
        self.deadline = deadline
        self.count = 0
        self.size = 0

        self.bodies: list[bytes] = []
        self.extras: list[bytes] | None = None
        self.tag_hashes: list[int] | int = 0
        self.key_hashes: list[int] | int = 0
        self.due_values: list[int] = []
        self.born: list[tuple[int, int]] = []
        self.spans: dict[int, SendSpan] = {}

        self.lane: Lane | None = None
        self.in_flight = False
        self.encoded = b""
        self.epoch = 0
        self.sequence = 0

        self.done = False
        self.error: DuemqError | None = None
        self.broker = ""
        self.queue_id = 0
        self.base_offset = 0
        self.store_ms = 0
        self.store_id = 0
        self.due_ms = b""
        self.waiters: list[Callable[[], None]] = []

    def add(self, body: bytes, extras: Extras | None, due_value: int, now_ms: int) -> int:
        """Appends a message; answers its index."""
        index = self.count
        if extras is not None or self.extras is not None:
            self._add_extras(extras or encoding.NO_EXTRAS)
        self.bodies.append(body)
        if self.due_field:
            self.due_values.append(due_value)
        if not self.born or self.born[-1][1] != now_ms:
            self.born.append((index, now_ms))
        self.count = index + 1
        self.size += len(body) + RECORD_BYTES
        return index

    def _add_extras(self, extras: Extras) -> None:
        if self.extras is None:
            self.extras = [b""] * self.count
            self.tag_hashes = [0] * self.count
            self.key_hashes = [0] * self.count
        self.extras.append(extras.encoded)
        self.size += len(extras.encoded)
        self.tag_hashes.append(extras.tag_hash)  # type: ignore[union-attr]
        self.key_hashes.append(extras.key_hash)  # type: ignore[union-attr]

    def fill(self, bodies: list[bytes], extras: Extras | None, due_value: int, now_ms: int) -> None:
        """Takes a list of bodies over that share everything else."""
        count = len(bodies)
        self.bodies, self.count = bodies, count
        self.born = [(0, now_ms)]
        self.size = sum(map(len, bodies)) + RECORD_BYTES * count
        if extras is not None:
            self.extras = [extras.encoded] * count
            self.tag_hashes, self.key_hashes = extras.tag_hash, extras.key_hash
            self.size += len(extras.encoded) * count
        if self.due_field:
            self.due_values = [due_value]

    @property
    def timed(self) -> bool:
        """Whether it goes to the timer topic first."""
        return self.due_field != 0

    def encode(self, queue_id: int, numbers: Numbers) -> bytes:
        """The batch's request with these numbers; the columns are given up for it."""
        if self.encoded:
            if (self.epoch, self.sequence) != numbers[1:]:
                self.encoded = encoding.renumbered(self.encoded, queue_id, numbers)
        else:
            self.encoded = self._encode(queue_id, numbers)
            self.bodies, self.extras, self.due_values = [], None, []
            self.tag_hashes = self.key_hashes = 0
        self.queue_id = queue_id
        self.epoch, self.sequence = numbers.epoch, numbers.sequence
        return self.encoded

    def _encode(self, queue_id: int, numbers: Numbers) -> bytes:
        parts, sizes = encoding.records_and_sizes(
            self.bodies, self.extras, self.id_head, self.born
        )
        due_values = b""
        if self.due_field:
            due_values = encoding.due_array(self.due_field, self.due_values)
        return encoding.request(
            self.number,
            self.topic.encode(),
            queue_id,
            numbers,
            parts,
            sizes,
            encoding.packed32(self.tag_hashes, self.count),
            encoding.packed32(self.key_hashes, self.count),
            self.due_field,
            due_values,
        )

    def stored(
        self,
        broker: str,
        store_id: int,
        queue_id: int,
        base_offset: int,
        store_ms: int,
        due_ms: bytes,
    ) -> None:
        """The broker has it."""
        self.broker, self.store_id = broker, store_id
        self.queue_id, self.base_offset = queue_id, base_offset
        self.store_ms, self.due_ms = store_ms, due_ms
        self._settle()

    def failed(self, error: DuemqError) -> None:
        """It is given up."""
        self.error = error
        self._settle()

    def _settle(self) -> None:
        self.bodies, self.extras, self.encoded, self.lane = [], None, b"", None
        self._end_spans()
        # `done` first: a waiter that came after the list was taken looks at `done` again.
        self.done = True
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def _end_spans(self) -> None:
        for index, span in self.spans.items():
            if self.error is not None:
                span.failed(self.error)
            else:
                due_ms = self.due_ms_of(index) if self.due_ms else 0
                span.stored(self.broker, self.queue_id, self.base_offset + index, due_ms=due_ms)
        self.spans = {}

    def on_done(self, wake: Callable[[], None]) -> bool:
        """Has `wake` called once the batch is done; False: it is done, do not wait.

        From any thread.  `wake` runs in the event loop, or never when the answer is False.
        """
        if self.done:
            return False
        self.waiters.append(wake)
        return not self.done

    async def until_done(self) -> None:
        """Waits, in the producer's event loop, until the batch is done."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        if self.on_done(wake):
            await waiter

    def message_id(self, index: int) -> str:
        """Of the message at `index`."""
        return f"{self.id_head.decode()}{index:03x}"

    def message_ids(self) -> Sequence[str]:
        """Of all messages."""
        head = self.id_head.decode()
        return [f"{head}{index:03x}" for index in range(self.count)]

    def due_ms_of(self, index: int) -> int:
        """When the message at `index` is due, as the broker resolved it."""
        (due_ms,) = _DUE_MS.unpack_from(self.due_ms, _DUE_MS.size * index)
        return int(due_ms)

    def handle_of(self, index: int) -> str:
        """The timer handle of the message at `index`."""
        return handle.encode(
            self.store_id, self.queue_id, self.base_offset + index, self.due_ms_of(index)
        )
