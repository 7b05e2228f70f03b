"""Counts numbered messages as they arrive.  Pure; one thread at a time.

A benchmark's messages begin with their number, 8 bytes little-endian, from 0.
"""

from __future__ import annotations

NUMBER_BYTES = 8
_SEEN_MAX = 255


def numbered(number: int, filler: bytes) -> bytes:
    """A body: the number, then `filler`."""
    return number.to_bytes(NUMBER_BYTES, "little") + filler


def number_of(body: bytes) -> int:
    """The number of a body."""
    return int.from_bytes(body[:NUMBER_BYTES], "little")


class Arrivals:
    """How often each of `count` messages arrived."""

    def __init__(self, count: int) -> None:
        self._seen = bytearray(count)
        self.total = 0
        self.strange = 0

    def add(self, number: int) -> None:
        """Notes an arrival."""
        self.total += 1
        if number >= len(self._seen):
            self.strange += 1
        elif self._seen[number] < _SEEN_MAX:
            self._seen[number] += 1

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
