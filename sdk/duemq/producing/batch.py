"""Messages that travel together, and what became of them.

A batch grows in the outbox (columns, under the outbox's lock) until the pump seals it; then its
columns become bytes, and at last an answer or an error.  Receipts are views of a batch, so a
message costs no object of its own while it is on its way.

    growing ──seal──► sealed ──number──► in flight ──► done (stored, or error)
                        └──────── refused, renumbered ◄─┘
"""

from __future__ import annotations

import logging
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

from duemq.producing import batch_encoding, handle
from duemq.producing.batch_encoding import Carried, Extras, Numbers
from duemq.protocol import checks
from duemq.protocol.limits import PROPERTIES_BYTES_DEFAULT
from duemq.tracing import sends, spans
from duemq.tracing.sampling import NEVER, RUN_MESSAGES
from duemq.v1.broker_pb2 import SendRequest
from duemq.v1.message_pb2 import Record

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from duemq.errors import DuemqError
    from duemq.protocol.route import Queue

log = logging.getLogger("duemq.producer")

_DUE_MS = struct.Struct("<q")
# Per message, beside body and extras: id, times, framing.
RECORD_BYTES = 64
# A message with so little room left in its properties gets no trace.
TRACE_BYTES_MAX = 1_024

Labels = tuple[str | None, str | None, Mapping[str, str] | None]
"""Key, tag and properties of a message."""
NO_LABELS: Labels = (None, None, None)

Begun = tuple[int, sends.Begun, Sequence[bytes]]
"""(index of the first message, spans from there on, what each record is to carry for its own)."""

Way = tuple["Queue | str | None", int]
"""How messages of a topic travel: their queue and `Due.way`.

The queue is None for any; while the topic's queues are not known, their ordering key instead.
"""

PLAIN: Way = (None, 0)


class Batch:
    """Messages of one topic and one way to travel."""

    __slots__ = (
        "_count",
        "base_offset",
        "begun_ms",
        "bodies",
        "born",
        "born_ms",
        "broker",
        "carried",
        "deadline_ms",
        "done",
        "due_field",
        "due_ms",
        "due_values",
        "encoded",
        "epoch",
        "error",
        "errors",
        "extras",
        "gaps",
        "growing",
        "id_head",
        "in_flight",
        "key_hashes",
        "number",
        "queue",
        "queue_id",
        "run",
        "run_past",
        "sends",
        "sequence",
        "size",
        "store_id",
        "store_ms",
        "tag_hashes",
        "told",
        "topic",
        "traced",
        "traced_next",
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
        now_ms: int,
    ) -> None:
        """`growing`: where it stands as long as it grows."""
        self.topic = topic
        self.way = way
        queue, due_way = way
        self.due_field = due_way & 255
        self.queue = None if isinstance(queue, str) else queue
        self.growing = growing
        self.number = number
        self.id_head = id_head
        self.begun_ms = now_ms
        self.deadline_ms = 0.0  # monotonic; the pump sets it
        self._count = 0
        self.size = 0

        self.bodies: list[bytes] = []
        self.extras: list[bytes] | None = None
        self.tag_hashes: list[int] | int = 0
        self.key_hashes: list[int] | int = 0
        self.due_values: list[int] = []
        self.born: list[tuple[int, int]] = [(0, now_ms)]
        self.born_ms = now_ms
        self.sends: list[tuple[int, sends.Begun]] = []
        """Spans of messages, by index of the first."""
        self.carried: list[Carried] = []
        """What their records are to carry for it."""
        self.traced = False
        """Some message may carry a trace context."""
        self.traced_next = self.run_past = NEVER
        """Where the run of messages begins that get a trace, and where it ends."""
        self.run: sends.SpanRun | None = None
        """Their spans."""

        self.in_flight = False
        self.encoded = b""
        self.epoch = 0
        self.sequence = 0

        self.done = False
        self.error: DuemqError | None = None
        self.errors: dict[int, DuemqError] = {}
        """Of messages that fail alone."""
        self.gaps: Sequence[int] = ()
        """Their numbers, sorted, once the others are stored."""
        self.broker = ""
        """Whose lane numbered it; at last the one that has it."""
        self.queue_id = 0
        self.base_offset = 0
        self.store_ms = 0
        self.store_id = 0
        self.due_ms = b""
        self.waiters: list[Callable[[], None]] = []
        self.told: list[tuple[int, int]] | None = None
        """(first index, count) of messages whose outcome somebody waits for or has seen."""

    @property
    def count(self) -> int:
        """How many messages it has."""
        return self._count or len(self.bodies)

    def born_at(self, index: int, now_ms: int) -> None:
        """The messages from `index` on were made at `now_ms`."""
        self.born.append((index, now_ms))
        self.born_ms = now_ms

    def add_extras(self, extras: Extras) -> None:
        """Of the next message.  Once one has them, all get them."""
        if self.extras is None:
            count = len(self.bodies)
            self.tag_hashes = [0] * count
            self.key_hashes = [0] * count
            self.extras = [b""] * count
        self.extras.append(extras.encoded)
        self.traced |= extras.traced
        self.tag_hashes.append(extras.tag_hash)  # type: ignore[union-attr]
        self.key_hashes.append(extras.key_hash)  # type: ignore[union-attr]

    def trace(
        self,
        index: int,
        body_bytes: int,
        extras: Extras | None,
        labels: Labels,
        parent: SpanContext | None,
    ) -> None:
        """Begins the next message's span, if it gets one.

        `parent`: as of `sends.parent_of`.
        """
        if index >= self.run_past:
            self.draw(index)
        if parent is None and index < self.traced_next:
            return
        if not may_begin(extras, parent):
            return
        if sends.may_be_light(labels[2], parent):
            self._add_to_run(index, body_bytes, labels, parent)
            return
        begun = sends.begin(self.topic, body_bytes, *labels, parent)
        if begun is not None:
            self._add_begun(index, *begun)

    def draw(self, index: int) -> None:
        """Decides which of the messages from `index` on get a trace."""
        length = RUN_MESSAGES if sends.may_be_light(None, None) else 1
        self.traced_next = index + length * spans.head.gap()
        self.run_past = self.traced_next + length

    def _add_to_run(
        self, index: int, body_bytes: int, labels: Labels, parent: SpanContext | None
    ) -> None:
        if self.run is None:
            self.run = sends.SpanRun()
            self.sends.append((index, self.run))
        self.run.begin(index, body_bytes, labels[0], labels[1], parent)
        self.traced = True
        self.size += sends.ENTRY_BYTES

    def _add_begun(self, first: int, begun: sends.Begun, encoded: Sequence[bytes]) -> None:
        self.traced = True
        self.sends.append((first, begun))
        if encoded:
            self.carried.append((first, encoded))
            self.size += len(encoded[0]) * len(encoded)

    def fill(
        self,
        bodies: list[bytes],
        extras: Extras | None,
        due_value: int,
        begun: Sequence[Begun] = (),
    ) -> None:
        """All but `bodies`, of a list that shares everything but what traces add."""
        count = len(bodies)
        self.size = sum(map(len, bodies)) + RECORD_BYTES * count
        if extras is not None:
            self.extras = [extras.encoded] * count
            self.traced = extras.traced
            self.tag_hashes, self.key_hashes = extras.tag_hash, extras.key_hash
            self.size += len(extras.encoded) * count
        for each in begun:
            self._add_begun(*each)
        if self.due_field:
            self.due_values = [due_value]

    def cut(self) -> None:
        """Only what has a body stays, without spans: a call that added more was interrupted."""
        for column in (self.extras, self.tag_hashes, self.key_hashes, self.due_values):
            if isinstance(column, list):
                del column[len(self.bodies) :]
        self.sends, self.carried, self.run = [], [], None

    @property
    def timed(self) -> bool:
        """Whether it goes to the timer topic first."""
        return self.due_field != 0

    def encode(self, queue_id: int, numbers: Numbers) -> bytes:
        """The batch's request with these numbers; the columns are given up for it."""
        if self.encoded:
            # Another lane may count the same numbers: the queue decides as well.
            if (self.queue_id, self.epoch, self.sequence) != (queue_id, *numbers[1:]):
                self.encoded = batch_encoding.renumbered(self.encoded, queue_id, numbers)
        else:
            self.encoded = self._encode(queue_id, numbers)
            self._count = self.count
            self.bodies, self.extras, self.due_values = [], None, []
            self.carried = []
            self.tag_hashes = self.key_hashes = 0
        self.queue_id = queue_id
        self.epoch, self.sequence = numbers.epoch, numbers.sequence
        return self.encoded

    def parts(self) -> tuple[list[bytes], array[int]]:
        """The pieces of the encoded records, and the sizes of these."""
        carried = self.carried if self.run is None else [*self.carried, *self.run.carried()]
        return batch_encoding.records_and_sizes(
            self.bodies, self.extras, self.id_head, self.born, carried
        )

    def _encode(self, queue_id: int, numbers: Numbers) -> bytes:
        parts, sizes = self.parts()
        due_values = b""
        if self.due_field:
            due_values = batch_encoding.due_array(self.due_field, self.due_values)
        return batch_encoding.request(
            self.number,
            self.topic,
            queue_id,
            numbers,
            parts,
            sizes,
            batch_encoding.packed32(self.tag_hashes, self.count),
            batch_encoding.packed32(self.key_hashes, self.count),
            self.due_field,
            due_values,
            untraced=not self.traced,
        )

    def leave_out(self, error: DuemqError) -> bool:
        """Fails messages that are too large by a refusal; whether others are left."""
        if error.field not in ("body", "properties") or not error.limit.isdecimal():
            return False
        limit = int(error.limit)
        request = SendRequest.FromString(self.encoded)
        sent = request.batches[0]
        left = [index for index in range(self.count) if index not in self.errors]
        records = sent.records.records
        for place in reversed(range(len(left))):
            if (size := _size_of(records[place], error.field)) > limit:
                self.errors[left[place]] = type(error)(
                    f"{error.field}: {size} bytes, at most {limit}",
                    field=error.field,
                    value=size,
                    limit=limit,
                )
                for column in (sent.delays_ms, sent.due_ms, sent.delay_levels, records):
                    if len(column) == len(records):  # not one for all
                        del column[place]
        for column in (sent.sizes, sent.tag_hashes, sent.key_hashes):
            del column[:]  # the broker makes them
        self.encoded = request.SerializeToString()
        return 0 < len(records) < len(left)

    def stored(
        self,
        broker: str,
        store_id: int,
        queue_id: int,
        base_offset: int,
        store_ms: int,
        due_ms: bytes,
    ) -> None:
        """The broker has it.  `wake` then tells who waits."""
        self.broker, self.store_id = broker, store_id
        self.queue_id, self.base_offset = queue_id, base_offset
        self.store_ms, self.due_ms = store_ms, due_ms
        self.error = next(iter(self.errors.values()), None)
        self.gaps = sorted(self.errors)
        self._settle()

    def failed(self, error: DuemqError) -> None:
        """It is given up.  `wake` then tells who waits."""
        self.error = error
        if self.errors:
            self.errors = dict.fromkeys(range(self.count), error) | self.errors
        self._settle()

    def _settle(self) -> None:
        self._count = self.count
        self.bodies, self.extras, self.encoded = [], None, b""
        self.carried = []
        self.growing, self.run = {}, None  # whose receipt is kept, or pickled, keeps no others
        # Before `wake`: a waiter that comes after the list was taken looks at `done` again.
        self.done = True

    def wake(self, server: str = "") -> None:
        """Its outcome is known: ends its spans and calls who waits.

        `server`: the address of the broker that has it, for the spans.
        """
        if self.sends:
            begun, self.sends, self.run = self.sends, [], None
            try:
                self._end(begun, server)
            except Exception:
                log.exception("spans of messages to topic %s failed", self.topic)
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def _end(self, begun: list[tuple[int, sends.Begun]], server: str) -> None:
        if not self.errors:
            sends.end(self, begun, server)
            return
        for index, span in sends.one_by_one(begun):
            own = copy(self)
            own.error = self.error_of(index)
            own.base_offset += self.place_of(index) - index
            sends.end(own, [(index, span)], server)

    def check_callback(self, callback: object) -> None:
        """Raises InvalidArgument for what is none."""
        checks.plain_function("callback", callback, "a receipt")

    def on_done(self, wake: Callable[[], None]) -> bool:
        """Has `wake` called once the batch is done; False: it is done, do not wait.

        From any thread.  `wake` runs in the event loop, or never when the answer is False.
        """
        if self.done:
            return False
        self.waiters.append(wake)
        return not self.done

    def tell(self, first: int, count: int = 1) -> None:
        """Somebody waits for the outcome of these messages, or sees it.  From any thread."""
        if self.told is None:
            self.told = []
        self.told.append((first, count))

    def untell(self, first: int, count: int = 1) -> None:
        """Takes `tell` back: who waited waits no more."""
        assert self.told is not None
        self.told.remove((first, count))

    def untold(self) -> Sequence[int]:
        """The messages of whose outcome nobody knows."""
        pieces = tuple(self.told or ())  # other threads change it
        told = {index for first, count in pieces for index in range(first, first + count)}
        return [index for index in range(self.count) if index not in told]

    def error_of(self, index: int) -> DuemqError | None:
        """Why the message at `index` is not stored."""
        return self.errors.get(index) if self.errors else self.error

    def place_of(self, index: int) -> int:
        """Of the message at `index` among those stored."""
        return index - bisect_left(self.gaps, index)

    def replaced_of(self, index: int) -> str | None:
        """The timer handle of what the message at `index` replaced."""
        return None

    def message_id(self, index: int) -> str:
        """Of the message at `index`."""
        return f"{self.id_head.decode()}{index:03x}"

    def due_ms_of(self, index: int) -> int:
        """When the message at `index` is due, as the broker resolved it."""
        (due_ms,) = _DUE_MS.unpack_from(self.due_ms, _DUE_MS.size * self.place_of(index))
        return int(due_ms)

    def handle_of(self, index: int) -> str:
        """The timer handle of the message at `index`."""
        offset = self.base_offset + self.place_of(index)
        return handle.encode(self.store_id, self.queue_id, offset, self.due_ms_of(index))


def _size_of(record: Record, field: str) -> int:
    """What brokers limit of it: the body or the properties."""
    if field == "body":
        return len(record.body)
    entry = Record.PropertiesEntry
    return sum(entry(key=k, value=v).ByteSize() for k, v in record.properties.items())


def may_begin(extras: Extras | None, parent: SpanContext | None) -> bool:
    """Whether messages may get a trace: not where they have no room for it."""
    if parent is sends.UNSAMPLED:
        return False
    return extras is None or len(extras.encoded) <= PROPERTIES_BYTES_DEFAULT - TRACE_BYTES_MAX
