"""Entry of a segmented log.  Little-endian, 8-byte aligned, opaque body.

off  size  field            meaning
 0    4    crc32c           CRC-32C of bytes [4, length)
 4    2    magic            0xD0E1
 6    1    version          1
 7    1    kind             the owner's; 1 is a message frame (frame.py), 32 on are replication's
 8    4    length           whole entry, this header and the padding included; a multiple of 8
12    4    body_length      bytes of the body; the rest up to `length` is zeros
16    8    position         where the entry lies in its log
24    8    synced_position  the log was known to be durable up to here when this was written;
                          of a log with replicas: committed, so durable on each that is in sync
32    n    body

The CRC covers every byte after itself, so a flipped length or kind is caught.
`position` tells an entry from a copy of one inside somebody's message body, and
from stale bytes of a recycled block.  `synced_position` proves, long after a
power failure, that what lies before it was on the disk: a hole before it is
damage and not a torn write (recovery.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from duemq_server.storage.disk import Buffer, nbytes
from duemq_server.storage.errors import UnknownVersion

HEADER = struct.Struct("<IHBBIIQQ")
HEADER_BYTES = 32
assert HEADER.size == HEADER_BYTES
_COVERED = struct.Struct("<HBBIIQQ")  # the header without its CRC
_CRC = struct.Struct("<I")

MAGIC = 0xD0E1
MAGIC_BYTES = MAGIC.to_bytes(2, "little")
MAGIC_OFFSET = 4
VERSION = 1
ALIGNMENT = 8
REPLICATION_KINDS = 32
"""Kinds from here on, most of them replication's, are passed over by whoever replays a log and does
not know them."""
ENTRY_BYTES_MAX = 64 * 1024 * 1024
"""Largest entry.  A length beyond it is damage and is never allocated."""

_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))


class Entry(NamedTuple):
    """A verified entry.  `body` is a view of the bytes it was read from."""

    position: int
    kind: int
    body: memoryview
    end: int
    synced_position: int


class InvalidEntryError(ValueError):
    """Bytes that are not an entry; the message says which check failed."""


class EntryCutOffError(InvalidEntryError):
    """The bytes end before the entry does; `length` is the entry's, if the header is there."""

    def __init__(self, problem: str, length: int = HEADER_BYTES) -> None:
        super().__init__(problem)
        self.length = length


def entry_bytes(body_length: int) -> int:
    """Size of an entry whose body has `body_length` bytes."""
    return (HEADER_BYTES + body_length + ALIGNMENT - 1) & -ALIGNMENT


def crc32c(crc: int, part: Buffer) -> int:
    """Extends a CRC-32C without copying."""
    if isinstance(part, bytes):
        return google_crc32c.extend(crc, part)
    # The C function takes bytes and arrays, but no memoryview or bytearray.
    array = np.frombuffer(part, np.uint8) if nbytes(part) else b""
    return google_crc32c.extend(crc, array)


def encode(
    kind: int, parts: Sequence[Buffer], body_length: int, position: int, synced_position: int
) -> list[Buffer]:
    """Buffers of one entry: a header, the given parts, and padding."""
    length = entry_bytes(body_length)
    header = _COVERED.pack(MAGIC, VERSION, kind, length, body_length, position, synced_position)
    padding = _PADDING[length - HEADER_BYTES - body_length]
    crc = google_crc32c.value(header)
    for part in parts:
        crc = crc32c(crc, part)
    crc = google_crc32c.extend(crc, padding)
    return [_CRC.pack(crc) + header, *parts, padding]


def plausible_length(buffer: Buffer, at: int = 0) -> int:
    """Length of the entry whose header starts at `at`, or 0 if that is no header.

    Cheap: looks at the magic and the lengths only, not at the CRC.
    """
    _, magic, _, _, length, body_length, _, _ = HEADER.unpack_from(buffer, at)
    if magic != MAGIC or length > ENTRY_BYTES_MAX or length != entry_bytes(body_length):
        return 0
    return length


def decode(buffer: memoryview, at: int = 0, position: int | None = None) -> Entry:
    """Verifies the entry that starts at `at` of the buffer.

    `position` is where the entry must lie in its log; None: wherever it says.
    Raises InvalidEntryError, UnknownVersion.
    """
    if at + HEADER_BYTES > len(buffer):
        raise EntryCutOffError("the header is cut off")
    crc, magic, version, kind, length, body_length, own, synced = HEADER.unpack_from(buffer, at)
    if magic != MAGIC:
        raise InvalidEntryError(f"magic is 0x{magic:04X}, not 0x{MAGIC:04X}")
    if length > ENTRY_BYTES_MAX or length != entry_bytes(body_length):
        raise InvalidEntryError(f"length {length} and body length {body_length} do not fit")
    if at + length > len(buffer):
        raise EntryCutOffError(f"cut off: {len(buffer) - at} bytes of {length}", length)
    actual = google_crc32c.value(np.frombuffer(buffer, np.uint8, length - 4, at + 4))
    if actual != crc:
        raise InvalidEntryError(f"CRC-32C is 0x{actual:08X}, the header says 0x{crc:08X}")
    if version != VERSION:
        raise UnknownVersion(f"entry at {own} has version {version}, this release reads {VERSION}")
    if position is not None and own != position:
        raise InvalidEntryError(f"belongs at position {own}, found at {position}")
    start = at + HEADER_BYTES
    return Entry(own, kind, buffer[start : start + body_length], own + length, synced)


def whole_entries(run: memoryview) -> int:
    """Bytes of the entries that lie whole at the run's start, by their headers alone.

    0 if not even the first does.
    """
    at = 0
    while at + HEADER_BYTES <= len(run):
        length = plausible_length(run, at)
        if not length or at + length > len(run):
            break
        at += length
    return at


def claim_of(run: memoryview, position: int) -> int:
    """The highest `synced_position` that a run of whole entries carries.

    Looks at the headers only: that they lie one behind the other from `position` on, to the run's
    end.  Raises InvalidEntryError.
    """
    at = claim = 0
    while at < len(run):
        length = plausible_length(run, at) if at + HEADER_BYTES <= len(run) else 0
        if not length or at + length > len(run):
            raise InvalidEntryError(f"no whole entry at {position + at}")
        *_, own, synced = HEADER.unpack_from(run, at)
        if own != position + at:
            raise InvalidEntryError(f"belongs at position {own}, not at {position + at}")
        claim = max(claim, synced)
        at += length
    return claim


def split(buffer: Buffer) -> Iterator[Entry]:
    """Verified entries of a run that was copied out of a log.

    Raises InvalidEntryError, UnknownVersion.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    at = 0
    while at < len(view):
        entry = decode(view, at)
        yield entry
        at += entry.end - entry.position
