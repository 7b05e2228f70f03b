"""Lanes: batches on their way to one queue, in order, each stored exactly once.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A lane is one idempotent producer's sequence at (broker, topic, queue).  A batch's life:

    BUILT ── DISPATCH entry durable ──► DURABLE ── sent ──► ON THE WIRE ── stored ──► gone (ACK)
                                           ▲                    │
                                           └── refused, or ─────┘
                                               connection lost: sent again, same number, same timers

A DISPATCH entry may be written a moment before its timers are due, so that its sync is over by
then; `ready_ms` keeps the batch back, also after a restart.  Who has time sends it before
(`goes_ms`), for the broker to show each timer when that is due.  When the clock goes back it is not
kept back (`release_held`): the batch would hold up its queue for as long as the step.

Up to `WIRE_MAX` batches of a lane are on the wire.  Brokers take a lane's batches strictly by
sequence, so if one is refused those behind it are refused too: the lane waits until every answer
is in, and begins anew with its first batch.  Until a broker has stored one batch of the lane on
this connection only one is on the wire: a broker that does not know the lane accepts any sequence
as the start, and must not see the second batch after it refused the first.

A broker that answers OUT_OF_SEQUENCE to a lane's first batch has lost batches it had stored (its
data were restored from an older copy).  The lane then gets a new epoch and numbers its batches
from 0; what the broker lost stays lost, and nothing is stored twice.

So does each lane at the first batch that a start gives it: this state may be an older copy itself,
and the next numbers those of other batches that a broker has stored, which would be answered as
repeats of them.  What was not answered before keeps its numbers, and goes first; if a start since
the copy was made has begun an epoch there (FENCED_PRODUCER), it gets another one, too.

A lane of which all is answered is forgotten once its broker has deleted the topic, and with it what
it knew of the lane.  Should there be such a queue again, it begins anew, in a later epoch than any
that was forgotten.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq_server.timer_service.timers.fired_records import fired
from duemq_server.timer_service.timers.log_entries import LaneId
from duemq_server.timer_service.timers.rows import Blob, Rows

WIRE_MAX = 4  # batches of a lane on the wire
UNACKED_MAX = 8  # batches of a lane that are dispatched and not answered
NO_TARGET = -1
EARLY_MS_MAX = (1 << 32) - 1  # of `Batch.early_ms`
EPOCH_FROM_CLOCK_MAX = 0xFF00_0000  # of 32 bits: a clock that is wrong for once leaves room
RETRY_MS_MIN = 20
RETRY_MS_MAX = 5_000
RETRY_STEPS = 50  # moments within such a wait: thousands of lanes go in a few requests


class FireOutcome(enum.Enum):
    """What a broker said of a batch."""

    STORED = enum.auto()
    OUT_OF_SEQUENCE = enum.auto()
    """Also: a later epoch has begun, of a start before this one."""
    REFUSED = enum.auto()
    """The broker cannot store anything now."""
    REJECTED = enum.auto()
    """It cannot store this: its topic is gone, say."""


@dataclasses.dataclass(slots=True, eq=False)
class FireBatch:
    """Dispatched timers: bytes to send, and what to remember until they are stored."""

    lane: FireLane
    sequence: int
    position: int  # of its DISPATCH entry
    end: int  # of that entry
    records: bytes
    sizes: bytes
    tag_hashes: bytes
    key_hashes: bytes
    due_ms: npt.NDArray[np.int64]
    durable: bool = False
    target: int = NO_TARGET  # that it was cut from, in this process
    past_due: npt.NDArray[np.bool_] | None = None
    """Which timers were due when they were accepted; not known after a restart."""
    ready_ms: int = 0
    """When the last of its timers is due: it is not sent before, but for `goes_ms`."""
    first_due_ms: int = dataclasses.field(init=False)
    last_due_ms: int = dataclasses.field(init=False)
    """When the last of its timers is due: no broker shows that one before."""
    repeated: bool = False
    """It may have been sent under its number before, and not been answered."""

    def __post_init__(self) -> None:
        self.first_due_ms = int(self.due_ms.min()) if len(self.due_ms) else 0
        self.ready_ms = self.last_due_ms = int(self.due_ms.max()) if len(self.due_ms) else 0

    def goes_ms(self, ahead_ms: int) -> int:
        """When it may be sent if that may be so long before its first timer is due; 0: not."""
        if not ahead_ms:
            return self.ready_ms
        first_ms, last_ms = self.first_due_ms, self.last_due_ms
        return min(self.ready_ms, max(first_ms - ahead_ms, last_ms - FIRE_AHEAD_MS_MAX))

    def early_ms(self, now_ms: int) -> bytes:
        """So much before the last one each may be seen, u32; empty: all at once, or they are due.

        In the batch's order: one that is due sooner than one before it is seen with that.
        """
        last_ms = self.last_due_ms
        if last_ms <= now_ms or self.first_due_ms == last_ms:
            return b""
        early_ms = last_ms - np.maximum.accumulate(self.due_ms)
        return np.minimum(early_ms, EARLY_MS_MAX).astype("<u4").tobytes()

    @property
    def count(self) -> int:
        """Timers in the batch."""
        return len(self.due_ms)


class FireLane:
    """One lane's batches, oldest first."""

    def __init__(self, lane_id: LaneId, epoch: int = 0, next_sequence: int = 0) -> None:
        self.id = lane_id
        self.epoch = epoch
        self.begun = False
        """Since the start of the process: its epoch is of that."""
        self.next_sequence = next_sequence
        self.unacked: deque[FireBatch] = deque()
        self.unacked_bytes = 0
        self.failures = 0  # in a row
        self.retry_at_ms = 0
        self.rejected = False
        self.reason = ""  # of the last refusal
        self._wire: list[FireBatch] = []
        self._proven = False
        self._failed = False
        self._forgotten = False

    def push(self, batch: FireBatch) -> None:
        """Adds a batch that was built; its sequence is `next_sequence`."""
        self.unacked.append(batch)
        self.unacked_bytes += len(batch.records)
        self.next_sequence = batch.sequence + 1

    def full(self) -> bool:
        """Whether no further batch should be built."""
        return len(self.unacked) >= (UNACKED_MAX if self.begun else 1)

    @property
    def unused(self) -> bool:
        """Whether it never had a batch."""
        return not (self.epoch or self.next_sequence)

    def next_epoch(self, now_ms: int) -> int:
        """Of a start: later ones have greater ones, also of a copy of what is here now."""
        return max(self.epoch + 1, min(now_ms // 1_000, EPOCH_FROM_CLOCK_MAX))

    def next_to_send(self, now_ms: int, ahead_ms: int = 0) -> FireBatch | None:
        """The batch to put on the wire now, or None; `ahead_ms`: see `FireBatch.goes_ms`."""
        batch = self._next()
        if batch is None or now_ms < max(self.retry_at_ms, batch.goes_ms(ahead_ms)):
            return None
        return batch

    def held_until_ms(self, ahead_ms: int = 0) -> int:
        """When the next batch may go on the wire; 0: none, or not before an answer came."""
        batch = self._next()
        return 0 if batch is None else max(self.retry_at_ms, batch.goes_ms(ahead_ms))

    def _next(self) -> FireBatch | None:
        sent = len(self._wire)
        if self._failed or sent >= (WIRE_MAX if self._proven else 1) or sent >= len(self.unacked):
            return None
        batch = self.unacked[sent]
        return batch if batch.durable else None

    def release_held(self, now_ms: int) -> None:
        """Keeps no batch back for longer than until `now_ms`."""
        for batch in self.unacked:
            batch.ready_ms = min(batch.ready_ms, now_ms)

    def sent(self, batch: FireBatch) -> None:
        """The batch is on the wire."""
        self._wire.append(batch)

    def answered(
        self, batch: FireBatch, outcome: FireOutcome, now_ms: int, jitter: float, reason: str = ""
    ) -> bool:
        """Takes an answer in; True if the batch is stored.

        `jitter` is 0 to 1; `reason` says why the broker refused it.
        """
        if batch not in self._wire:
            return False  # of a connection that was given up
        first = self.unacked[0] is batch
        self.reason = reason or self.reason
        self._wire.remove(batch)
        if outcome is FireOutcome.STORED:
            self.forget(batch)
            self.failures = 0
            self.rejected = False
            self.reason = ""
            self._proven = True
        elif not self._failed:
            self._failed = True
            self.rejected = outcome is FireOutcome.REJECTED
            self._forgotten = first and outcome is FireOutcome.OUT_OF_SEQUENCE
            self.retry_at_ms = self._retry_ms(now_ms, jitter)
            self.failures += 1
        if not self._wire:
            self._failed = False
            if self.failures:
                self._proven = False
        return outcome is FireOutcome.STORED

    def forget(self, batch: FireBatch) -> None:
        """The batch is stored."""
        self.unacked.remove(batch)
        self.unacked_bytes -= len(batch.records)

    def must_restart(self) -> bool:
        """Whether the broker has forgotten the lane's sequence: see `restart`."""
        return self._forgotten and not self._wire

    def restart(self, epoch: int) -> None:
        """Begins a new epoch; batches that are not stored keep their order."""
        self._forgotten = self._proven = False
        self.epoch = epoch
        for sequence, batch in enumerate(self.unacked):
            batch.sequence, batch.repeated = sequence, False
        self.next_sequence = len(self.unacked)

    def disconnected(self) -> None:
        """Nothing that is on the wire will be answered."""
        for batch in self._wire:
            batch.repeated = True
        self._wire.clear()
        self._proven = False
        self._failed = False
        self._forgotten = False
        self.retry_at_ms = 0

    def _retry_ms(self, now_ms: int, jitter: float) -> int:
        longest = min(RETRY_MS_MAX, RETRY_MS_MIN << min(self.failures, 16))
        at_ms = now_ms + int(longest * (0.5 + jitter / 2))
        return at_ms - at_ms % max(longest // RETRY_STEPS, 1)


def make_batch(
    rows: Rows, blobs: Sequence[Blob | None], lane: FireLane, sequence: int, position: int, end: int
) -> FireBatch:
    """A batch out of rows and the blobs that their bodies lie in."""
    slices = (
        (blob.data, home - blob.start, size, due_ms)
        for blob, home, size, due_ms in zip(
            blobs, rows.home.tolist(), rows.size.tolist(), rows.due_ms.tolist(), strict=True
        )
        if blob is not None
    )
    pieces, sizes = fired(slices)
    return FireBatch(
        lane,
        sequence,
        position,
        end,
        b"".join(pieces),
        sizes.tobytes(),
        rows.tag_hash.tobytes(),
        rows.key_hash.tobytes(),
        rows.due_ms,
    )
