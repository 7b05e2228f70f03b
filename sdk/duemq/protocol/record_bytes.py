"""Bytes of protobuf messages that are read and written by hand, and the hashes beside them.  Pure.

The records of a batch are the encoding of duemq.v1.RecordBatch: entry after entry of

    0x0A  varint(length of the record)  record (duemq.v1.Record)
"""

from zlib import crc32

ENTRY_TAG = BODY_TAG = 0x0A
"""Of an entry in a RecordBatch, and of the body in a Record: field 1, with a length."""

# The last three bits of a field's tag; the others are its number.
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

_SMALL = tuple(bytes([value]) for value in range(0x80))


def varint(value: int) -> bytes:
    """A number from 0 on, seven bits a byte, the lowest first."""
    if value <= 0x7F:
        return _SMALL[value]
    if value <= 0x3FFF:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """(value, position after it); position -1: malformed."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1


def read_entry(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """(Start, end) of the record whose entry begins at `at`; start -1: none does."""
    if at >= end or data[at] != ENTRY_TAG:
        return -1, -1
    length, start = read_varint(data, at + 1, end)
    return (start, start + length) if 0 <= start <= end - length else (-1, -1)


def text_hash(text: bytes) -> int:
    """The hash that stands for a tag or key, CRC-32 of its UTF-8; 0 only for none."""
    return (crc32(text) or 1) if text else 0


def property_entry(name: bytes, value: bytes) -> bytes:
    """An entry of Record.properties."""
    entry = b"\x0a%b%b\x12%b%b" % (varint(len(name)), name, varint(len(value)), value)
    return b"\x32" + varint(len(entry)) + entry
