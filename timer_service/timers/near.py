"""The near timers: a table of columns, with their bodies in memory, and the wheel above it.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A row number is what the wheel and the dispatcher handle.  Free rows lie on a stack; the table
grows by doubling up to `rows_max`.  A row's state says who has it, the clock does not:

    FREE -> WHEEL (add) -> READY (take_due; the dispatcher has it) -> FREE (remove)
              |    ^------------/  (hand_back)    |
              \\-- DROPPED_WHEEL ---- cancelled ---- DROPPED_READY: FREE when it is next met

Bodies are not copied: a row points into a blob, and a blob is let go with its last row.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from duemq.errors import InvariantError
from duemq_server.timer_service.timers.keys import NOWHERE, Keys, RowTable
from duemq_server.timer_service.timers.rows import Blob, Rows, key_of, keys_of, new_rows, runs
from duemq_server.timer_service.timers.wheel import Ids, Wheel

FREE, WHEEL, READY, DROPPED_WHEEL, DROPPED_READY = range(5)
_DROPPED = DROPPED_WHEEL - WHEEL  # from a state to the same one, dropped
_NONE = np.empty(0, dtype=np.int32)
ROW_BYTES = 71  # a row's columns, its link in the wheel, its places on the free stack and by key
BLOB_BYTES = 160  # a blob beside its data
_ROWS_MIN = 4_096


class Near:
    """Timers in memory.  `rows_max` and `bytes_max` bound them; the caller asks for room first."""

    def __init__(self, now_ms: int, rows_max: int, bytes_max: int) -> None:
        self.wheel = Wheel(now_ms)
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.pending = 0
        self.blobs: list[Blob | None] = []
        self._live: list[int] = []  # rows a blob
        self._free_blobs: list[int] = []
        self._capacity = 0
        self._free: Ids = np.empty(0, dtype=np.int32)
        self._free_count = 0
        self._rows = new_rows(0)
        self._blob = np.empty(0, dtype=np.int32)
        self._state = np.empty(0, dtype=np.uint8)
        self._by_key = RowTable(0)
        self._by_timer_key: RowTable | None = None  # of pending rows that have one; None: none did
        self._grow(min(_ROWS_MIN, rows_max))

    def __len__(self) -> int:
        """Rows in use, dropped ones that were not met yet included."""
        return self._capacity - self._free_count

    def has_room(self, rows: int = 1, size: int = 1) -> bool:
        """Whether so much may be added; always, if there is nothing else."""
        fits = len(self) + rows <= self.rows_max and self.bytes + size <= self.bytes_max
        return fits or not len(self)

    def add(self, rows: Rows, blob: Blob) -> None:
        """Takes timers in whose bodies lie in `blob`.  Past due ones come out at once."""
        if len(rows):
            self._add(rows, self._hold(blob, len(rows)))

    def add_from(self, rows: Rows, blobs: Sequence[Blob], of: Ids) -> None:
        """As `add`, where the body of each row lies in another blob: `of` says in which."""
        counts = np.bincount(of, minlength=len(blobs)).tolist()
        held = zip(blobs, counts, strict=True)
        numbers = [self._hold(blob, count) if count else -1 for blob, count in held]
        if len(rows):
            self._add(rows, np.array(numbers, dtype=np.int32)[of])

    def _add(self, rows: Rows, blob: int | Ids) -> None:
        count = len(rows)
        while self._free_count < count:
            self._grow(min(2 * self._capacity, max(self.rows_max, self._capacity + count)))
        self._free_count -= count
        ids = self._free[self._free_count : self._free_count + count].copy()
        self._rows.wide[:, ids] = rows.wide
        self._rows.narrow[:, ids] = rows.narrow
        self._blob[ids] = blob
        self._state[ids] = WHEEL
        self._by_key.add(ids, keys_of(rows.source, rows.offset))
        if rows.timer_key is not None or self._rows.timer_key is not None:
            self._add_timer_keys(ids, rows.timer_keys())
        self.pending += count
        self.wheel.add(ids, rows.due_ms)

    def _add_timer_keys(self, ids: Ids, hashes: Keys) -> None:
        if self._rows.timer_key is None:
            column = np.zeros(self._capacity, dtype=np.uint64)
            self._rows = dataclasses.replace(self._rows, timer_key=column)
        if self._by_timer_key is None:
            self._by_timer_key = RowTable(self._capacity)
        assert self._rows.timer_key is not None
        self._rows.timer_key[ids] = hashes
        keyed = hashes != 0
        self._by_timer_key.add(ids[keyed], hashes[keyed])

    @property
    def table(self) -> Rows:
        """All rows, by number, free ones included; valid until the next `add`."""
        return self._rows

    def blobs_of(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Blob numbers of rows."""
        return self._blob[ids]

    def rows(self, ids: Ids) -> Rows:
        """Rows by number, copied."""
        return self._rows.take(ids)

    def take_due(self, now_ms: int, limit: int) -> Ids:
        """Takes pending rows that are due off the wheel, at most about `limit`, in due order."""
        ids = self.wheel.advance(now_ms, limit)
        if not len(ids):
            return ids
        self._state[ids] += READY - WHEEL
        return self.live(ids)

    def live(self, ids: Ids) -> Ids:
        """The pending ones of rows that were taken off the wheel; the dropped ones are freed."""
        dropped = self._state[ids] != READY
        if not dropped.any():
            return ids
        if (self._state[ids[dropped]] != DROPPED_READY).any():
            raise InvariantError("a timer that was not handed out is treated as due")
        self._release(ids[dropped])
        return ids[~dropped]

    def count_live(self, ids: Ids) -> int:
        """How many of rows that were taken off the wheel are pending."""
        return int((self._state[ids] == READY).sum())

    def hand_back(self, ids: Ids) -> None:
        """Puts pending rows that were taken off the wheel on it again: they are not due."""
        if (self._state[ids] != READY).any():
            raise InvariantError("a timer that was not handed out is handed back")
        self._state[ids] = WHEEL
        self.wheel.add(ids, self._rows.due_ms[ids])

    def remove(self, ids: Ids) -> None:
        """Frees pending rows that were taken off the wheel: they were dispatched."""
        if (self._state[ids] != READY).any():
            raise InvariantError("a timer that was not handed out was dispatched")
        self.pending -= len(ids)
        self._release(ids)

    def drop(self, ids: Ids) -> None:
        """Marks pending rows as gone (cancelled, or found to be dispatched)."""
        if not self._is_pending(ids).all():
            raise InvariantError("a timer that is not pending was dropped")
        self.pending -= len(ids)
        self._state[ids] += _DROPPED
        if self._by_timer_key is not None:
            self._by_timer_key.remove(ids)

    def find(self, source: int, offset: int) -> int:
        """Row number of a pending timer, or -1."""
        return int(self.find_all(np.array([key_of(source, offset)], dtype=np.uint64))[0])

    def find_all(self, keys: Keys) -> Ids:
        """As `find`, of each key (rows.keys_of)."""
        found = self._by_key.find(keys, self._rows)
        state = self._state[found]
        found[(state != WHEEL) & (state != READY)] = NOWHERE
        return found

    def find_timer_keys(self, hashes: Keys) -> tuple[Ids, Ids]:
        """Pairs (place in `hashes`, row) of the pending timers that have these."""
        if self._by_timer_key is None:
            return _NONE, _NONE
        return self._by_timer_key.find_all(hashes, self._rows.timer_keys())

    def body(self, row: int) -> bytes | memoryview:
        """The record of a row."""
        blob = self.blobs[int(self._blob[row])]
        if blob is None:
            raise InvariantError("a timer outlived its body")
        start = int(self._rows.home[row]) - blob.start
        return blob.data[start : start + int(self._rows.size[row])]

    def evict(self, due_ms: int) -> list[tuple[Rows, Blob]]:
        """Takes pending timers out that are due at or after `due_ms`, to make room.

        Costs a pass over the table: for times when memory is short.
        """
        due = self._rows.due_ms
        later = due >= due_ms
        evicted = np.flatnonzero((self._state == WHEEL) & later).astype(np.int32)
        pieces = self._pieces(evicted)
        self.pending -= len(evicted)
        self._release(evicted)
        self._renew_wheel()
        return pieces

    def free_dropped(self) -> bool:
        """Frees dropped rows on the wheel, which else stay until they were due; False: none is.

        Costs a pass over the table, as `evict`, which frees them, too.
        """
        found = bool((self._state == DROPPED_WHEEL).any())
        if found:
            self._renew_wheel()
        return found

    def _renew_wheel(self) -> None:
        """Leaves only pending rows there."""
        self._release(np.flatnonzero(self._state == DROPPED_WHEEL).astype(np.int32))
        kept = self.on_wheel_ids()
        kept = kept.take(np.argsort(self._rows.offset[kept]))  # in a millisecond first in first out
        self.wheel.replace(kept, self._rows.due_ms[kept])

    def detach(self, ids: Ids) -> list[tuple[Rows, Blob]]:
        """Takes pending rows out that are not on the wheel, with their bodies."""
        pieces = self._pieces(ids)
        self.remove(ids)
        return pieces

    def _pieces(self, ids: Ids) -> list[tuple[Rows, Blob]]:
        ids = ids.take(np.argsort(self._blob[ids], kind="stable"))
        numbers = self._blob[ids]
        pieces: list[tuple[Rows, Blob]] = []
        for first, last in runs(numbers):
            blob = self.blobs[int(numbers[first])]
            if blob is None:
                raise InvariantError("a timer outlived its body")
            pieces.append((self.rows(ids[first:last]), blob))
        return pieces

    def check(self, handed_out: int) -> None:
        """Raises InvariantError unless the wheel and the dispatcher have what the states say."""
        rows = np.bincount(self._state, minlength=5)
        on_wheel, ready = rows[WHEEL] + rows[DROPPED_WHEEL], rows[READY] + rows[DROPPED_READY]
        if (on_wheel, ready) != (len(self.wheel), handed_out):
            raise InvariantError(
                f"{on_wheel} timers belong on the wheel, {len(self.wheel)} are there;"
                f" {ready} were handed out, {handed_out} wait"
            )

    def pending_ids(self) -> Ids:
        """All pending rows."""
        return np.flatnonzero(self._is_pending()).astype(np.int32)

    def on_wheel_ids(self) -> Ids:
        """The pending rows that were not handed out: those that `evict` can take."""
        return np.flatnonzero(self._state == WHEEL).astype(np.int32)

    def _is_pending(self, ids: Ids | slice = slice(None)) -> npt.NDArray[np.bool_]:
        state = self._state[ids]
        pending: npt.NDArray[np.bool_] = (state == WHEEL) | (state == READY)
        return pending

    def _hold(self, blob: Blob, count: int) -> int:
        self.bytes += len(blob.data) + BLOB_BYTES
        if self._free_blobs:
            number = self._free_blobs.pop()
            self.blobs[number] = blob
            self._live[number] = count
        else:
            number = len(self.blobs)
            self.blobs.append(blob)
            self._live.append(count)
        return number

    def _release(self, ids: Ids) -> None:
        count = len(ids)
        if not count:
            return
        self._state[ids] = FREE
        self._by_key.remove(ids)
        if self._by_timer_key is not None:
            self._by_timer_key.remove(ids)
        self._free[self._free_count : self._free_count + count] = ids
        self._free_count += count
        for number, rows in Counter(self._blob[ids].tolist()).items():
            blob = self.blobs[number]
            if blob is None:
                raise InvariantError("a timer outlived its body")
            self._live[number] -= rows
            if not self._live[number]:
                self.blobs[number] = None
                self._free_blobs.append(number)
                self.bytes -= len(blob.data) + BLOB_BYTES

    def _grow(self, capacity: int) -> None:
        used, rows, rows_before = self._capacity, new_rows(capacity), self._rows
        rows.wide[:, :used], rows.narrow[:, :used] = rows_before.wide, rows_before.narrow
        self._rows = rows
        self._blob = _grown(self._blob, capacity, np.int32)
        self._state = _grown(self._state, capacity, np.uint8)
        self._by_key = RowTable(capacity)
        taken = np.flatnonzero(self._state != FREE).astype(np.int32)
        self._by_key.add(taken, keys_of(rows.source[taken], rows.offset[taken]))
        if self._by_timer_key is not None:
            column = _grown(rows_before.timer_keys(), capacity, np.uint64)
            self._rows = dataclasses.replace(rows, timer_key=column)
            self._by_timer_key = RowTable(capacity)
            keyed = taken[self._is_pending(taken) & (column[taken] != 0)]
            self._by_timer_key.add(keyed, column[keyed])
        free = np.empty(capacity, dtype=np.int32)
        new = np.arange(capacity - 1, self._capacity - 1, -1, dtype=np.int32)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + len(new)] = new
        self._free = free
        self._free_count += len(new)
        self._capacity = capacity


def _grown(column: npt.NDArray[Any], capacity: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    grown = np.zeros(capacity, dtype=kind)
    grown[: len(column)] = column
    return grown
