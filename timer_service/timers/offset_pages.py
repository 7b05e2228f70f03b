"""A set of timers by source and offset: a bit each, in pages that know when they were marked.

Small where offsets lie side by side.  Bounded: beyond it the page that was marked longest ago goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import key_of

PAGE_BITS = 16  # offsets of a page: 8 KiB of bits
PAGE_BYTES = (1 << PAGE_BITS) // 8
PAGES_MAX = 1_024  # 8 MiB, 67 million offsets if they lie side by side


class SavedPage(NamedTuple):
    """As it lies in a checkpoint."""

    key: int  # of its first offset, see rows.key_of, shifted by PAGE_BITS
    marked_ms: int
    bits: bytes


@dataclasses.dataclass(slots=True)
class _Page:
    marked_ms: int
    bits: npt.NDArray[np.uint8]


class OffsetPages:
    """See the module."""

    def __init__(self, pages_max: int = PAGES_MAX) -> None:
        self.pages_max = pages_max
        self.dropped_ms = 0
        """The latest time of a page that went because there were too many."""
        self._pages: dict[int, _Page] = {}

    def has(self, source: int, offset: int) -> bool:
        """Whether the timer was marked, and is remembered."""
        key = key_of(source, offset)
        page = self._pages.get(key >> PAGE_BITS)
        if page is None:
            return False
        at = key & ((1 << PAGE_BITS) - 1)
        return bool(page.bits[at >> 3] >> (at & 7) & 1)

    def find(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these (rows.keys_of) were marked, and are remembered."""
        found = np.zeros(len(keys), dtype=np.bool_)
        numbers = keys >> np.uint64(PAGE_BITS)
        there = [each for each in set(numbers.tolist()) if each in self._pages]
        if there:
            at = (keys & np.uint64((1 << PAGE_BITS) - 1)).astype(np.int64)
            for number in there:
                page = self._pages[number]
                own = np.flatnonzero(numbers == number)
                found[own] = page.bits[at[own] >> 3] >> (at[own] & 7) & 1
        return found

    def mark(self, keys: npt.NDArray[np.uint64], at_ms: int | npt.NDArray[np.int64]) -> None:
        """Adds timers, by identity (rows.keys_of); `at_ms`: of all, or of each."""
        numbers = keys >> np.uint64(PAGE_BITS)
        at = (keys & np.uint64((1 << PAGE_BITS) - 1)).astype(np.int64)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            mine = at[own]
            bits = np.left_shift(1, mine & 7).astype(np.uint8)
            last_ms = at_ms if isinstance(at_ms, int) else int(at_ms[own].max())
            np.bitwise_or.at(self._page(number, last_ms).bits, mine >> 3, bits)

    def mark_one(self, source: int, offset: int, at_ms: int) -> None:
        """Adds a timer."""
        number, at = divmod(key_of(source, offset), 1 << PAGE_BITS)
        self._page(number, at_ms).bits[at >> 3] |= 1 << (at & 7)

    def _page(self, number: int, at_ms: int) -> _Page:
        """A page to be marked now; the one marked longest ago gives way."""
        page = self._pages.pop(number, None)
        if page is None:
            page = _Page(at_ms, np.zeros(PAGE_BYTES, dtype=np.uint8))
        page.marked_ms = max(page.marked_ms, at_ms)
        self._pages[number] = page  # at the end
        while len(self._pages) > self.pages_max:
            gone = self._pages.pop(next(iter(self._pages)))
            self.dropped_ms = max(self.dropped_ms, gone.marked_ms)
        return page

    def expire(self, before_ms: int) -> int:
        """Forgets pages that were last marked before; the latest time of these, 0: none."""
        old = [n for n, page in self._pages.items() if page.marked_ms < before_ms]
        return max((self._pages.pop(number).marked_ms for number in old), default=0)

    def saved(self) -> list[SavedPage]:
        """A copy, for a checkpoint."""
        pages = self._pages.items()
        return [SavedPage(n, page.marked_ms, page.bits.tobytes()) for n, page in pages]

    def restore(self, pages: Iterable[SavedPage]) -> None:
        """Takes over what a checkpoint has."""
        for page in pages:
            bits = np.frombuffer(page.bits, dtype=np.uint8).copy()
            self._pages[page.key] = _Page(page.marked_ms, bits)
