"""Reading blocks: verified indexes, and their rows in columns.  No clock; may run in any thread."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.timers.rows import Hashes, Rows, new_rows

Packed = npt.NDArray[Any]
"""Rows as they lie in a block (far_block.py)."""


def as_rows(index: block.Index, start: int, end: int) -> Rows:
    """Rows of a block in columns, numbered as it does; homes are relative to the first's body."""
    hashes = index.timer_key
    return in_columns(index.rows[start:end], None if hashes is None else hashes[start:end])


def in_columns(packed: Packed, hashes: Hashes | None) -> Rows:
    """Rows whose bodies lie side by side, in columns; homes are relative to the first's."""
    rows = new_rows(len(packed))
    rows.wide[0], rows.wide[1] = packed["due_ms"], packed["offset"]
    rows.narrow[0], rows.narrow[1] = packed["source"], packed["target"]
    rows.narrow[2], rows.narrow[3] = block.body_starts(packed)[:-1], packed["size"]
    rows.narrow[4], rows.narrow[5] = packed["tag_hash"], packed["key_hash"]
    if hashes is None:
        return rows
    return dataclasses.replace(rows, timer_key=hashes.astype(np.uint64))


def bodies_at(each: Block) -> int:
    """Where in its file the records of a block begin."""
    return each.position + each.index_length + record.HEADER_BYTES


def read_bytes(disk: Disk, path: str, position: int, length: int) -> bytes:
    """Bytes of a file that must be there.  Raises CorruptFile, DiskFull."""
    try:
        file = disk.open(path)
        try:
            data = bytes(file.pread(length, position))
        finally:
            file.close()
    except OSError as error:  # a bad sector, say
        raise CorruptFile(path, position, error.strerror or str(error), block.REMEDY) from error
    if len(data) < length:
        raise CorruptFile(path, position + len(data), "ends too early", block.REMEDY)
    return data


def read_index(disk: Disk, path: str, each: Block) -> block.Index:
    """The verified index of a block.  Raises CorruptFile, DiskFull."""
    data = read_bytes(disk, path, each.position, each.index_length)
    try:
        entry = record.decode(memoryview(data), 0, each.position)
        return block.decode_index(entry.body)
    except ValueError as error:
        raise CorruptFile(path, each.position, f"block index: {error}", block.REMEDY) from error
