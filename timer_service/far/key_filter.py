"""Which blocks may hold a timer with a key: a Bloom filter a block, all of them asked at once.

Owned by: FarSegments.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A key says nothing of when its timer is due, so any block may have it.  The filters of blocks with
about the same number of keys are the columns of a matrix of bits:

    key ── PROBES rows ──►  0 1 1 0 0 1 ...   a bit a block; eight blocks a byte
                            1 1 0 0 1 0 ...
                       AND  0 1 0 0 0 0 ...   ► the second block may have it

so a look-up reads `PROBES` runs of (blocks / 8) bytes, however many blocks there are.  A filter has
20 to 40 bits a key, so that at most one in 10,000 says "perhaps" for nothing: some 3.5 bytes a key
in memory.  The keys themselves are on disk only.

Only blocks with keys take part.  After a start their keys are not known: a look-up reads them first
(key_look_up.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import Hashes

PROBES = 10
BITS_MIN = 20  # a key
ROWS_MIN = 256  # of a matrix
GATHERED_BYTES_MAX = 1 << 20  # read at once


def rows_for(keys: int) -> int:
    """Rows of the matrix for blocks with so many keys: a power of two."""
    return max(ROWS_MIN, 1 << (BITS_MIN * keys - 1).bit_length())


class _Matrix:
    """The filters of blocks with about the same number of keys."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._shift = np.uint64(65 - rows.bit_length())
        self._bits = np.zeros((rows, 1), dtype=np.uint8)
        self._numbers = np.full(8, -1, dtype=np.int64)  # of each column's block; -1: free
        self._free = list(range(7, -1, -1))

    def add(self, number: int, hashes: Hashes) -> int:
        """The column that the block got."""
        if not self._free:
            self._grow()
        column = self._free.pop()
        self._numbers[column] = number
        places = (_products(hashes) >> self._shift).view(np.int64)
        self._bits[places.ravel(), column >> 3] |= np.uint8(1 << (column & 7))
        return column

    def remove(self, column: int) -> None:
        self._numbers[column] = -1
        self._bits[:, column >> 3] &= np.uint8(0xFF ^ 1 << (column & 7))
        self._free.append(column)

    def find(self, products: Hashes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Pairs (place in `products`, number of a block)."""
        every = max(1, GATHERED_BYTES_MAX // (PROBES * self._bits.shape[1]))
        whose, blocks = [], []
        for start in range(0, len(products), every):
            places = products[start : start + every] >> self._shift
            both = np.bitwise_and.reduce(self._bits[places.view(np.int64)], axis=1)
            if both.any():
                which, at = np.nonzero(both)
                bits = np.unpackbits(both[which, at][:, None], axis=1, bitorder="little")
                hit, bit = np.nonzero(bits)
                whose.append(which[hit] + start)
                blocks.append(self._numbers[8 * at[hit] + bit])
        if not whose:
            return _NONE, _NONE
        return np.concatenate(whose), np.concatenate(blocks)

    def _grow(self) -> None:
        width = self._bits.shape[1]
        bits = np.zeros((self._rows, 2 * width), dtype=np.uint8)
        bits[:, :width] = self._bits
        self._bits = bits
        self._numbers = np.append(self._numbers, np.full(8 * width, -1, dtype=np.int64))
        self._free += range(16 * width - 1, 8 * width - 1, -1)


# Odd multiples of the golden ratio: the high bits of each product are as good as another hash.
_FACTORS = np.arange(1, 2 * PROBES, 2, dtype=np.uint64) ** 7 * np.uint64(0x9E3779B97F4A7C15)
_NONE = np.empty(0, dtype=np.int64)


class KeyFilter:
    """Blocks with keys, by number (catalog.py)."""

    def __init__(self) -> None:
        self.unknown: set[int] = set()
        """Blocks whose keys are not known; they are in no answer."""
        self._matrices: dict[int, _Matrix] = {}
        self._columns: dict[int, tuple[_Matrix, int]] = {}
        self._unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self._columns) + len(self.unknown) + len(self._unreadable)

    def add(self, number: int, hashes: Hashes | None) -> None:
        """A block with keys is there; None: which they are is not known."""
        if hashes is None:
            self.unknown.add(number)
            return
        rows = rows_for(len(hashes))
        matrix = self._matrices.setdefault(rows, _Matrix(rows))
        self._columns[number] = matrix, matrix.add(number, hashes)

    def remove(self, number: int) -> None:
        """A block is done."""
        self.unknown.discard(number)
        self._unreadable.discard(number)
        matrix, column = self._columns.pop(number, (None, 0))
        if matrix is not None:
            matrix.remove(column)

    def learn(self, found: Mapping[int, Hashes | None]) -> None:
        """Keys of blocks that were not known; None: it cannot be read, and may hold any key."""
        for number, hashes in found.items():
            if number not in self.unknown:
                continue  # done meanwhile
            self.unknown.remove(number)
            if hashes is None:
                self._unreadable.add(number)
            else:
                self.add(number, hashes)

    def candidates(self, hashes: Hashes) -> list[set[int]]:
        """The blocks that may have each of these keys."""
        found = [set(self._unreadable) for _ in range(len(hashes))]
        products = _products(hashes)
        for matrix in self._matrices.values():
            for at, number in zip(*map(_listed, matrix.find(products)), strict=True):
                found[at].add(number)
        return found


def _products(hashes: Hashes) -> Hashes:
    """Of each hash `PROBES` numbers, whose high bits name rows."""
    return hashes[:, None] * _FACTORS


def _listed(numbers: npt.NDArray[Any]) -> list[int]:
    return numbers.tolist()
