"""Where a shard's timers lie, and how they move between memory and disk.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

        admit ── due soon, and room? ── yes ──► near ◄─────────────┐
                          │                      │ evict           │ end_load
                          no                     ▼                 │
                          └───────────────► memtable ─ flush ► blocks

It owns the memtable and `flushing`: the frozen memtable, or due timers that are being parked
(parking.py), one at a time.  The near table and the blocks' files are the scheduler's.  What is to
move, and when, says housekeeping.py: `begin_*` answers a job that is run in a thread, `end_*` takes
over what it did, `undo_flush` takes back what found no space.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from duemq.errors import InvariantError
from duemq_server.timer_service.far.due_counts import DueCounts
from duemq_server.timer_service.far.far_segments import FarSegments, Flush
from duemq_server.timer_service.far.loading import Load, Piecewise
from duemq_server.timer_service.far.memtable import Memtable, Piece
from duemq_server.timer_service.far.numbering import Numbering
from duemq_server.timer_service.far.tombstones import Tombstones
from duemq_server.timer_service.scheduling.topic_counts import TopicCounts
from duemq_server.timer_service.timers.keys import KeyList
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import TargetId
from duemq_server.timer_service.timers.near import BLOB_BYTES, Near
from duemq_server.timer_service.timers.rows import Blob, Rows, concatenate, runs
from duemq_server.timer_service.timers.wheel import Ids

SPARSE = 4  # less than one in so many bytes needed: copy those, let go of the rest


class Tiers:
    """Near, memtable and blocks, and the ways between them."""

    def __init__(
        self,
        limits: Limits,
        near: Near,
        segments: FarSegments,
        numbers: Numbering,
        topics: TopicCounts,
        tombstones: Tombstones,
        due_counts: DueCounts,
    ) -> None:
        self.limits = limits
        self.memtable = Memtable()
        self.flushing: list[Piece] = []
        self._frozen = KeyList()  # of `flushing`
        self._near = near
        self._segments = segments
        self._numbers = numbers
        self._topics = topics
        self._tombstones = tombstones
        self._due_counts = due_counts

    # -- far, and in no block yet -----------------------------------------

    def pieces(self) -> list[Piece]:
        """What lies in the memtable or is being written out, cancelled timers included."""
        return [*self.memtable.pieces, *self.flushing]

    def lists(self) -> tuple[tuple[KeyList, list[Piece]], tuple[KeyList, list[Piece]]]:
        """The same with the timers' keys: the memtable, and what is being written out."""
        return (self.memtable.keys, self.memtable.pieces), (self._frozen, self.flushing)

    # -- into memory ------------------------------------------------------

    def admit(self, rows: Rows, blob: Blob, now_ms: int, *, force: bool = False) -> None:
        """Puts timers where they belong: near if due soon and if there is room, or far.

        `force`: near even if there is no room.
        """
        near = rows.due_ms < self.horizon_ms(now_ms)
        if not force and not self._near.has_room(len(rows), min(len(blob.data), _body_bytes(rows))):
            near[:] = False
        if near.all():
            self._add_near(rows, blob)
        elif not near.any():
            self.memtable.add(rows, blob)
        else:
            self._add_near(rows.take(near), blob)
            self.memtable.add(rows.take(~near), blob)

    def horizon_ms(self, now_ms: int) -> int:
        """Timers due before this are kept in memory; it comes closer as memory fills."""
        self._near.wheel.catch_up(now_ms)
        fill = max(
            len(self._near) / self.limits.near_rows_max,
            self._near.bytes / self.limits.near_bytes_max,
        )
        share = min(1.0, max(0.05, 2 * (1 - fill)))
        return min(now_ms + int(self.limits.near_window_ms * share), self._near.wheel.horizon_ms)

    def _add_near(self, rows: Rows, blob: Blob) -> None:
        if rows.body_bytes() * SPARSE >= len(blob.data):
            self._near.add(rows, blob)
            return
        ends = rows.ends()
        breaks = np.flatnonzero(rows.home[1:] != ends[:-1]) + 1
        starts = [0, *breaks.tolist(), len(rows)]
        for first, last in itertools.pairwise(starts):
            start, end = int(rows.home[first]), int(ends[last - 1])
            data = bytes(blob.data[start - blob.start : end - blob.start])
            self._near.add(rows.slice(first, last), blob._replace(data=data, start=start))

    def pull_near(self, now_ms: int) -> None:
        """Moves timers of the memtable that became near."""
        horizon = self.horizon_ms(now_ms)
        if self.memtable.min_due_ms is None or self.memtable.min_due_ms >= horizon:
            return
        for rows, blob in self._live_pieces(self.memtable.take_before(horizon), now_ms):
            self.admit(rows, blob, now_ms)

    def evict(self, due_ms: int) -> None:
        """Moves near timers that are due at or after `due_ms` back to the memtable."""
        for rows, blob in self._near.evict(due_ms):
            self.memtable.add(rows, blob)

    # -- cancelled meanwhile ----------------------------------------------

    def drop_cancelled(self, rows: Rows, now_ms: int) -> Rows:
        """Rows without those that were cancelled while they lay far."""
        cancelled = self._meet_cancelled(rows, now_ms)
        return rows if cancelled is None else rows.take(~cancelled)

    def _meet_cancelled(self, rows: Rows, now_ms: int) -> npt.NDArray[np.bool_] | None:
        """Which rows were cancelled while they lay far, None: none; they are gone from now on."""
        cancelled = self._tombstones.meet(rows, now_ms)
        if cancelled is not None:
            self._topics.met(rows.target[cancelled])
        return cancelled

    def _live_pieces(self, pieces: list[Piece], now_ms: int) -> list[Piece]:
        """The pieces without cancelled timers; the same list if there are none."""
        if not self._tombstones.unmet or not pieces:
            return pieces
        joined = concatenate([rows for rows, _ in pieces])
        cancelled = self._meet_cancelled(joined, now_ms)
        if cancelled is None:
            return pieces
        live, end = [], 0
        for rows, blob in pieces:
            start, end = end, end + len(rows)
            gone = cancelled[start:end]
            if gone.any():
                rows = rows.take(~gone)
            if len(rows):
                live.append((rows, blob))
        return live

    # -- jobs (see housekeeping.py) -----------------------------------------

    def memtable_full(self) -> bool:
        """Whether the memtable must be flushed."""
        limits = self.limits
        rows, size = limits.memtable_rows_max, limits.memtable_bytes_max
        return self.memtable.rows >= rows or self.memtable.bytes >= size

    def begin_flush(self, now_ms: int) -> Flush:
        """Freezes the memtable into a job that writes it into blocks."""
        self.check_idle()
        memtable, self.memtable = self.memtable, Memtable()
        self.flushing, self._frozen = self._live_pieces(memtable.pieces, now_ms), memtable.keys
        if self.flushing is not memtable.pieces:
            self._frozen = KeyList.of(rows for rows, _ in self.flushing)
        return self._segments.flush(self.flushing, self._numbers.tables(), now_ms)

    def begin_park(self, due: Iterable[tuple[Ids, TargetId]], now_ms: int) -> Flush | None:
        """Takes due timers of these targets out of memory, into a job; None: all were cancelled."""
        self.check_idle()
        parked: list[TargetId] = []
        for ids, target in due:
            pieces = self._near.detach(ids)
            self.flushing += pieces
            parked += [target] * len(pieces)
        self._frozen = KeyList.of(rows for rows, _ in self.flushing)
        if not self.flushing:
            return None
        return self._segments.flush(self.flushing, self._numbers.tables(), now_ms, parked)

    def check_idle(self) -> None:
        """Raises InvariantError while a flush is running."""
        if self.flushing:
            raise InvariantError("a flush is running")

    def end_flush(self, flush: Flush) -> None:
        """The frozen memtable, or what was parked, is in blocks."""
        self._segments.flushed(flush)
        self._topics.written(rows for rows, _ in self.flushing)
        self.flushing, self._frozen = [], KeyList()

    def end_load(self, load: Load, now_ms: int, *, force: bool = False) -> None:
        """What was loaded becomes near."""
        self._segments.loaded(load)
        pieces = [piece for piece in load.pieces if len(piece.rows)]
        if pieces:
            self._admit_loaded(pieces, now_ms, force)
        for piece in load.pieces:
            if piece.block.cursor == piece.block.count:
                self._due_counts.done(piece.block)

    def _admit_loaded(self, pieces: Sequence[Piecewise], now_ms: int, force: bool) -> None:
        """`admit` of many pieces at once; those of which little is left, or not near, singly."""
        counts = [len(piece.rows) for piece in pieces]
        rows = self._numbers.translate_all(pieces)
        of = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
        self._topics.loaded(rows)
        cancelled = self._meet_cancelled(rows, now_ms)
        if cancelled is not None:
            rows, of = rows.take(~cancelled), of[~cancelled]
        if len(self._due_counts):
            slots = self._topics.slots(rows.target)
            for first, last in runs(of):
                block = pieces[int(of[first])].block
                self._due_counts.loaded(block, slots[first:last], rows.due_ms[first:last])
        blobs = [piece.blob for piece in pieces]
        kept = np.bincount(of, weights=rows.size, minlength=len(blobs)) * SPARSE
        sparse = kept < [len(blob.data) for blob in blobs]
        room = force or self._near.has_room(len(rows), sum(len(blob.data) for blob in blobs))
        together = (rows.due_ms < self.horizon_ms(now_ms)) & ~sparse[of]
        if room and together.any():
            self._near.add_from(rows.take(together), blobs, of[together])
            rows, of = rows.take(~together), of[~together]
        for first, last in runs(of):
            self.admit(rows.slice(first, last), blobs[int(of[first])], now_ms, force=force)

    def undo_flush(self) -> None:
        """No space: what was to be written is in the memtable again, before what came since.

        What was to be parked as well: it is near again as soon as memory has room.
        """
        pieces = [*self.flushing, *self.memtable.pieces]
        self.memtable, self.flushing, self._frozen = Memtable(), [], KeyList()
        for rows, blob in pieces:
            self.memtable.add(rows, blob)

    # -- figures ----------------------------------------------------------

    def targets(self) -> set[int]:
        """Numbers of the targets of all that memory holds; far timers that are gone included."""
        near = self._near.table.target[self._near.pending_ids()]
        there = np.concatenate([near, *(rows.target for rows, _ in self.pieces())])
        return set(np.flatnonzero(np.bincount(there)).tolist())

    def held(self) -> int:
        """Timers counted where they lie; equal to the ledger's `pending`."""
        flushing = sum(len(rows) for rows, _ in self.flushing)
        far = self.memtable.rows + flushing + self._segments.pending
        return self._near.pending + far - self._tombstones.unmet

    def overdue(self, now_ms: int) -> int:
        """Timers that are due and not dispatched, wherever they lie.

        Of a block of which only a part is due, one is counted.
        """
        rows = self._near.table.take(self._near.pending_ids())
        parts = [rows, *(rows for rows, _ in self.pieces())]
        in_memory = sum(int((rows.due_ms <= now_ms).sum()) for rows in parts)
        return in_memory + self._segments.overdue(now_ms)

    def next_due_ms(self) -> int | None:
        """Due time of the first pending timer, wherever it lies; None: none is pending.

        Cancelled ones that were not met yet are included.
        """
        near = self._near.table.due_ms[self._near.pending_ids()]
        in_memory = [near, *(rows.due_ms for rows, _ in self.pieces())]
        dues = [int(each.min()) for each in in_memory if len(each)]
        dues += [each.next_due_ms for each in self._segments.blocks()]
        return min(dues, default=None)


def _body_bytes(rows: Rows) -> int:
    """What sparse timers cost: each its body and a blob of its own, at most."""
    return SPARSE * rows.body_bytes() + BLOB_BYTES * len(rows)
