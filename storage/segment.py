"""One file of a log.

Named by the 20-digit position of its first byte.  A closed segment ends exactly
where the next one starts.  The last one may have a tail of zeros: space taken
in advance, because a sync that need not grow the file costs half.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from duemq_server.storage.disk import Buffer, Disk, write_all

NAME_DIGITS = 20
ZERO_AHEAD_BYTES = 1024 * 1024
"""Zeros written ahead of small writes: they then sync in half the time."""
ALLOCATE_AHEAD_BYTES = 16 * 1024 * 1024
"""Blocks reserved ahead of large writes, where zeros would cost more than they save."""
SMALL_WRITE_BYTES = 8 * 1024
"""Writes up to this size go to zeroed space; fewer than one in 100 then waits for zeros.
Measured: README, "Space ahead"."""

_ZEROS = bytes(ZERO_AHEAD_BYTES)


@dataclass(frozen=True, slots=True)
class Segment:
    """A file and the position of its first byte."""

    start: int
    path: str


def path_of(directory: str, start: int) -> str:
    """Path of the segment that starts at a position."""
    return os.path.join(directory, f"{start:0{NAME_DIGITS}d}")


def list_segments(directory: str, disk: Disk) -> tuple[Segment, ...]:
    """Segments of a directory in order."""
    names = [n for n in disk.listdir(directory) if len(n) == NAME_DIGITS and n.isdigit()]
    return tuple(Segment(int(name), os.path.join(directory, name)) for name in sorted(names))


class SegmentWriter:
    """Writes the last segment.  Owned by the thread that writes the log."""

    def __init__(self, segment: Segment, disk: Disk, segment_bytes: int) -> None:
        self.segment = segment
        self._segment_bytes = segment_bytes
        self._file = disk.open(segment.path, create=True)
        self._allocated = self._zeroed = self._file.size()

    def write(self, buffers: Sequence[Buffer], size: int, position: int) -> None:
        """Writes at a position.  Raises DiskFull, DiskFailed; may be repeated."""
        offset = position - self.segment.start
        self._reserve(offset, size)
        write_all(self._file, buffers, offset)

    def _reserve(self, offset: int, size: int) -> None:
        end = offset + size
        if size <= SMALL_WRITE_BYTES:
            if end > self._zeroed:
                start = max(self._zeroed, offset)
                self._zeroed = write_all(self._file, [_ZEROS[: self._ahead(start, end)]], start)
                self._allocated = max(self._allocated, self._zeroed)
        elif end > self._allocated:
            start = max(self._allocated, offset)
            length = end - start + self._ahead(end, end, ALLOCATE_AHEAD_BYTES)
            self._file.allocate(start, length)
            self._allocated = start + length
        self._zeroed = max(self._zeroed, end)

    def _ahead(self, start: int, end: int, most: int = ZERO_AHEAD_BYTES) -> int:
        """How far ahead of `start` to take space: not beyond the segment's end, but to `end`."""
        return max(end - start, min(most, self._segment_bytes - start))

    def sync(self) -> None:
        """Makes what was written durable.  Raises DiskFailed."""
        self._file.fdatasync()

    def cut(self, position: int) -> None:
        """Ends the file at a position, durably."""
        size = position - self.segment.start
        self._file.truncate(size)
        self._file.fdatasync()
        self._allocated = self._zeroed = size

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
