"""What a cancel must know of timers that fired and are held nowhere any more.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A timer that arrived, is not pending and was not cancelled has fired.  Since cancels are forgotten
`keep_ms` after they were due, this holds for younger ones only; what fired late (a second or more)
is therefore remembered for itself, by the time at which it fired: a bit an offset, in pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import Rows, key_of, keys_of

LATE_MS = 1_000
PAGE_BITS = 16  # offsets of a page: 8 KiB of bits
PAGE_BYTES = (1 << PAGE_BITS) // 8
# 8 MiB, 67 million offsets if they lie side by side; beyond it the page marked longest ago goes.
PAGES_MAX = 1_024


class SavedPage(NamedTuple):
    """As it lies in a checkpoint."""

    key: int  # of its first offset, see rows.key_of, shifted by PAGE_BITS
    fired_ms: int
    bits: bytes


@dataclasses.dataclass(slots=True)
class _Page:
    fired_ms: int
    bits: npt.NDArray[np.uint8]


class FireMemory:
    """Which timers fired late, and up to which due time any fired."""

    def __init__(self) -> None:
        self.until_ms = 0
        """The latest due time that was ever fired: it does not go back with the clock."""
        self._pages: dict[int, _Page] = {}

    def note(self, rows: Rows, now_ms: int) -> None:
        """Timers fire."""
        due_ms = rows.due_ms
        self.until_ms = max(self.until_ms, int(due_ms.max()))
        late = due_ms + LATE_MS < now_ms
        if late.any():
            self._mark(keys_of(rows.source[late], rows.offset[late]), now_ms)

    def fired_late(self, source: int, offset: int) -> bool:
        """Whether the timer fired late, and is remembered."""
        key = key_of(source, offset)
        page = self._pages.get(key >> PAGE_BITS)
        if page is None:
            return False
        at = key & ((1 << PAGE_BITS) - 1)
        return bool(page.bits[at >> 3] >> (at & 7) & 1)

    def expire(self, before_ms: int) -> None:
        """Forgets what fired before."""
        for number in [n for n, page in self._pages.items() if page.fired_ms < before_ms]:
            del self._pages[number]

    def pages(self) -> list[SavedPage]:
        """A copy, for a checkpoint."""
        return [SavedPage(n, page.fired_ms, page.bits.tobytes()) for n, page in self._pages.items()]

    def restore(self, until_ms: int, pages: Iterable[SavedPage]) -> None:
        """Takes over what a checkpoint has."""
        self.until_ms = until_ms
        for page in pages:
            bits = np.frombuffer(page.bits, dtype=np.uint8).copy()
            self._pages[page.key] = _Page(page.fired_ms, bits)

    def _mark(self, keys: npt.NDArray[np.uint64], now_ms: int) -> None:
        numbers = keys >> np.uint64(PAGE_BITS)
        at = (keys & np.uint64((1 << PAGE_BITS) - 1)).astype(np.int64)
        for number in np.unique(numbers).tolist():
            page = self._pages.pop(number, None)
            if page is None:
                page = _Page(now_ms, np.zeros(PAGE_BYTES, dtype=np.uint8))
            page.fired_ms = max(page.fired_ms, now_ms)
            mine = at[numbers == number]
            np.bitwise_or.at(page.bits, mine >> 3, np.left_shift(1, mine & 7).astype(np.uint8))
            self._pages[number] = page  # at the end: marked last
        while len(self._pages) > PAGES_MAX:
            del self._pages[next(iter(self._pages))]
