"""How far a log is known to be durable, in the file `durable` beside its segments.

off  size  field      meaning
 0    4    crc32c     CRC-32C of bytes [4, 16)
 4    4    magic      "DMQD"
 8    8    position   the log was durable up to here

Written after each sync but not synced itself: exact after kill -9, at worst too
low after a power failure.  So what is missing below the mark is lost data and
never a torn write.  Only where the log has become shorter it is synced.
"""

from __future__ import annotations

import os
import struct

import google_crc32c

from duemq_server.storage.disk import Disk, DiskFile, write_all
from duemq_server.storage.errors import CorruptFile

FILE_NAME = "durable"
_COVERED = struct.Struct("<4sQ")
MARK_BYTES = 16
MAGIC = b"DMQD"

REMEDY = (
    "Remove this file, and a start makes it anew: without it, as after a power failure, it may not"
    " notice that the log has lost its end (a replica's data directory is emptied instead: it gets"
    " everything from the one that leads)"
)


def encode(position: int) -> bytes:
    """The file's bytes."""
    covered = _COVERED.pack(MAGIC, position)
    return google_crc32c.value(covered).to_bytes(4, "little") + covered


def decode(data: bytes) -> int:
    """The position; 0 if the bytes are not a mark (a power failure may tear it)."""
    if len(data) != MARK_BYTES:
        return 0
    magic, position = _COVERED.unpack_from(data, 4)
    crc = int.from_bytes(data[:4], "little")
    return position if magic == MAGIC and google_crc32c.value(data[4:]) == crc else 0


class DurableMark:
    """The mark of one log.  Owned by the thread that syncs the log."""

    def __init__(self, directory: str, disk: Disk) -> None:
        self._path = os.path.join(directory, FILE_NAME)
        self._disk = disk
        self._file: DiskFile | None = None

    def load(self) -> int:
        """The position, 0 if unknown.

        Raises CorruptFile for a bad sector: a mark that is written there next is no better off.
        """
        if not self._disk.exists(self._path):
            return 0
        file = self._disk.open(self._path)
        try:
            return decode(bytes(file.pread(MARK_BYTES, 0)))
        except OSError as error:
            raise CorruptFile(self._path, 0, error.strerror or str(error), REMEDY) from error

    def store(self, position: int) -> None:
        """Remembers a position.  Raises DiskFull, DiskFailed."""
        write_all(self._open(), [encode(position)], 0)

    def sync(self) -> None:
        """Makes it durable, which is needed where an older mark would be too high."""
        self._open().fdatasync()

    def _open(self) -> DiskFile:
        if self._file is None:
            self._file = self._disk.open(self._path, create=True)
        return self._file

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
