"""Counts numbered messages as they arrive.  Pure; one thread at a time.

A benchmark's messages begin with their number, 8 bytes little-endian, from 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

NUMBER_BYTES = 8
_NUMBER = struct.Struct("<Q")
_SEEN_MAX = 255


def numbered(number: int, filler: bytes) -> bytes:
    """A body: the number, then `filler`."""
    return _NUMBER.pack(number) + filler


def number_of(body: bytes) -> int:
    """The number of a body."""
    number: int = _NUMBER.unpack_from(body)[0]
    return number


class Arrivals:
    """How often each of `count` messages arrived."""

    def __init__(self, count: int) -> None:
        self._seen = bytearray(count)
        self.total = 0
        self.strange = 0

    def add(self, bodies: Iterable[bytes]) -> None:
        """Notes arrivals."""
        seen, read = self._seen, _NUMBER.unpack_from
        for body in bodies:
            self.total += 1
            (number,) = read(body)
            if number >= len(seen):
                self.strange += 1
            elif seen[number] < _SEEN_MAX:
                seen[number] += 1

    @property
    def complete(self) -> bool:
        """Whether as many arrived as there are; `lost` says whether they are the right ones."""
        return self.total >= len(self._seen)

    @property
    def lost(self) -> int:
        """Messages that never came."""
        return self._seen.count(0)

    @property
    def twice(self) -> int:
        """Arrivals beyond the first of each message, those of messages never sent included."""
        return self.total - (len(self._seen) - self.lost)
