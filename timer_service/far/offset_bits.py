"""A set of timers by source and offset, a bit each, that takes out what is no longer in it.  Pure.

For many of which nearly each goes again, and none may be forgotten: unlike offset_pages.py it has
no bound.  A page of 1,024 offsets is there while one of them is in the set: 128 bytes and some 100
of the table that finds it.  So a set of timers whose offsets lie side by side costs a bit or two
each, and one that has a timer a page 230 bytes each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import key_of

PAGE_BITS = 10  # offsets of a page
PAGE_BYTES = (1 << PAGE_BITS) // 8
_SLOTS_MIN = 16
_SEVERAL = 1_024  # more keys than these are brought to pages first

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


class OffsetBits:
    """The set; timers are named by rows.keys_of."""

    def __init__(self) -> None:
        self._count = 0
        self._slot_of: dict[int, int] = {}  # by page
        self._free: list[int] = []
        self._bits: Bits = np.zeros((0, PAGE_BYTES), dtype=np.uint8)
        self._counts: Slots = np.zeros(0, dtype=np.int64)  # of each slot

    def __len__(self) -> int:
        return self._count

    def has(self, source: int, offset: int) -> bool:
        """Whether the timer is in it."""
        key = key_of(source, offset)
        slot = self._slot_of.get(key >> PAGE_BITS)
        if slot is None:
            return False
        return bool(self._bits.item(slot, key >> 3 & PAGE_BYTES - 1) >> (key & 7) & 1)

    def add(self, keys: Keys) -> None:
        """Timers come in; those that are in it stay."""
        slots, at, bit = self._places(keys, make=True)
        absent = self._bits[slots, at] & bit == 0
        slots, at, bit = slots[absent], at[absent], bit[absent]
        np.bitwise_or.at(self._bits, (slots, at), bit)
        np.add.at(self._counts, slots, 1)
        self._count += len(slots)

    def find(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these are in it."""
        slots, at, bit = self._places(keys)
        return np.asarray((slots >= 0) & (self._bits[slots, at] & bit != 0))

    def take(self, keys: Keys) -> None:
        """Timers go, all of which are in it, once each."""
        slots, at, bit = self._places(keys)
        np.bitwise_and.at(self._bits, (slots, at), ~bit)
        np.subtract.at(self._counts, slots, 1)
        self._count -= len(slots)
        if not (self._counts[slots] == 0).any():
            return
        for page in np.unique(keys >> np.uint64(PAGE_BITS)).tolist():
            slot = self._slot_of[page]
            if not self._counts[slot]:
                self._free.append(self._slot_of.pop(page))

    def keys(self) -> Keys:
        """All of them."""
        pages = np.array(list(self._slot_of), dtype=np.uint64)
        slots = np.array(list(self._slot_of.values()), dtype=np.int64)
        bits = np.unpackbits(self._bits[slots], axis=1, bitorder="little")
        page, at = np.nonzero(bits)
        return pages[page] << np.uint64(PAGE_BITS) | at.astype(np.uint64)

    def saved(self) -> tuple[Keys, Bits]:
        """For a checkpoint: numbers of the pages, and their bits."""
        pages = np.array(list(self._slot_of), dtype=np.uint64)
        return pages, self._bits[np.array(list(self._slot_of.values()), dtype=np.int64)]

    def restore(self, pages: Keys, bits: Bits) -> None:
        """Takes over what a checkpoint has; nothing was in it before."""
        self._bits = bits.reshape(-1, PAGE_BYTES).copy()
        self._slot_of = {page: slot for slot, page in enumerate(pages.tolist())}
        self._counts = np.unpackbits(self._bits, axis=1).sum(axis=1, dtype=np.int64)
        self._count, self._free = int(self._counts.sum()), []

    def _places(self, keys: Keys, *, make: bool = False) -> tuple[Slots, Slots, Bits]:
        """Slot, byte and bit of each; slot -1: its page is not there."""
        pages = keys >> np.uint64(PAGE_BITS)
        if len(keys) > _SEVERAL:
            pages, which = np.unique(pages, return_inverse=True)
            slots = self._slots(pages, make=make)[which]
        else:
            slots = self._slots(pages, make=make)
        at = (keys >> np.uint64(3) & np.uint64(PAGE_BYTES - 1)).astype(np.int64)
        bit = np.left_shift(1, (keys & np.uint64(7)).astype(np.int64)).astype(np.uint8)
        return slots, at, bit

    def _slots(self, pages: Keys, *, make: bool) -> Slots:
        if make:
            return np.array([self._slot(page) for page in pages.tolist()], dtype=np.int64)
        if not len(self._bits):
            self._grow()  # so that -1 is a slot
        find = self._slot_of.get
        return np.array([find(page, -1) for page in pages.tolist()], dtype=np.int64)

    def _slot(self, page: int) -> int:
        slot = self._slot_of.get(page)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[page] = self._free.pop()
        return slot

    def _grow(self) -> None:
        before = len(self._bits)
        after = max(_SLOTS_MIN, 2 * before)
        self._bits = np.concatenate(
            [self._bits, np.zeros((after - before, PAGE_BYTES), dtype=np.uint8)]
        )
        self._counts = np.append(self._counts, np.zeros(after - before, dtype=np.int64))
        self._free += range(after - 1, before - 1, -1)
