"""Block: far timers in due order, as they lie in a period file.  Little-endian.

A period file is a run of log entries (storage/record.py) whose `position` is the place in the
file; each block is two of them, so that a loader reads the index first and then the bodies it
needs, and no others.

INDEX (kind 24):
off  size  field           meaning
 0    4    count           rows, 1 to ROWS_MAX
 4    4    sources         entries of the source table
 8    4    targets         entries of the target table
12    4    names_length    bytes of the names
16    8    bodies_length   bytes of the bodies entry's body
24    8    extra           columns behind the rows; 1: timer_key; 0: none
32   16*s  sources         store_id u64, queue_id u32, zeros u32
 .    8*t  targets         queue_id i32 (-1: any), broker_length u16, topic_length u16
 .    n    names           broker and topic of each target, UTF-8; zero-padded to a multiple of 8
 .   36*c  rows            by due_ms, then source, then offset:

      off  size  field       meaning
       0    8    due_ms
       8    8    offset      queue offset in the source
      16    2    source      index into the table
      18    2    target      index into the table
      20    4    size        bytes of the record; its position is the sum of those before
      24    4    tag_hash
      28    4    key_hash
      32    4    crc32c      of the record: bodies are read in parts

 .    8*c  timer_key       only if `extra` says so: u64 (key_hash.py), 0: none

BODIES (kind 25): the records, one after the other, in the order of the rows.

A block is never changed.  What was loaded of it is a cursor in the checkpoint
(checkpoint_state.py).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Hashes, Rows

INDEX, BODIES = 24, 25
ROWS_MAX = 4_096
BYTES_MAX = 8 * 1024 * 1024  # of bodies; a single larger record makes a block of its own
ROW_BYTES = 36
_HASH_BYTES = 8

REMEDY = (
    "Restore the timer service's data directory from a copy, or accept the loss of the timers in"
    " what is damaged, and of no others, with `duemq-timer-service set-aside DIRECTORY`"
)

_HEADER = struct.Struct("<IIIIQQ")
_SOURCE = struct.Struct("<QII")
_TARGET = struct.Struct("<iHH")
_ROW = np.dtype(
    [
        ("due_ms", "<i8"),
        ("offset", "<i8"),
        ("source", "<u2"),
        ("target", "<u2"),
        ("size", "<u4"),
        ("tag_hash", "<u4"),
        ("key_hash", "<u4"),
        ("crc32c", "<u4"),
    ]
)
TIMER_KEY = 1
"""In `extra`.  A block of timers without keys has the bytes that it always had."""
IDENTITY = struct.Struct("<qqHH")
"""How a row begins: due_ms, offset, source, target."""
assert _HEADER.size == 32
assert _ROW.itemsize == ROW_BYTES


class Index(NamedTuple):
    """A block's index: its tables and its rows; source and target are indexes into the tables."""

    sources: list[SourceId]
    targets: list[TargetId]
    rows: npt.NDArray[Any]
    bodies_length: int
    timer_key: Hashes | None = None

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each record begins in the bodies; one entry more than rows."""
        return body_starts(self.rows)


def body_starts(packed: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where the record of each of these rows begins; one entry more than rows."""
    starts = np.zeros(len(packed) + 1, dtype=np.int64)
    np.cumsum(packed["size"], out=starts[1:])
    return starts


def crcs(records: list[bytes | memoryview]) -> npt.NDArray[np.uint32]:
    """CRC-32C of each record."""
    value = google_crc32c.value
    return np.array([value(bytes(record)) for record in records], dtype=np.uint32)


def encode_index(
    rows: Rows, crc: npt.NDArray[np.uint32], sources: list[SourceId], targets: list[TargetId]
) -> bytes:
    """The body of an INDEX entry; `rows` are in due order and index the two tables."""
    used_sources, source = np.unique(rows.source, return_inverse=True)
    used_targets, target = np.unique(rows.target, return_inverse=True)
    names: list[bytes] = []
    table: list[bytes] = []
    for number in used_targets.tolist():
        broker, topic = targets[number].broker.encode(), targets[number].topic.encode()
        names += (broker, topic)
        table.append(_TARGET.pack(targets[number].queue_id, len(broker), len(topic)))
    text = b"".join(names)
    text += bytes(-len(text) % 8)
    packed = np.zeros(len(rows), dtype=_ROW)
    for name in ("due_ms", "offset", "size", "tag_hash", "key_hash"):
        packed[name] = getattr(rows, name)
    packed["source"], packed["target"], packed["crc32c"] = source, target, crc
    hashes = rows.timer_key
    column = b"" if hashes is None or not hashes.any() else hashes.astype("<u8").tobytes()
    extra = TIMER_KEY if column else 0
    header = _HEADER.pack(
        len(rows), len(used_sources), len(used_targets), len(text), rows.body_bytes(), extra
    )
    pairs = [_SOURCE.pack(*sources[number], 0) for number in used_sources.tolist()]
    return b"".join((header, *pairs, *table, text, packed.tobytes(), column))


def decode_index(body: memoryview) -> Index:
    """Reads an INDEX body.  Raises ValueError if the lengths do not add up."""
    at = rows_at(body)
    tables, rows = tables_in(body, at), decode_rows(body, at)
    bodies_length = _HEADER.unpack_from(body)[4]
    return Index(tables.sources(), tables.targets(), rows, bodies_length, timer_key_column(body))


def decode_rows(body: memoryview, at: RowsAt) -> npt.NDArray[Any]:
    """The rows of an INDEX body, as a view."""
    return np.frombuffer(body, dtype=_ROW, count=at.rows, offset=at.start)


class RowsAt(NamedTuple):
    """How many rows an INDEX body has, and where they begin."""

    rows: int
    start: int


def rows_at(body: memoryview) -> RowsAt:
    """Where the rows lie.  Raises ValueError if the lengths do not add up."""
    if len(body) < _HEADER.size:
        raise ValueError(f"a block index of {len(body)} bytes, less than {_HEADER.size}")
    count, sources, targets, names_length, _, extra = _HEADER.unpack_from(body)
    if extra & ~TIMER_KEY:
        raise ValueError(f"a block index with columns {extra:#x}, this release knows {TIMER_KEY}")
    start = _HEADER.size + _SOURCE.size * sources + _TARGET.size * targets + names_length
    end = start + count * (ROW_BYTES + (_HASH_BYTES if extra else 0))
    if end != len(body):
        raise ValueError(f"a block index of {len(body)} bytes, not {end}")
    return RowsAt(count, start)


def timer_key_column(body: memoryview) -> Hashes | None:
    """The hashes of the rows' timer keys, in an INDEX body that `rows_at` found right."""
    count, _, _, _, _, extra = _HEADER.unpack_from(body)
    if not extra:
        return None
    return np.frombuffer(body, "<u8", count, len(body) - _HASH_BYTES * count)


def due_column(body: memoryview, rows: RowsAt) -> npt.NDArray[np.int64]:
    """The due times of the rows, as a view."""
    return np.ndarray((rows.rows,), "<i8", body, rows.start, (ROW_BYTES,))


class Tables(NamedTuple):
    """The tables of an INDEX body as they lie there: equal ones mean the same."""

    source_count: int
    target_count: int
    data: bytes

    def sources(self) -> list[SourceId]:
        """What the column `source` means."""
        return decode_sources(self.data[: _SOURCE.size * self.source_count])

    def targets(self) -> list[TargetId]:
        """What the column `target` means."""
        return decode_targets(self.data[_SOURCE.size * self.source_count :], self.target_count)


def tables_in(body: memoryview, rows: RowsAt) -> Tables:
    """The tables of an INDEX body, in front of its rows."""
    _, sources, targets, _, _, _ = _HEADER.unpack_from(body)
    return Tables(sources, targets, bytes(body[_HEADER.size : rows.start]))


def decode_targets(table: bytes, targets: int) -> list[TargetId]:
    """The targets of a target table with so many entries."""
    cut = _TARGET.size * targets
    found: list[TargetId] = []
    for queue_id, broker, topic in _TARGET.iter_unpack(table[:cut]):
        names = table[cut : cut + broker], table[cut + broker : cut + broker + topic]
        found.append(TargetId(names[0].decode(), names[1].decode(), queue_id))
        cut += broker + topic
    return found


def decode_sources(table: bytes) -> list[SourceId]:
    """The sources of a source table."""
    return [SourceId(store_id, queue_id) for store_id, queue_id, _ in _SOURCE.iter_unpack(table)]
