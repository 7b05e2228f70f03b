"""Consume queue: where each record of a queue lies in the commit log.

An entry a record, at the record's queue offset, in a `FixedIndex`.  Little-endian.

off  size  field        meaning
 0    8    position     where the record starts in the log
 8    4    size         bytes of the record
12    4    frame_back   from the record back to the first byte of its log entry
16    4    tag_hash     CRC-32 of the tag, 0 without
20    4    key_hash     CRC-32 of the key, 0 without
24    8    store_ms     when the broker accepted it

Derived from the log: written after a frame is durable, synced at a checkpoint,
rebuilt beyond it.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np

from duemq_server.storage.disk import Buffer, nbytes
from duemq_server.storage.frame import Frame
from duemq_server.storage.record import HEADER_BYTES as ENTRY_HEADER_BYTES

ENTRY = struct.Struct("<QIIIIQ")
ENTRY_BYTES = 32
assert ENTRY.size == ENTRY_BYTES
DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("size", "<u4"),
        ("frame_back", "<u4"),
        ("tag_hash", "<u4"),
        ("key_hash", "<u4"),
        ("store_ms", "<u8"),
    ]
)
assert DTYPE.itemsize == ENTRY_BYTES
Entries: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"

VECTOR_COUNT_MIN = 48
"""From so many records on NumPy beats a loop (its fixed cost is 5-8 us)."""


def encode(
    entry_position: int,
    payload_at: int,
    sizes: Buffer,
    tag_hashes: Buffer,
    key_hashes: Buffer,
    store_ms: int,
) -> bytes:
    """Entries of one frame.

    `entry_position` is the log position of the frame's entry, `payload_at` where
    the payload starts in the frame (`Frame.payload_at`); arrays are packed u32.
    """
    back = ENTRY_HEADER_BYTES + payload_at
    count = nbytes(sizes) // 4
    if count >= VECTOR_COUNT_MIN:
        return _encode_vector(entry_position, back, sizes, tag_hashes, key_hashes, store_ms)
    layout = f"<{count}I"
    out = bytearray(count * ENTRY_BYTES)
    at = 0
    for size, tag, key in zip(
        struct.unpack(layout, sizes),
        struct.unpack(layout, tag_hashes),
        struct.unpack(layout, key_hashes),
        strict=True,
    ):
        ENTRY.pack_into(out, at, entry_position + back, size, back, tag, key, store_ms)
        back += size
        at += ENTRY_BYTES
    return bytes(out)


def _encode_vector(
    entry_position: int,
    payload_back: int,
    sizes: Buffer,
    tag_hashes: Buffer,
    key_hashes: Buffer,
    store_ms: int,
) -> bytes:
    size = np.frombuffer(sizes, "<u4")
    out = np.empty(len(size), DTYPE)
    back = np.empty(len(size), np.uint64)
    back[0] = payload_back
    np.cumsum(size[:-1], dtype=np.uint64, out=back[1:])
    back[1:] += np.uint64(payload_back)
    out["position"] = back + np.uint64(entry_position)
    out["size"] = size
    out["frame_back"] = back
    out["tag_hash"] = np.frombuffer(tag_hashes, "<u4")
    out["key_hash"] = np.frombuffer(key_hashes, "<u4")
    out["store_ms"] = store_ms
    return out.tobytes()


def encode_frame(entry_position: int, frame: Frame) -> bytes:
    """Entries of a stored frame."""
    return encode(
        entry_position,
        frame.payload_at,
        frame.sizes.data,
        frame.tag_hashes.data,
        frame.key_hashes.data,
        frame.store_ms,
    )


def decode(data: Buffer) -> Entries:
    """A structured view of entries, fields as in DTYPE."""
    return np.frombuffer(data, DTYPE)
