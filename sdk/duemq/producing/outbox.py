"""What waits to be sent, bounded by bytes.  Shared by the callers' threads and the event loop.

Callers add messages to growing batches; the pump takes batches out in the order they were begun,
and seals a batch only when it can send it, so that batches grow exactly while they wait.  Nobody
waits in here: who finds no room registers to be woken.  No clock, no I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from duemq.errors import Closed, InvalidArgument, TooLarge, TopicNotFound
from duemq.producing.batch import NO_LABELS, PLAIN, RECORD_BYTES, Batch, Begun, Labels, Way
from duemq.producing.batch_encoding import BLOCK_MESSAGES, NO_EXTRAS, Extras
from duemq.protocol.balance import queue_of_key
from duemq.protocol.due import Due
from duemq.protocol.limits import BATCH_BYTES_DEFAULT, KIB, MESSAGE_BYTES_DEFAULT
from duemq.protocol.message_ids import MessageIds
from duemq.protocol.route import Queue

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext


# Beyond this age (of the wall clock, either way) a batch takes no messages, so that their deadlines
# are at most so much too early.
BATCH_AGE_MS_MAX = 1_000
BODY_BYTES_MAX = BATCH_BYTES_DEFAULT - 64 * KIB
"""Of a message, whatever the brokers allow: more does not fit a batch."""


@dataclass(slots=True, eq=False)
class Target:
    """A topic that messages are sent to."""

    topic: str
    queues: tuple[Queue, ...]
    """All known, sorted: what ordering keys are spread over (route.RouteCache.keyed)."""
    traced: bool
    found: bool = True
    """False until `queues` is known: what is sent to it waits."""
    growing: dict[Way, Batch] = field(default_factory=dict)
    """The batch that takes messages now, for each way to travel."""

    def queue_for(self, ordering_key: str) -> Queue:
        """The queue of an ordering key: the same for every client that knows the same queues.

        Raises TopicNotFound.
        """
        queues = self.queues  # once: the event loop changes it
        if not queues:
            raise TopicNotFound(
                f"no broker takes messages for topic {self.topic!r} now",
                field="topic",
                value=self.topic,
                retryable=True,
            )
        return queues[queue_of_key(ordering_key, len(queues))]


class Outbox:
    """One producer's."""

    def __init__(
        self,
        limit_bytes: int,
        frame_bytes: int,
        wake_pump: Callable[[], object],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`wake_pump` is called, from any thread, when a batch begins and the pump is asleep, or a
        call was interrupted; `check` raises Closed where nobody may add."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """Accepted and not yet answered."""
        self.lock = threading.Lock()  # guards growing batches, arrivals, used_bytes, _asleep
        # A batch may overshoot it by a body.
        self.frame_bytes = min(frame_bytes, BODY_BYTES_MAX - MESSAGE_BYTES_DEFAULT)
        self._wake_pump = wake_pump
        self.check = check
        self._asleep = True
        self.arrivals: deque[Batch] = deque()
        """Begun since the last `take_arrivals`."""
        self._waiting_for_room: deque[Callable[[], None]] = deque()
        self._closed = ""  # or why it is
        self.begun = 0
        """Batches so far."""
        self.tracing = False
        """Somebody wants spans, as of when the last batch began."""
        self._ids = MessageIds()

    # ── callers ──────────────────────────────────────────────────────────────────────

    @property
    def full(self) -> bool:
        """No room now.  Soft: each thread may overshoot by one message."""
        return self.used_bytes >= self.limit_bytes

    def add(
        self,
        target: Target,
        queue: Queue | str | None,
        body: bytes,
        extras: Extras | None,
        due: Due | None,
        now_ms: int,
        labels: Labels = NO_LABELS,
        parent: SpanContext | None = None,
    ) -> tuple[Batch, int]:
        """Adds a message; answers its batch and its index in it.  Raises Closed.

        `labels`, `parent`: for its span.
        The hottest path of a producer that sends one by one: flat on purpose.
        """
        way = PLAIN if queue is None and due is None else (queue, due.way if due else 0)
        size = len(body) + RECORD_BYTES
        if extras is not None:
            size += len(extras.encoded)
        wake = False
        try:
            with self.lock:
                try:
                    batch = target.growing.get(way)
                    if (
                        batch is None
                        or batch.size + size > self.frame_bytes
                        or len(batch.bodies) >= BLOCK_MESSAGES
                        or abs(now_ms - batch.begun_ms) > BATCH_AGE_MS_MAX
                        or self._closed
                    ):
                        batch, wake = self._begin(target, way, now_ms)
                        target.growing[way] = batch
                        if self.tracing and target.traced:
                            batch.draw(0)
                    index = len(batch.bodies)
                    if index >= batch.traced_next or parent is not None:
                        before = batch.size
                        batch.trace(index, len(body), extras, labels, parent)
                        self.used_bytes += batch.size - before
                    if extras is not None or batch.extras is not None:
                        batch.add_extras(extras or NO_EXTRAS)
                    if due is not None:
                        batch.due_values.append(due.value)
                    batch.bodies.append(body)
                    if batch.born_ms != now_ms:
                        batch.born_at(index, now_ms)
                    batch.size += size
                    self.used_bytes += size
                except BaseException:
                    self._interrupted(target, way)
                    raise
            if wake:
                self._wake_pump()
        except BaseException as error:
            try:
                with self.lock:
                    self._interrupted(target, way)
            finally:  # others may have added to a batch of which the pump was not told
                if not isinstance(error, Closed):
                    self._wake_pump()
            raise
        return batch, index

    def add_list(
        self,
        target: Target,
        queue: Queue | None,
        bodies: list[bytes],
        extras: Extras | None,
        due: Due | None,
        now_ms: int,
        begun: Sequence[Begun] = (),
    ) -> Batch:
        """Adds bodies that share everything else as a batch of their own.  Raises Closed.

        `begun`: their spans.

        The caller cuts the list: BLOCK_MESSAGES and frame_bytes are the limits.
        """
        way = (queue, due.way if due else 0)
        try:
            with self.lock:
                batch, wake = self._begin(target, way, now_ms)
                # What comes later on this way must not overtake it in an older batch.
                target.growing.pop(way, None)
                batch.fill(bodies, extras, due.value if due else 0, begun)
                self.used_bytes += batch.size
                batch.bodies = bodies  # last: without them nothing is sent
            if wake:
                self._wake_pump()
        except BaseException as error:  # as in `add`: a function's first line can be interrupted
            try:
                with self.lock:
                    self._interrupted(target, way)
            finally:
                if not isinstance(error, Closed):
                    self._wake_pump()
            raise
        return batch

    def _interrupted(self, target: Target, way: Way) -> None:
        """As a signal's handler raises, at any line: the next begins a batch."""
        self._asleep = True
        if not self._closed and (batch := target.growing.pop(way, None)) is not None:
            batch.cut()

    def reserve(self, size: int) -> None:
        """Counts what is kept elsewhere, until `release`.  Raises Closed."""
        with self.lock:
            self._check_open()
            self.used_bytes += size

    def on_room(self, wake: Callable[[], None]) -> bool:
        """Has `wake` called when there is room, or the outbox closes; False: there is room."""
        with self.lock:
            if not self.full or self._closed:
                return False
            self._waiting_for_room.append(wake)
            return True

    # ── the event loop ───────────────────────────────────────────────────────────────

    def take_arrivals(self) -> list[Batch]:
        """The batches begun since the last call, in that order.  They may still be growing."""
        if not self.arrivals:
            return []  # who begins one from now on wakes the pump
        with self.lock:
            arrivals = [each for each in self.arrivals if each.bodies]  # none: see `_interrupted`
            self.arrivals.clear()
            self._asleep = True
            return arrivals

    def seal(self, batch: Batch) -> None:
        """Ends a batch's growth."""
        with self.lock:
            if batch.growing.get(batch.way) is batch:
                del batch.growing[batch.way]

    def release(self, size: int) -> None:
        """A batch of that size is done."""
        with self.lock:
            self.used_bytes -= size
            if self.full or not self._waiting_for_room:
                return
            woken, self._waiting_for_room = self._waiting_for_room, deque()
        for wake in woken:
            wake()

    def close(self) -> None:
        """Accepts nothing more; who waits for room is woken."""
        with self.lock:
            self._closed = "the producer is closed"
            woken, self._waiting_for_room = self._waiting_for_room, deque()
        for wake in woken:
            wake()

    def orphan(self) -> None:
        """In a forked child nobody empties it, and who holds the lock may not be there."""
        self.lock = threading.Lock()  # guards what the lock it replaces did
        self._closed = "this producer belongs to the parent process: fork before the first client"

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise Closed(self._closed)

    def _begin(self, target: Target, way: Way, now_ms: int) -> tuple[Batch, bool]:
        self._check_open()
        id_head = self._ids.head(now_ms)
        self.begun += 1
        batch = Batch(target.topic, way, target.growing, self.begun, id_head, now_ms)
        wake, self._asleep = self._asleep, False
        self.arrivals.append(batch)
        return batch, wake


def body_of(body: object) -> bytes:
    """A body as bytes.  Raises InvalidArgument for text and other types, TooLarge."""
    if isinstance(body, bytearray | memoryview):
        body = bytes(body)
    if not isinstance(body, bytes):
        hint = ": encode it first" if isinstance(body, str) else ""
        raise InvalidArgument(
            f"body must be bytes, not {type(body).__name__}{hint}",
            field="body",
            value=type(body).__name__,
            limit="bytes, bytearray or memoryview",
        )
    check_size(len(body), BODY_BYTES_MAX)
    return body


def check_size(size: int, limit: int) -> None:
    """Of a body.  Raises TooLarge."""
    if size > limit:
        raise TooLarge(
            f"body has {size} bytes, {limit} are allowed at most",
            field="body",
            value=size,
            limit=limit,
        )


def chunks_of(bodies: Sequence[bytes], message_bytes: int, frame_bytes: int) -> list[list[bytes]]:
    """Cuts bodies into lists of at most `frame_bytes` (or one body) and BLOCK_MESSAGES.

    `message_bytes`: of a message beside its body.
    """
    chunks: list[list[bytes]] = []
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        body_bytes = len(body) + message_bytes
        if chunk and (size + body_bytes > frame_bytes or len(chunk) == BLOCK_MESSAGES):
            chunks.append(chunk)
            chunk, size = [], 0
        chunk.append(body)
        size += body_bytes
    if chunk:
        chunks.append(chunk)
    return chunks
