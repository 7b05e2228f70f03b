"""One file of a log.

Named by the 20-digit position of its first byte.  A closed segment ends exactly
where the next one starts.  The last one may have a tail of zeros: space taken
in advance, because a sync that need not grow the file costs half.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duemq_server.storage.disk import Buffer, Disk, write_all
from duemq_server.storage.errors import DiskFull

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
        self._scarce_to = 0
        """Before this offset nothing is taken in advance: the disk had no space for it."""

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
                wanted = start + ZERO_AHEAD_BYTES
                self._zeroed = self._take(self._write_zeros, start, end, wanted)
                self._allocated = max(self._allocated, self._zeroed)
        elif end > self._allocated:
            start = max(self._allocated, offset)
            wanted = end + ALLOCATE_AHEAD_BYTES
            self._allocated = self._take(self._file.allocate, start, end, wanted)
        self._zeroed = max(self._zeroed, end)

    def _write_zeros(self, start: int, length: int) -> None:
        write_all(self._file, [_ZEROS[:length]], start)

    def _take(self, take: Callable[[int, int], None], start: int, end: int, wanted: int) -> int:
        """Takes space from `start` to `wanted`, within the segment, or at least to `end`.

        Answers how far it goes.  Where there is not so much, nothing is taken in advance for as
        many bytes of the log: tried with each group it would take the last byte from others, such
        as a checkpoint that lets log go, again and again.  Raises DiskFull: nothing was taken.
        """
        wanted = max(end, min(wanted, self._segment_bytes))
        if wanted > end and end > self._scarce_to:
            try:
                take(start, wanted - start)
                return wanted
            except DiskFull:
                self._scarce_to = wanted
                self._give_back()
        try:
            take(start, end - start)
        except DiskFull:
            self._give_back()
            raise
        return end

    def _give_back(self) -> None:
        """What was got before the space ran out; data lie before it."""
        self._file.truncate(self._allocated)

    def sync(self) -> None:
        """Makes what was written durable.  Raises DiskFailed."""
        self._file.fdatasync()

    def cut(self, position: int) -> None:
        """Ends the file at a position, durably."""
        self.shrink(position)
        self._file.fdatasync()

    def shrink(self, position: int) -> None:
        """Ends the file at a position; not durable before a sync."""
        size = position - self.segment.start
        self._file.truncate(size)
        self._allocated = self._zeroed = size
        self._scarce_to = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
