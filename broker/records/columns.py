"""The layout of records inside a batch, checked without decoding messages.  Pure.

A batch's `records` are entry after entry of duemq.v1.RecordBatch (record_bytes.py).
The sender says each entry's size beside it.  `check_layout` proves that the sizes are those of the
entries, for the whole batch at once; so every later slice by these sizes is a whole entry.
A record itself is looked into only where it is large (batch.py) or where the sender gave no side
arrays: then `scan` walks over its top-level fields.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import InvalidArgument
from duemq.protocol.record_bytes import (
    ENTRY_TAG,
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    read_entry,
    read_varint,
    text_hash,
)

# Below this many records a loop is faster than NumPy's fixed cost per call.
VECTOR_RECORDS_MIN = 64

# Largest entry of 1, 2, 3 and 4 bytes of length: tag + length bytes + 2^(7 * bytes) - 1.
_ENTRY_BYTES_MAX = np.array([1 + k + (1 << (7 * k)) - 1 for k in range(1, 5)], dtype=np.int64)

_FIELD_BODY, _FIELD_KEY, _FIELD_TAG, _FIELD_PROPERTIES = 1, 3, 4, 6

U32Array = npt.NDArray[np.uint32]


class RecordShape(NamedTuple):
    """What the broker needs to know of one record."""

    body_bytes: int
    properties_bytes: int
    tag_hash: int
    key_hash: int


def check_layout(records: bytes, sizes: U32Array) -> None:
    """Raises InvalidArgument unless `sizes` are those of the entries that make up `records`."""
    few = sizes.tolist() if len(sizes) < VECTOR_RECORDS_MIN else None
    total = int(sizes.sum(dtype=np.uint64)) if few is None else sum(few)
    if total != len(records):
        raise InvalidArgument(
            f"sizes: their sum {total} is not the length of records, {len(records)}",
            field="sizes",
            value=total,
            limit=len(records),
        )
    wrong = _wrong_entry_vector(records, sizes) if few is None else _wrong_entry(records, few)
    if wrong is not None:
        raise InvalidArgument(
            f"sizes[{wrong}]: {int(sizes[wrong])} is not the size of record {wrong}",
            field="sizes",
            value=int(sizes[wrong]),
            limit="the encoded size of the record, its tag and length included",
        )


def _wrong_entry(records: bytes, sizes: list[int]) -> int | None:
    """Index of the first entry whose head does not say its size; None: all do."""
    start = 0
    for index, size in enumerate(sizes):
        if size < 2 or records[start] != ENTRY_TAG:
            return index
        length, head = read_varint(records, start + 1, start + size)
        if head < 0 or head - start + length != size:
            return index
        start += size
    return None


def _wrong_entry_vector(records: bytes, sizes: U32Array) -> int | None:
    wide = sizes.astype(np.int64)
    if int(wide.min()) < 2:
        return int(np.argmax(wide < 2))
    data = np.frombuffer(records, dtype=np.uint8)
    starts = np.cumsum(wide) - wide
    good = data[starts] == ENTRY_TAG
    head_bytes = np.searchsorted(_ENTRY_BYTES_MAX, wide) + 1
    first, last = int(head_bytes.min()), int(head_bytes.max())
    for count in range(first, last + 1):
        if count > len(_ENTRY_BYTES_MAX):
            good &= head_bytes < count
            continue
        chosen = slice(None) if first == last else head_bytes == count
        at, length = starts[chosen] + 1, wide[chosen] - 1 - count
        fits = length >= 0
        at = np.where(fits, at, 0)
        for byte in range(count):
            expected = (length >> (7 * byte)) & 0x7F
            if byte < count - 1:
                expected |= 0x80
            fits &= data[np.minimum(at + byte, len(data) - 1)] == expected
        good[chosen] &= fits
    return None if good.all() else int(np.argmin(good))


def scan(records: bytes | memoryview, start: int, end: int) -> RecordShape:
    """The shape of the record in records[start:end] (without its entry's tag and length).

    Raises InvalidArgument if it is not a well-formed protobuf message.
    """
    body_bytes = properties_bytes = tag_hash = key_hash = 0
    at = start
    while at < end:
        tag, at = read_varint(records, at, end)
        if at < 0 or tag >> 3 == 0:
            raise _malformed(start)
        field, kind = tag >> 3, tag & 7
        if kind == LENGTH_DELIMITED:
            length, at = read_varint(records, at, end)
            if at < 0 or at + length > end:
                raise _malformed(start)
            if field == _FIELD_BODY:
                body_bytes = length
            elif field == _FIELD_KEY:
                key_hash = text_hash(bytes(records[at : at + length]))
            elif field == _FIELD_TAG:
                tag_hash = text_hash(bytes(records[at : at + length]))
            elif field == _FIELD_PROPERTIES:
                properties_bytes += length
            at += length
        elif kind == VARINT:
            _, at = read_varint(records, at, end)
            if at < 0:
                raise _malformed(start)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise _malformed(start)
    if at != end:
        raise _malformed(start)
    return RecordShape(body_bytes, properties_bytes, tag_hash, key_hash)


def _malformed(start: int) -> InvalidArgument:
    return InvalidArgument(
        f"records: what begins at byte {start} is not a Record", field="records", value=start
    )


def derive_columns(records: bytes, records_max: int) -> tuple[bytes, bytes, bytes]:
    """(sizes, tag hashes, key hashes) of a batch that came without them, as little-endian u32.

    Ends after the first record beyond `records_max`.  Raises InvalidArgument if `records` is not a
    RecordBatch.
    """
    sizes: list[int] = []
    tags: list[int] = []
    keys: list[int] = []
    at, end = 0, len(records)
    while at < end and len(sizes) <= records_max:
        head, following = read_entry(records, at, end)
        if head < 0:
            raise _malformed(at)
        shape = scan(records, head, following)
        sizes.append(following - at)
        tags.append(shape.tag_hash)
        keys.append(shape.key_hash)
        at = following
    pack = struct.Struct(f"<{len(sizes)}I").pack
    return pack(*sizes), pack(*tags), pack(*keys)
