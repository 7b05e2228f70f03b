"""Bodies of timers that are looked at: from memory, or from a block, verified."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.far_block import REMEDY, Index
from duemq_server.timer_service.far.reading import as_rows, read_index
from duemq_server.timer_service.timers.rows import Blob, Rows

Bytes = bytes | memoryview


class Files:
    """Period files, each opened once; a context manager."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._open: dict[str, DiskFile] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def path(self, name: str) -> str:
        """Where a file lies."""
        return os.path.join(self._directory, name)

    def index_of(self, each: Block) -> Index:
        """A block's index.  Raises CorruptFile."""
        return read_index(self._disk, self.path(each.file), each)

    def read(self, name: str, position: int, length: int) -> bytes:
        """What a file has there, or less.  Raises CorruptFile, DiskFull."""
        try:
            file = self._open.get(name)
            if file is None:
                file = self._open[name] = self._disk.open(self.path(name))
            return bytes(file.pread(length, position))
        except OSError as error:  # a bad sector, say
            problem = error.strerror or str(error)
            raise CorruptFile(self.path(name), position, problem, REMEDY) from error


class Joined(NamedTuple):
    """Bodies that lie in one byte string, anywhere; in columns."""

    data: bytes
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    @classmethod
    def of(cls, bodies: Sequence[Bytes]) -> Joined:
        """These, copied."""
        size = np.fromiter(map(len, bodies), dtype=np.int64, count=len(bodies))
        return cls(b"".join(bodies), np.cumsum(size) - size, size)

    def at(self, index: int) -> bytes:
        """One of them."""
        start = int(self.start[index])
        return self.data[start : start + int(self.size[index])]

    def take(self, index: Any) -> Joined:
        """Some of them; not copied."""
        return Joined(self.data, self.start[index], self.size[index])

    def bytes(self) -> bytes:
        """One after the other; those that lie so are copied at once."""
        if not len(self.start):
            return b""
        ends = self.start + self.size
        breaks = np.flatnonzero(self.start[1:] != ends[:-1]) + 1
        firsts = self.start[np.append(0, breaks)].tolist()
        lasts = ends[np.append(breaks, len(ends)) - 1].tolist()
        data = memoryview(self.data)
        return b"".join([data[a:b] for a, b in zip(firsts, lasts, strict=True)])


def cut(blob: Blob, rows: Rows) -> list[Bytes]:
    """Bodies of rows that lie in a blob."""
    starts = rows.home.astype(np.int64) - blob.start
    places = zip(starts.tolist(), (starts + rows.size).tolist(), strict=True)
    return [blob.data[start:end] for start, end in places]


class Bodies(Protocol):
    """Of the timers of one place."""

    def read(self, row: int, files: Files) -> Bytes:
        """The record's entry of a row.  Raises CorruptFile."""
        ...


class InMemory:
    """Bodies in blobs."""

    def __init__(self, rows: Rows, blobs: Sequence[Blob | None], which: Any) -> None:
        """`which`: the blob of each row."""
        self._rows = rows
        self._blobs = blobs
        self._which = which

    def read(self, row: int, files: Files) -> Bytes:
        """See Bodies."""
        return self.of(row)

    def of(self, row: int) -> Bytes:
        """The record's entry of a row."""
        blob = self._blobs[int(self._which[row])]
        assert blob is not None
        at = int(self._rows.home[row]) - blob.start
        return blob.data[at : at + int(self._rows.size[row])]


class InPlace:
    """One body in a block whose index was not kept."""

    def __init__(self, block: Block, row: int) -> None:
        self._block = block
        self._at = row

    def read(self, row: int, files: Files) -> Bytes:
        """See Bodies."""
        index = files.index_of(self._block)
        rows = as_rows(index, 0, self._block.count)
        return BlockBodies(self._block, rows, index.rows["crc32c"]).read(self._at, files)


class BlockBodies:
    """Bodies in a block; homes of rows are relative to the first record of it."""

    def __init__(self, block: Block, rows: Rows, crcs: Any) -> None:
        self._file = block.file
        self._bodies_at = block.position + block.index_length + record.HEADER_BYTES
        self._rows = rows
        self._crcs = crcs

    def read(self, row: int, files: Files) -> Bytes:
        """See Bodies."""
        position = self._bodies_at + int(self._rows.home[row])
        data = files.read(self._file, position, int(self._rows.size[row]))
        if google_crc32c.value(data) != int(self._crcs[row]):
            raise CorruptFile(
                files.path(self._file), position, "CRC-32C of a record is wrong", REMEDY
            )
        return data
