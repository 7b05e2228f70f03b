"""A snapshot of a shard on its way to another replica: its checkpoint and the period files that it
names.  Little-endian.

For a replica whose log ends before its leader's begins.  With the log from `log_needed_from` on it
is all that a start needs.  It is of any size: it is read and sent in parts (`Leaving`), and written
as they come (arriving.py).

off  size  field          meaning
 0    4    magic          "DMQS"
 4    2    version        2
 6    2    reserved       zeros
 8    8    length         of the checkpoint's payload
16    4    payload_crc32c
20    4    crc32c         of bytes [0, 20)
24    n    payload        checkpoint_state.py
 .    .    files          in the order of their names: each as long as the checkpoint says, and its
                          CRC-32C, 4 bytes

The release before sends version 1, and reads no other.  It is read as well, and sent to who is of
that release: while a cluster is upgraded a replica may need the one or the other.

 0    4    crc32c         of all that follows: so the files are read twice
 4    4    magic          "DMQS"
 8    2    version        1
10    6    reserved       zeros
16    8    length         of the checkpoint's payload
24    n    payload        checkpoint_state.py
 .    .    files          in the order of their names, each as long as the checkpoint says
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import google_crc32c

from duemq.errors import Unavailable
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.data_directory import checkpoint_path, segments_path
from duemq_server.timer_service.far import far_block
from duemq_server.timer_service.far.far_segments import SUFFIX

HEADER = struct.Struct("<4sH2xQI")
CRC = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CRC.size
assert HEADER_BYTES == 24
MAGIC = b"DMQS"
VERSION = 2
PAYLOAD_BYTES_MAX = 1 << 30
"""Of the checkpoint, which is in memory as a whole, on both sides."""
HEADER_1 = struct.Struct("<I4sH6xQ")
assert HEADER_1.size == HEADER_BYTES
VERSION_1 = 1
VERSION_1_BYTES_MAX = 1 << 30
"""Who reads version 1 has all of it in memory."""
CRC_BYTES = 1 << 20
"""Read at once for the checksum of version 1."""
TRIES = 5  # a checkpoint that is saved meanwhile may take files away


class PeriodFile(NamedTuple):
    """One that is open; what is appended to it meanwhile lies behind `length`."""

    file: DiskFile
    path: str
    length: int

    def read(self, at: int, bytes_max: int) -> bytes:
        """Raises CorruptFile where it has ended too early, OSError."""
        data = bytes(self.file.pread(min(bytes_max, self.length - at), at))
        if not data:
            raise CorruptFile(self.path, at, f"ends before {self.length}", far_block.REMEDY)
        return data


class Header(NamedTuple):
    """What stands in front of a checkpoint's payload."""

    version: int
    length: int
    """Of the payload."""
    crc: int
    """CRC-32C of the payload; in version 1 of all behind itself."""


class Leaving:
    """What a leader sends.  One thread at a time.

    The files are open: they are read to their end even if the shard deletes them meanwhile.
    """

    def __init__(self, payload: bytes, files: list[PeriodFile], version: int = VERSION) -> None:
        """Raises CorruptFile, OSError."""
        header = encode_header(payload) if version == VERSION else _header_1(payload, files)
        self._head = memoryview(header + payload)
        self._files = files
        self._version = version
        self._number = self._done = self._crc = 0  # of the file that is read: up to where

    def read(self, bytes_max: int) -> bytes:
        """The next part; empty at the end.  Raises CorruptFile, OSError."""
        if self._head:
            part, self._head = self._head[:bytes_max], self._head[bytes_max:]
            return bytes(part)
        while self._number < len(self._files):
            file = self._files[self._number]
            if self._done < file.length:
                data = file.read(self._done, bytes_max)
                self._crc = google_crc32c.extend(self._crc, data)
                self._done += len(data)
                return data
            crc = CRC.pack(self._crc)
            self._number, self._done, self._crc = self._number + 1, 0, 0
            if self._version == VERSION:
                return crc
        return b""

    def close(self) -> None:
        """Closes the files."""
        for each in self._files:
            each.file.close()


def take(data_dir: str, disk: Disk, version: int = VERSION) -> Leaving | None:
    """Of the last checkpoint of a shard that may be at work; None: it has none.  Any thread.

    Raises Unavailable for one that checkpoints overtake, or that is too large for version 1;
    CorruptFile.
    """
    path = checkpoint_path(data_dir)
    payload = checkpoint.load(path, disk)
    for _ in range(TRIES):
        if payload is None:
            return None
        damage: CorruptFile | None = None
        files: list[PeriodFile] = []
        try:
            _open_files(data_dir, disk, checkpoint_state.decode(payload).lengths, files)
        except CorruptFile as error:
            damage = error
        seen, payload = payload, checkpoint.load(path, disk)
        unchanged = payload == seen  # so nothing was deleted, nor made anew under the same name
        if unchanged and damage is None:
            return _leaving(seen, files, version)
        for each in files:
            each.file.close()
        if unchanged and damage is not None:
            raise damage
    raise Unavailable("its period files change all the time: try again")


def _leaving(payload: bytes, files: list[PeriodFile], version: int) -> Leaving:
    try:
        return Leaving(payload, files, version)
    except BaseException:
        for each in files:
            each.file.close()
        raise


def _open_files(
    data_dir: str, disk: Disk, lengths: dict[str, int], files: list[PeriodFile]
) -> None:
    """Appends to `files`.  Raises CorruptFile."""
    for name in sorted(lengths):
        path, length = os.path.join(segments_path(data_dir), name), lengths[name]
        try:
            file = disk.open(path)
        except FileNotFoundError as error:
            raise CorruptFile(path, 0, "is missing", far_block.REMEDY) from error
        files.append(PeriodFile(file, path, length))
        if file.size() < length:
            raise CorruptFile(path, file.size(), f"ends before {length}", far_block.REMEDY)


def encode_header(payload: bytes) -> bytes:
    """What stands in front of a checkpoint's payload."""
    header = HEADER.pack(MAGIC, VERSION, len(payload), google_crc32c.value(payload))
    return header + CRC.pack(google_crc32c.value(header))


def _header_1(payload: bytes, files: list[PeriodFile]) -> bytes:
    size = HEADER_1.size + len(payload) + sum(each.length for each in files)
    if size > VERSION_1_BYTES_MAX:
        raise Unavailable(
            f"a snapshot of {size} bytes, for a replica of an older release, which takes"
            f" {VERSION_1_BYTES_MAX}: start it in the leader's release"
        )
    header = HEADER_1.pack(0, MAGIC, VERSION_1, len(payload))[CRC.size :]
    crc = google_crc32c.value(header + payload)
    for each in files:
        at = 0
        while at < each.length:
            data = each.read(at, CRC_BYTES)
            crc = google_crc32c.extend(crc, data)
            at += len(data)
    return CRC.pack(crc) + header


def decode_header(data: bytes) -> Header:
    """Of either version.  Raises ValueError for what is no snapshot."""
    if data[CRC.size :].startswith(MAGIC):
        crc, magic, version, length = HEADER_1.unpack_from(data)
        known = VERSION_1
    else:
        magic, version, length, crc = HEADER.unpack_from(data)
        known = VERSION
    if (magic, version) != (MAGIC, known):
        raise ValueError(f"a snapshot with magic {magic!r}, version {version}")
    own = CRC.unpack_from(data, HEADER.size)
    if version == VERSION and own != (google_crc32c.value(data[: HEADER.size]),):
        raise ValueError("CRC-32C of a snapshot's header is wrong")
    if not 0 < length <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a snapshot with a checkpoint of {length} bytes")
    return Header(version, length, crc)


def remove_files(data_dir: str, disk: Disk) -> None:
    """Removes every period file, durably.  Raises DiskFailed."""
    directory = segments_path(data_dir)
    disk.makedirs(directory)
    for name in disk.listdir(directory):
        if name.endswith(SUFFIX):
            disk.unlink(os.path.join(directory, name))
    disk.fsync_dir(directory)
