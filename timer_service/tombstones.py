"""Cancelled timers, remembered.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A tombstone does two things.  While its timer still lies on disk or in the memtable (`unmet`), it
keeps it from being loaded.  And it answers a repeated cancel with CANCELLED, until `keep_ms` after
the due time.  An unmet tombstone never expires.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from timer_service.rows import Rows


class Tombstones:
    """Due times of cancelled timers by source and offset; about 150 bytes each."""

    def __init__(self, keep_ms: int) -> None:
        self.keep_ms = keep_ms
        self.unmet = 0
        self._due: dict[int, dict[int, int]] = {}
        self._unmet: dict[int, set[int]] = {}
        self._expiry: list[tuple[int, int, int]] = []  # heap of (due, source, offset)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, source: int, offset: int, due_ms: int, *, unmet: bool) -> None:
        """A timer was cancelled; `unmet`: it must still be kept from being loaded."""
        self._due.setdefault(source, {})[offset] = due_ms
        heapq.heappush(self._expiry, (due_ms, source, offset))
        self._count += 1
        if unmet:
            self._unmet.setdefault(source, set()).add(offset)
            self.unmet += 1

    def has(self, source: int, offset: int) -> bool:
        """Whether the timer was cancelled and is remembered."""
        return offset in self._due.get(source, ())

    def meet(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which rows are cancelled, None: none; they count as met from now on."""
        if not self.unmet or not len(rows):
            return None
        mask = np.zeros(len(rows), dtype=np.bool_)
        for source, offsets in self._unmet.items():
            if not offsets:
                continue
            of_source = np.flatnonzero(rows.source == source)
            for at, offset in zip(of_source.tolist(), rows.offset[of_source].tolist(), strict=True):
                if offset in offsets:
                    mask[at] = True
                    offsets.discard(offset)
                    self.unmet -= 1
        return mask if mask.any() else None

    def expire(self, now_ms: int, limit: int = 10_000) -> None:
        """Forgets what is past its time, at most `limit` of them."""
        kept: list[tuple[int, int, int]] = []
        while self._expiry and limit and self._expiry[0][0] + self.keep_ms < now_ms:
            due_ms, source, offset = heapq.heappop(self._expiry)
            limit -= 1
            if offset in self._unmet.get(source, ()):
                kept.append((due_ms, source, offset))
                continue
            del self._due[source][offset]
            self._count -= 1
        for each in kept:
            heapq.heappush(self._expiry, each)

    def items(self) -> list[tuple[int, int, int, bool]]:
        """(source, offset, due time, unmet) of each."""
        return [
            (source, offset, due_ms, offset in self._unmet.get(source, ()))
            for source, offsets in self._due.items()
            for offset, due_ms in offsets.items()
        ]
