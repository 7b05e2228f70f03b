"""A set of timers by source and offset: a bit each, in pages that know when they were marked.

Small where offsets lie side by side.  Bounded: beyond it the page that was marked longest ago goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import KEY_BITS, key_of

PAGE_BITS = 16  # offsets of a page: 8 KiB of bits
PAGE_BYTES = (1 << PAGE_BITS) // 8
PAGES_MAX = 1_024  # 8 MiB, 67 million offsets if they lie side by side


class SavedPage(NamedTuple):
    """As it lies in a checkpoint."""

    key: int  # of its first offset, see rows.key_of, shifted by PAGE_BITS
    marked_ms: int
    bits: bytes


class Dropped(NamedTuple):
    """Of a source: pages that went because there were too many."""

    end: int  # offsets before it may have been in one
    marked_ms: int  # the latest time of such a page


@dataclasses.dataclass(slots=True)
class _Page:
    marked_ms: int
    bits: npt.NDArray[np.uint8]


class OffsetPages:
    """See the module."""

    def __init__(self, pages_max: int = PAGES_MAX) -> None:
        self.pages_max = pages_max
        self.dropped: dict[int, Dropped] = {}
        """By source, until what was in them is past its time."""
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
            oldest = next(iter(self._pages))
            self._note_dropped(oldest, self._pages.pop(oldest).marked_ms)
        return page

    def _note_dropped(self, number: int, marked_ms: int) -> None:
        source, page = divmod(number, 1 << KEY_BITS - PAGE_BITS)
        before = self.dropped.get(source, Dropped(0, 0))
        end = max(before.end, page + 1 << PAGE_BITS)
        self.dropped[source] = Dropped(end, max(before.marked_ms, marked_ms))

    def dropped_ms(self, source: int, offset: int) -> int:
        """The latest time of what went with the timer, if that may have; else 0."""
        dropped = self.dropped.get(source)
        return dropped.marked_ms if dropped is not None and offset < dropped.end else 0

    def expire(self, before_ms: int) -> int:
        """Forgets pages that were last marked before; the latest time of these, 0: none."""
        gone = [n for n, each in self.dropped.items() if each.marked_ms < before_ms]
        times_ms = [self.dropped.pop(source).marked_ms for source in gone]
        old = [n for n, page in self._pages.items() if page.marked_ms < before_ms]
        times_ms += [self._pages.pop(number).marked_ms for number in old]
        return max(times_ms, default=0)

    def saved(self) -> list[SavedPage]:
        """A copy, for a checkpoint."""
        pages = self._pages.items()
        return [SavedPage(n, page.marked_ms, page.bits.tobytes()) for n, page in pages]

    def restore(
        self, pages: Iterable[SavedPage], dropped: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """Takes over what a checkpoint has; `dropped`: (source, *Dropped)."""
        self.dropped = {source: Dropped(*each) for source, *each in dropped}
        for page in pages:
            bits = np.frombuffer(page.bits, dtype=np.uint8).copy()
            self._pages[page.key] = _Page(page.marked_ms, bits)
