"""Cancelled and replaced timers, remembered.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

While a timer that is gone still lies on disk or in the memtable (`unmet`), a bit keeps it from
being loaded (offset_bits.py).  When it is met there it becomes a bit of another kind, that may be
forgotten in time (offset_pages.py).  What is cancelled in memory is a tombstone: it answers a
repeated cancel with CANCELLED until `keep_ms` after the later of its due time and its cancel, to
the millisecond; where there are too many, further ones are bits of the second kind, too.

So what is cancelled or replaced on disk costs two bits, or three, where offsets lie side by side,
however many there are.  A bit a row of its block instead of a bit an offset would be no less, and
could not be set by who reads the log: a replica has other blocks.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.far.offset_bits import OffsetBits
from duemq_server.timer_service.timers.offset_pages import OffsetPages
from duemq_server.timer_service.timers.rows import Rows, key_of, keys_of

MET, UNMET, UNMET_REPLACED = 0, 1, 2
"""Of a tombstone in a checkpoint; releases before this one wrote the two others as well."""
SINGLES_MAX = 1_000_000
GONE_PAGES_MAX = 8_192  # 64 MiB, 537 million offsets if they lie side by side


class Tombstones:
    """Timers that are gone, by source and offset."""

    def __init__(self, keep_ms: int, singles_max: int = SINGLES_MAX) -> None:
        """`singles_max`: of those that are remembered one by one, 150 bytes each."""
        self.keep_ms = keep_ms
        self.singles_max = singles_max
        self.expired_ms = 0
        """Of timers due after this none is forgotten, but for those that gave way to others."""
        self.gone = OffsetPages(GONE_PAGES_MAX)
        """Those that were met, or were replaced in memory."""
        self.left = OffsetBits()
        """Those that were not met yet."""
        self._since: dict[int, dict[int, int]] = {}
        self._expiry: list[tuple[int, int, int]] = []  # heap of (since, source, offset)

    def __len__(self) -> int:
        """Tombstones, bits apart."""
        return len(self._expiry)

    @property
    def forgotten_ms(self) -> int:
        """Of timers due after this none is forgotten."""
        dropped = (each.marked_ms for each in self.gone.dropped.values())
        return max([self.expired_ms, *dropped])

    def forgotten_until_ms(self, source: int, offset: int) -> int:
        """The same, of those that were before this one, or came about when it did."""
        return max(self.expired_ms, self.gone.dropped_ms(source, offset))

    @property
    def unmet(self) -> int:
        """Timers that must still be kept from being loaded."""
        return len(self.left)

    def add(self, source: int, offset: int, since_ms: int, *, unmet: bool) -> None:
        """A timer was cancelled; `unmet`: it must still be kept from being loaded.

        `since_ms`: when its time in memory begins, not before its due time.
        """
        if unmet:
            self.left.add(np.array([key_of(source, offset)], dtype=np.uint64))
        elif len(self) < self.singles_max:
            self._since.setdefault(source, {})[offset] = since_ms
            heapq.heappush(self._expiry, (since_ms, source, offset))
        else:
            self.gone.mark_one(source, offset, since_ms)

    def add_all(
        self,
        source: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.int64],
        since_ms: npt.NDArray[np.int64],
        *,
        unmet: bool,
    ) -> None:
        """`add` of many, none of which is here yet."""
        if unmet:
            self.left.add(keys_of(source, offset))
            return
        for each in zip(source.tolist(), offset.tolist(), since_ms.tolist(), strict=True):
            self.add(*each, unmet=False)

    def add_keys(self, keys: npt.NDArray[np.uint64], since_ms: npt.NDArray[np.int64]) -> None:
        """Many (rows.keys_of) were cancelled in memory; only bits are left of them."""
        self.gone.mark(keys, since_ms)

    def has(self, source: int, offset: int) -> bool:
        """Whether the timer is gone and is remembered."""
        return (
            offset in self._since.get(source, ())
            or self.left.has(source, offset)
            or self.gone.has(source, offset)
        )

    def find(
        self, source: npt.NDArray[np.uint32], offset: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which of these are gone and remembered."""
        keys = keys_of(source, offset)
        found = self.left.find(keys) | self.gone.find(keys)
        if self._expiry:
            singly = zip(source.tolist(), offset.tolist(), strict=True)
            none: dict[int, int] = {}
            found |= [each in self._since.get(number, none) for number, each in singly]
        return found

    def meet(self, rows: Rows, now_ms: int) -> npt.NDArray[np.bool_] | None:
        """Which rows are gone, None: none; they count as met from now on."""
        mask = self.unmet_in(rows)
        if mask is None:
            return None
        met = rows.take(mask)
        keys = keys_of(met.source, met.offset)
        self.left.take(keys)
        self.gone.mark(keys, np.maximum(met.due_ms, now_ms))
        return mask

    def unmet_in(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which rows are gone and not met yet, None: none."""
        if not self.unmet or not len(rows):
            return None
        mask = self.left.find(keys_of(rows.source, rows.offset))
        return mask if mask.any() else None

    def expire(self, now_ms: int, limit: int = 10_000) -> None:
        """Forgets what is past its time, at most `limit` of those that are no bits."""
        while self._expiry and limit and self._expiry[0][0] + self.keep_ms < now_ms:
            since_ms, source, offset = heapq.heappop(self._expiry)
            limit -= 1
            del self._since[source][offset]
            self.forgot(since_ms)
        self.forgot(self.gone.expire(now_ms - self.keep_ms))

    def forgot(self, due_ms: int) -> None:
        """Those due until then may be forgotten."""
        self.expired_ms = max(self.expired_ms, due_ms)

    def items(self) -> list[tuple[int, int, int, int]]:
        """(source, offset, since, MET) of each tombstone; without bits."""
        return [
            (source, offset, since_ms, MET)
            for source, offsets in self._since.items()
            for offset, since_ms in offsets.items()
        ]

    def restore(self, source: int, offset: int, since_ms: int, state: int) -> None:
        """Takes over one of `items`, also of a release before."""
        self.add(source, offset, since_ms, unmet=state != MET)
