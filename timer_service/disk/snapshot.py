"""A snapshot of a shard: its checkpoint and the period files that it names.  Little-endian.

For a replica whose log ends before its leader's begins.  With the log from `log_needed_from` on it
is all that a start needs.

off  size  field      meaning
 0    4    crc32c     CRC-32C of bytes [4, end)
 4    4    magic      "DMQS"
 8    2    version    1
10    6    reserved   zeros
16    8    length     of the checkpoint's payload
24    n    payload    checkpoint_state.py
 .    .    files      in the order of their names, each as long as the checkpoint says
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c

from duemq.errors import Unavailable
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk, write_all
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.data_directory import checkpoint_path, segments_path
from duemq_server.timer_service.far.far_segments import SUFFIX, read_bytes

HEADER = struct.Struct("<I4sH6xQ")
assert HEADER.size == 24
MAGIC = b"DMQS"
VERSION = 1
BYTES_MAX = 1 << 30  # it is in memory as a whole, on both sides
TRIES = 5  # a checkpoint that is saved meanwhile may take files away


class Snapshot(NamedTuple):
    """What one says."""

    state: CheckpointState
    files: list[tuple[str, memoryview]]


def take(data_dir: str, disk: Disk) -> bytes | None:
    """Of the last checkpoint of a shard that may be at work; None: it has none.  Any thread.

    Raises Unavailable for one that is too large or that checkpoints overtake, CorruptFile.
    """
    for _ in range(TRIES):
        payload = checkpoint.load(checkpoint_path(data_dir), disk)
        if payload is None:
            return None
        lengths = checkpoint_state.decode(payload).lengths
        size = len(payload) + sum(lengths.values())
        if size > BYTES_MAX:
            raise Unavailable(
                f"a snapshot of {size} bytes is larger than {BYTES_MAX}: copy the data directory"
            )
        try:
            return encode(payload, _read(data_dir, disk, lengths))
        except (FileNotFoundError, CorruptFile):  # the next checkpoint does not need it
            continue
    raise Unavailable("its period files change all the time: try again")


def _read(data_dir: str, disk: Disk, lengths: dict[str, int]) -> Iterator[bytes]:
    for name in sorted(lengths):
        yield read_bytes(disk, os.path.join(segments_path(data_dir), name), 0, lengths[name])


def encode(payload: bytes, files: Iterator[bytes]) -> bytes:
    """A checkpoint's payload and the files it names, in order."""
    header = HEADER.pack(0, MAGIC, VERSION, len(payload))[4:]
    parts = [header, payload, *files]
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return b"".join((crc.to_bytes(4, "little"), *parts))


def decode(data: bytes) -> Snapshot:
    """Raises ValueError for what is no snapshot, Corrupt for a checkpoint that is none."""
    if len(data) < HEADER.size:
        raise ValueError(f"a snapshot of {len(data)} bytes")
    crc, magic, version, length = HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"a snapshot with magic {magic!r}, version {version}")
    view = memoryview(data)
    if google_crc32c.value(view[4:].tobytes()) != crc:
        raise ValueError("CRC-32C of a snapshot is wrong")
    at = HEADER.size + length
    state = checkpoint_state.decode(bytes(view[HEADER.size : at]))
    files = []
    for name in sorted(state.lengths):
        end = at + state.lengths[name]
        files.append((name, view[at:end]))
        at = end
    if at != len(data):
        raise ValueError(f"a snapshot of {len(data)} bytes, its checkpoint says {at}")
    return Snapshot(state, files)


def put_files(snapshot: Snapshot, data_dir: str, disk: Disk) -> None:
    """Its period files in place of all others, durably.  Raises DiskFull, DiskFailed."""
    directory = segments_path(data_dir)
    remove_files(data_dir, disk)
    for name, data in snapshot.files:
        file = disk.open(os.path.join(directory, name), create=True)
        try:
            write_all(file, [data], 0)
            file.fdatasync()
        finally:
            file.close()
    disk.fsync_dir(directory)


def remove_files(data_dir: str, disk: Disk) -> None:
    """Removes every period file, durably.  Raises DiskFailed."""
    directory = segments_path(data_dir)
    disk.makedirs(directory)
    for name in disk.listdir(directory):
        if name.endswith(SUFFIX):
            disk.unlink(os.path.join(directory, name))
    disk.fsync_dir(directory)
