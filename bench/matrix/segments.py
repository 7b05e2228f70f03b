"""What far timers weigh on the disk, apart from their bodies: reads the period files' headers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from duemq_server.storage.record import HEADER, HEADER_BYTES
from duemq_server.timer_service.far.far_block import INDEX
from duemq_server.timer_service.far.far_segments import SUFFIX

_COUNT = struct.Struct("<I")  # how an index begins


class IndexSize(NamedTuple):
    """The indexes of a data directory's blocks."""

    timers: int
    index_bytes: int

    @property
    def bytes_per_timer(self) -> float | None:
        """None: nothing is on the disk yet."""
        return round(self.index_bytes / self.timers, 2) if self.timers else None


def index_size(directory: Path) -> IndexSize:
    """Adds up the blocks of the `segments` folder beneath a timer service's data directory."""
    sizes = [_of_file(path) for path in (directory / "segments").glob(f"*{SUFFIX}")]
    return IndexSize(sum(size.timers for size in sizes), sum(size.index_bytes for size in sizes))


def _of_file(path: Path) -> IndexSize:
    timers = index_bytes = 0
    with path.open("rb") as file:
        while len(start := file.read(HEADER_BYTES + _COUNT.size)) == HEADER_BYTES + _COUNT.size:
            _, _, _, kind, length, _, _, _ = HEADER.unpack_from(start)
            if length < len(start):
                break  # not an entry: the file is being written
            if kind == INDEX:
                timers += _COUNT.unpack_from(start, HEADER_BYTES)[0]
                index_bytes += length
            file.seek(length - len(start), 1)
    return IndexSize(timers, index_bytes)
