"""Cancelled and replaced timers, remembered.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A tombstone does two things.  While its timer still lies on disk or in the memtable (`unmet`), it
keeps it from being loaded.  And it answers a repeated cancel with CANCELLED, until `keep_ms` after
the later of its due time and its cancel.  An unmet tombstone never expires; it holds up no other,
because only met ones wait on the heap.

A replaced timer's is the same while it is unmet; then a bit is left (offset_pages.py), for
who moves a timer a thousand times a second shall not fill the memory of the cancelled ones.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.offset_pages import OffsetPages
from duemq_server.timer_service.timers.rows import Rows

MET, UNMET, UNMET_REPLACED = 0, 1, 2
"""Of a tombstone in a checkpoint."""


class Tombstones:
    """Cancelled timers by source and offset; about 150 bytes each."""

    def __init__(self, keep_ms: int) -> None:
        self.keep_ms = keep_ms
        self.unmet = 0
        self.forgotten_ms = 0
        """Of timers due after this none is forgotten."""
        self.replaced = OffsetPages()
        """Those that were met."""
        self._since: dict[int, dict[int, int]] = {}
        self._unmet: dict[int, set[int]] = {}
        self._expiry: list[tuple[int, int, int]] = []  # heap of (since, source, offset), met ones
        self._swapped: set[tuple[int, int]] = set()  # unmet and replaced
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, source: int, offset: int, since_ms: int, *, unmet: bool) -> None:
        """A timer was cancelled; `unmet`: it must still be kept from being loaded.

        `since_ms`: when its time in memory begins, not before its due time.
        """
        self._since.setdefault(source, {})[offset] = since_ms
        self._count += 1
        if unmet:
            self._unmet.setdefault(source, set()).add(offset)
            self.unmet += 1
        else:
            heapq.heappush(self._expiry, (since_ms, source, offset))

    def add_replaced(self, source: int, offset: int, since_ms: int, *, unmet: bool) -> None:
        """A timer went because another came for it; as `add`."""
        if unmet:
            self.add(source, offset, since_ms, unmet=True)
            self._swapped.add((source, offset))
        else:
            self.replaced.mark_one(source, offset, since_ms)

    def add_all(
        self,
        source: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.int64],
        since_ms: npt.NDArray[np.int64],
        *,
        unmet: bool,
    ) -> None:
        """`add` of many, none of which is here yet."""
        for number in np.unique(source).tolist():
            mine = source == number
            offsets, since = offset[mine].tolist(), since_ms[mine].tolist()
            self._since.setdefault(number, {}).update(zip(offsets, since, strict=True))
            if unmet:
                self._unmet.setdefault(number, set()).update(offsets)
                continue
            for each, each_ms in zip(offsets, since, strict=True):
                heapq.heappush(self._expiry, (each_ms, number, each))
        self._count += len(offset)
        self.unmet += len(offset) if unmet else 0

    def has(self, source: int, offset: int) -> bool:
        """Whether the timer was cancelled and is remembered."""
        return offset in self._since.get(source, ()) or self.replaced.has(source, offset)

    def meet(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which rows are cancelled, None: none; they count as met from now on."""
        mask = self.unmet_in(rows)
        if mask is None:
            return None
        met = rows.take(mask)
        for source, offset in zip(met.source.tolist(), met.offset.tolist(), strict=True):
            self._unmet[source].discard(offset)
            self._met(source, offset)
        self.unmet -= len(met)
        return mask

    def unmet_in(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which rows are cancelled and not met yet, None: none."""
        if not self.unmet or not len(rows):
            return None
        mask = np.zeros(len(rows), dtype=np.bool_)
        for source, offsets in self._unmet.items():
            if not offsets:
                continue
            of_source = np.flatnonzero(rows.source == source)
            found = offsets.intersection(rows.offset[of_source].tolist())
            if found:
                mask[of_source] = np.isin(rows.offset[of_source], np.fromiter(found, np.int64))
        return mask if mask.any() else None

    def _met(self, source: int, offset: int) -> None:
        since = self._since[source]
        if (source, offset) not in self._swapped:
            heapq.heappush(self._expiry, (since[offset], source, offset))
            return
        self._swapped.remove((source, offset))
        self.replaced.mark_one(source, offset, since.pop(offset))
        self._count -= 1

    def expire(self, now_ms: int, limit: int = 10_000) -> None:
        """Forgets what is past its time, at most `limit` of them."""
        while self._expiry and limit and self._expiry[0][0] + self.keep_ms < now_ms:
            since_ms, source, offset = heapq.heappop(self._expiry)
            limit -= 1
            del self._since[source][offset]
            self._count -= 1
            self.forgotten_ms = max(self.forgotten_ms, since_ms)
        self.replaced.expire(now_ms - self.keep_ms)
        self.forgotten_ms = max(self.forgotten_ms, self.replaced.dropped_ms)

    def items(self) -> list[tuple[int, int, int, int]]:
        """(source, offset, since, MET or UNMET or UNMET_REPLACED) of each."""
        return [
            (source, offset, since_ms, self._state(source, offset))
            for source, offsets in self._since.items()
            for offset, since_ms in offsets.items()
        ]

    def _state(self, source: int, offset: int) -> int:
        if offset not in self._unmet.get(source, ()):
            return MET
        return UNMET_REPLACED if (source, offset) in self._swapped else UNMET

    def restore(self, source: int, offset: int, since_ms: int, state: int) -> None:
        """Takes over one of `items`."""
        if state == UNMET_REPLACED:
            self.add_replaced(source, offset, since_ms, unmet=True)
        else:
            self.add(source, offset, since_ms, unmet=state == UNMET)
