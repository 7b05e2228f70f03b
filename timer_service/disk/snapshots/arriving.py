"""A snapshot that arrives (snapshot.py): its files are written and synced as they come.

    DIR/arriving/     its period files

Nothing of the shard that lies beside it changes before all of it is there.  What an interruption
leaves behind goes at the next start, or when another one comes.  In memory are the checkpoint's
payload and a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import google_crc32c

from duemq_server.storage.disk import Disk, write_all
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.data_directory import segments_path
from duemq_server.timer_service.disk.snapshots.snapshot import (
    CRC,
    HEADER_BYTES,
    VERSION,
    Header,
    decode_header,
)
from duemq_server.timer_service.far.far_segments import period_of

DIRECTORY = "arriving"
SYNC_BYTES = 32 << 20
"""So much of a file waits for a sync at most: one of gigabytes would hold up all others."""

Installer = Callable[["Arriving", int], None]


class _File:
    """A period file that arrives."""

    def __init__(self, disk: Disk, path: str, length: int) -> None:
        self.left = length
        self.crc = 0
        self._file = disk.open(path, create=True)
        self._end = self._synced = 0

    def write(self, part: memoryview) -> int:
        """Takes the beginning of a part; answers how much of it."""
        data = bytes(part[: self.left])
        self.crc = google_crc32c.extend(self.crc, data)
        self._end = write_all(self._file, [data], self._end)
        self.left -= len(data)
        if not self.left or self._end - self._synced >= SYNC_BYTES:
            self._file.fdatasync()
            self._synced = self._end
        return len(data)

    def close(self) -> None:
        self._file.close()


class Arriving:
    """Implements replication.running.state.Arriving.  One thread at a time."""

    def __init__(self, data_dir: str, disk: Disk, free_bytes_min: int, install: Installer) -> None:
        """`free_bytes_min` stay free.  Raises DiskFull, DiskFailed."""
        self._data_dir = data_dir
        self._disk = disk
        self._free_bytes_min = free_bytes_min
        self._install = install
        self._state: CheckpointState | None = None
        self._names: list[str] = []  # of files that have not begun, the next one last
        self._file: _File | None = None
        # A field: gathered until there is so much of it, then given to `_then`.
        self._field = bytearray()
        self._wanted = HEADER_BYTES
        self._then: Callable[[bytes], None] = self._header
        self._header_read: Header
        self._crc = 0  # of version 1: of all so far
        remove(data_dir, disk)
        disk.makedirs(_directory(data_dir))

    @property
    def state(self) -> CheckpointState:
        """What the checkpoint says, once all is there.  Raises ValueError."""
        if self._state is None or self._wanted:
            raise ValueError("a snapshot that ends too early")
        return self._state

    def write(self, part: bytes) -> None:
        """Takes over what comes next.  Raises ValueError, Corrupt, DiskFull, DiskFailed."""
        rest = memoryview(part)
        while rest:
            if self._file is not None and self._file.left:
                rest = rest[self._write(self._file, rest) :]
            elif self._wanted:
                rest = self._gather(rest)
            else:
                raise ValueError(f"a snapshot that goes on for {len(rest)} bytes behind its end")

    def _write(self, file: _File, part: memoryview) -> int:
        taken = file.write(part)
        if self._is_old:
            self._crc = google_crc32c.extend(self._crc, bytes(part[:taken]))
            self._next_file_of_old()
        return taken

    def _next_file_of_old(self) -> None:
        """Nothing stands behind a file."""
        while self._file is not None and not self._file.left:
            self._file.close()
            self._begin_file()
        if self._file is None and self._crc != self._header_read.crc:
            self._wanted = CRC.size  # it is not whole
            raise ValueError("CRC-32C of a snapshot is wrong")

    def _gather(self, rest: memoryview) -> memoryview:
        taken = rest[: self._wanted - len(self._field)]
        self._field += taken
        if len(self._field) == self._wanted:
            field, self._field = bytes(self._field), bytearray()
            self._then(field)
        return rest[len(taken) :]

    def _header(self, field: bytes) -> None:
        self._header_read = decode_header(field)
        self._wanted = self._header_read.length
        self._crc = google_crc32c.value(field[CRC.size :])
        self._then = self._payload

    @property
    def _is_old(self) -> bool:
        """Whether one checksum is of all of it, known at the end."""
        return self._header_read.version < VERSION

    def _payload(self, field: bytes) -> None:
        if self._is_old:
            self._crc = google_crc32c.extend(self._crc, field)
        elif google_crc32c.value(field) != self._header_read.crc:
            raise ValueError("CRC-32C of a snapshot's checkpoint is wrong")
        self._state = state = self._decoded(field)
        for name in state.lengths:
            _check_name(name)
        self._check_space(sum(state.lengths.values()))
        self._names = sorted(state.lengths, reverse=True)
        self._then = self._end_of_file
        self._begin_file()
        if self._is_old:
            self._next_file_of_old()

    def _decoded(self, payload: bytes) -> CheckpointState:
        try:
            return checkpoint_state.decode(payload)
        except Exception as error:
            if self._is_old:  # its checksum comes at the end: this may be anything
                raise ValueError(f"a snapshot with a checkpoint that is none: {error}") from error
            raise

    def _check_space(self, size: int) -> None:
        free = self._disk.free_bytes(self._data_dir)
        if size + self._free_bytes_min > free:
            raise DiskFull(f"a snapshot with {size} bytes of files; {free} are free")

    def _end_of_file(self, field: bytes) -> None:
        assert self._file is not None
        if CRC.unpack(field) != (self._file.crc,):
            raise ValueError("CRC-32C of a file of a snapshot is wrong")
        self._file.close()
        self._begin_file()

    def _begin_file(self) -> None:
        self._file, self._wanted = None, 0
        if self._names:
            assert self._state is not None
            name = self._names.pop()
            path = os.path.join(_directory(self._data_dir), name)
            self._file = _File(self._disk, path, self._state.lengths[name])
            self._wanted = CRC.size

    def install(self, log_start: int) -> None:
        """The replica begins anew with it (Standby.install)."""
        self._install(self, log_start)

    def move_files(self) -> None:
        """To where they belong, durably; there are no others.  Raises DiskFailed."""
        target = segments_path(self._data_dir)
        for name in sorted(self.state.lengths):
            source = os.path.join(_directory(self._data_dir), name)
            self._disk.rename(source, os.path.join(target, name))
        self._disk.fsync_dir(target)

    def close(self) -> None:
        """What was not installed goes.  Raises DiskFailed."""
        if self._file is not None:
            self._file.close()
        remove(self._data_dir, self._disk)


def remove(data_dir: str, disk: Disk) -> None:
    """What is left of a snapshot that arrived."""
    directory = _directory(data_dir)
    if not disk.exists(directory):
        return
    for name in disk.listdir(directory):
        disk.unlink(os.path.join(directory, name))
    disk.rmdir(directory)


def _check_name(name: str) -> None:
    """Raises ValueError for a name that could lead out of the directory."""
    try:
        period_of(name)
    except ValueError as error:
        raise ValueError(f"a snapshot with a file {name!r}") from error


def _directory(data_dir: str) -> str:
    return os.path.join(data_dir, DIRECTORY)
