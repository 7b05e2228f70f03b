"""Small state in one file, replaced as a whole.

off  size  field      meaning
 0    4    crc32c     CRC-32C of bytes [4, end)
 4    4    magic      "DMQC"
 8    2    version    1
10    6    reserved   zeros
16    8    length     payload bytes
24    n    payload    the owner's

Written to a temporary file that is synced, renamed over the old one, and the
directory synced: after a crash there is the old state or the new one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import google_crc32c

from duemq_server.storage.disk import Disk, write_whole
from duemq_server.storage.errors import CorruptFile, UnknownVersion

HEADER = struct.Struct("<I4sH6xQ")
assert HEADER.size == 24
MAGIC = b"DMQC"
VERSION = 1

REMEDY = (
    "Restore the data directory from a copy, whole; that of a replica is emptied instead: it gets"
    " everything from the one that leads"
)
"""No file of these is left out without harm, but those whose owner says so."""
NOT_NEEDED = "Nothing is to be done: it is left out"
"""Remedy for a file of which damage counts for nothing."""


def encode(parts: Sequence[bytes]) -> list[bytes]:
    """The file's bytes, in parts as the payload is."""
    covered = HEADER.pack(0, MAGIC, VERSION, sum(map(len, parts)))[4:]
    crc = google_crc32c.value(covered)
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return [crc.to_bytes(4, "little") + covered, *parts]


def decode(data: bytes, path: str, remedy: str = REMEDY) -> bytes:
    """The payload.  Raises CorruptFile, UnknownVersion; `path` and `remedy` are for the message."""
    if len(data) < HEADER.size:
        raise CorruptFile(path, 0, f"only {len(data)} bytes", remedy)
    crc, magic, version, length = HEADER.unpack_from(data)
    if magic != MAGIC or google_crc32c.value(data[4:]) != crc:
        raise CorruptFile(path, 0, "magic or CRC-32C is wrong", remedy)
    if version != VERSION:
        raise UnknownVersion(f"{path} has version {version}, this release reads {VERSION}")
    if length != len(data) - HEADER.size:
        raise CorruptFile(path, 16, f"length {length} is wrong", remedy)
    return data[HEADER.size :]


def save(path: str, payload: bytes, disk: Disk) -> None:
    """Replaces the state durably.  Raises DiskFull (the old state stands), DiskFailed."""
    save_parts(path, [payload], disk)


def save_parts(path: str, parts: Sequence[bytes], disk: Disk) -> None:
    """As `save`, of a payload that is large: it is not copied."""
    write_whole(path, encode(parts), disk)
    disk.fsync_dir(os.path.dirname(path) or ".")


def load(path: str, disk: Disk, remedy: str = REMEDY) -> bytes | None:
    """The state, or None if none was ever saved.  Raises CorruptFile, UnknownVersion."""
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        data = bytes(file.pread(file.size(), 0))
    except OSError as error:  # a bad sector, say
        raise CorruptFile(path, 0, error.strerror or str(error), remedy) from error
    finally:
        file.close()
    return decode(data, path, remedy)
