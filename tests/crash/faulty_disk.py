"""A disk in memory that forgets what was not synced.

Fault model, stricter than any file system we know:
- A power cut keeps, of all bytes written since a file's last fdatasync, any subset of
  512-byte sectors, and any size between the synced one and the written one.
- Names created, renamed or removed are kept up to any point in their order, unless their
  directory was synced.  Syncing a file does not make its name durable.
- A write may take fewer bytes than asked, find the disk full half-way, or fail; a sync may fail.
  What a sync failed for is not tried again: it can be read, but no later sync puts it on the disk
  unless it is written once more.
  Space that is reserved may end half-way, too, and stays taken.

    disk = FaultyDisk(cut_at=7)            # the 7th operation that changes something
    with pytest.raises(PowerCut): run(disk)
    disk = disk.after_power_cut(Random(1)) # or disk.after_kill(): the page cache survives
    recover(disk)
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from duemq_server.storage.disk import Buffer
from duemq_server.storage.errors import DiskFailed, DiskFull

SECTOR_BYTES = 512


class PowerCut(BaseException):
    """The machine is off.  Not an Exception, so that nothing handles it by chance."""


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    bad: set[int] = field(default_factory=set)
    """Sectors that cannot be read, by number."""
    given_up: set[int] = field(default_factory=set)
    """Sectors that a sync failed for: clean, though they are not on the disk."""

    def sync(self) -> None:
        """Puts on the disk what is dirty."""
        synced = bytearray(self.data)
        for at in (number * SECTOR_BYTES for number in self.given_up):
            end = min(at + SECTOR_BYTES, len(synced))
            if at < end:
                synced[at:end] = self.synced[at:end].ljust(end - at, b"\0")
        self.synced = bytes(synced)

    def fail_sync(self) -> None:
        """Forgets that it is dirty."""
        for at in range(0, len(self.data), SECTOR_BYTES):
            if self.data[at : at + SECTOR_BYTES] != self.synced[at : at + SECTOR_BYTES]:
                self.given_up.add(at // SECTOR_BYTES)

    def after_power_cut(self, keep: Random | None) -> Inode:
        """None keeps the synced state only."""
        if keep is None:
            return Inode(bytearray(self.synced), self.synced)
        low, high = sorted((len(self.synced), len(self.data)))
        size = keep.choice((low, high, keep.randint(low, high)))
        out = bytearray(size)
        for at in range(0, size, SECTOR_BYTES):
            source = self.data if keep.random() < 0.5 else self.synced
            sector = source[at : min(at + SECTOR_BYTES, size)]
            out[at : at + len(sector)] = sector
        return Inode(out, bytes(out))


@dataclass(frozen=True)
class NameChange:
    """`path` now names `inode` (None: nothing any more)."""

    path: str
    inode: Inode | None
    from_path: str | None = None


class FaultyDisk:
    """Implements duemq_server.storage.disk.Disk."""

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        capacity_bytes: int | None = None,
        write_bytes_max: int | None = None,
        fail_sync_at: int | None = None,
        cold: bool = False,
    ) -> None:
        self.cut_at = cut_at
        self.capacity_bytes = capacity_bytes
        self.write_bytes_max = write_bytes_max
        self.fail_sync_at = fail_sync_at
        self.cold = cold
        self.operations = 0
        self.syncs = 0
        self.off = False
        self._names: dict[str, Inode] = {}
        self._synced_names: dict[str, Inode] = {}
        self._changes: list[NameChange] = []
        self._directories: set[str] = {"/"}

    # -- what a test does to it

    def after_kill(self) -> FaultyDisk:
        """The process died; the operating system kept everything it was given."""
        disk = FaultyDisk()
        disk._directories = set(self._directories)
        disk._names = dict(self._names)
        disk._synced_names = dict(self._synced_names)
        disk._changes = list(self._changes)
        return disk

    def after_power_cut(self, keep: Random | None = None) -> FaultyDisk:
        """The machine died.  None: only what was synced survives; else a random lot more."""
        names = dict(self._synced_names)
        kept = keep.randint(0, len(self._changes)) if keep else 0
        for change in self._changes[:kept]:
            _apply(names, change)
        disk = FaultyDisk()
        disk._directories = set(self._directories)
        for path in names:  # a directory whose files were not removed durably was not either
            disk.makedirs(posixpath.dirname(path))
        disk._names = {path: inode.after_power_cut(keep) for path, inode in names.items()}
        disk._synced_names = dict(disk._names)
        return disk

    def content(self, path: str) -> bytes:
        return bytes(self._names[path].data)

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        """Damages a file, durably."""
        inode = self._names[path]
        inode.data[offset : offset + len(data)] = data
        inode.synced = bytes(inode.data)

    def flip(self, path: str, offset: int, bit: int = 0) -> None:
        """Flips a bit of a file, durably."""
        self.overwrite(path, offset, bytes([self._names[path].data[offset] ^ (1 << bit)]))

    def wear_out(self, path: str, offset: int) -> None:
        """The sector there cannot be read any more."""
        self._names[path].bad.add(offset // SECTOR_BYTES)

    def chop(self, path: str, size: int) -> None:
        """Cuts a file, durably."""
        inode = self._names[path]
        del inode.data[size:]
        inode.synced = bytes(inode.data)

    @property
    def paths(self) -> list[str]:
        return sorted(self._names)

    # -- Disk

    def open(self, path: str, *, create: bool = False) -> FaultyFile:
        self.check_power()
        if path not in self._names:
            if not create:
                raise FileNotFoundError(path)
            self._require_directory(path)
            self.step()
            self._change(NameChange(path, Inode()))
        return FaultyFile(self, self._names[path], path)

    def exists(self, path: str) -> bool:
        self.check_power()
        return path in self._names or path in self._directories

    def listdir(self, path: str) -> list[str]:
        self.check_power()
        children = [p for p in [*self._names, *self._directories] if posixpath.dirname(p) == path]
        return sorted(posixpath.basename(p) for p in children if p != "/")

    def makedirs(self, path: str) -> None:
        self.check_power()
        while path not in self._directories:
            self._directories.add(path)
            path = posixpath.dirname(path)

    def rename(self, source: str, target: str) -> None:
        self.step()
        self._change(NameChange(target, self._names[source], from_path=source))

    def unlink(self, path: str) -> None:
        self.step()
        if path not in self._names:
            raise DiskFailed(f"remove {path}: no such file")
        self._change(NameChange(path, None))

    def rmdir(self, path: str) -> None:
        self.step()
        self._directories.discard(path)

    def fsync_dir(self, path: str) -> None:
        self.step()
        self._require_directory(posixpath.join(path, "x"))
        rest = []
        for change in self._changes:
            if posixpath.dirname(change.path) == path:
                _apply(self._synced_names, change)
            else:
                rest.append(change)
        self._changes = rest

    def free_bytes(self, path: str) -> int:
        self.check_power()
        if self.capacity_bytes is None:
            return 1 << 40
        return max(0, self.capacity_bytes - self.used_bytes())

    # -- shared with files

    def used_bytes(self) -> int:
        return sum(len(inode.data) for inode in self._names.values())

    def check_power(self) -> None:
        if self.off:
            raise PowerCut

    def step(self) -> None:
        """Counts an operation that changes something; the power may go before it."""
        self.check_power()
        self.operations += 1
        if self.operations == self.cut_at:
            self.off = True
            raise PowerCut

    def _change(self, change: NameChange) -> None:
        self._changes.append(change)
        _apply(self._names, change)

    def _require_directory(self, path: str) -> None:
        if posixpath.dirname(path) not in self._directories:
            raise DiskFailed(f"create {path}: no such directory")


def _apply(names: dict[str, Inode], change: NameChange) -> None:
    if change.from_path is not None:
        names.pop(change.from_path, None)
    if change.inode is None:
        names.pop(change.path, None)
    else:
        names[change.path] = change.inode


class FaultyFile:
    """Implements duemq_server.storage.disk.DiskFile."""

    def __init__(self, disk: FaultyDisk, inode: Inode, path: str) -> None:
        self._disk = disk
        self._inode = inode
        self.path = path
        self.closed = False

    def pread(self, length: int, offset: int, nowait: bool = False) -> memoryview:
        self._check_open()
        if nowait and self._disk.cold:
            raise BlockingIOError(self.path)
        if any(
            offset < (n + 1) * SECTOR_BYTES and n * SECTOR_BYTES < offset + length
            for n in self._inode.bad
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
        return memoryview(bytes(self._inode.data[offset : offset + length]))

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._check_open()
        data = b"".join(bytes(b) for b in buffers)[: self._disk.write_bytes_max]
        try:
            self._disk.step()
        except PowerCut:
            # Cut in the middle: the sectors may be on the disk or not.
            self._put(data, offset)
            raise
        room = self._disk.free_bytes(self.path)
        grows = max(0, offset + len(data) - len(self._inode.data))
        if grows > room:
            self._put(data[: len(data) - grows + room], offset)
            raise DiskFull(f"write {self.path}: no space left")
        self._put(data, offset)
        return len(data)

    def allocate(self, offset: int, length: int) -> None:
        self._check_open()
        self._disk.step()
        room = self._disk.free_bytes(self.path)
        if offset + length - len(self._inode.data) > room:
            self._grow(len(self._inode.data) + room)  # ext4 keeps what it got, and the size
            raise DiskFull(f"allocate {self.path}: no space left")
        self._grow(offset + length)

    def fdatasync(self) -> None:
        self._check_open()
        self._disk.step()
        self._disk.syncs += 1
        if self._disk.syncs == self._disk.fail_sync_at:
            self._inode.fail_sync()
            raise DiskFailed(f"fdatasync {self.path}: input/output error")
        self._inode.sync()

    def truncate(self, size: int) -> None:
        self._check_open()
        self._disk.step()
        self._grow(size)
        del self._inode.data[size:]
        self._inode.bad = {each for each in self._inode.bad if each * SECTOR_BYTES < size}

    def size(self) -> int:
        self._check_open()
        return len(self._inode.data)

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        assert not self.closed, f"{self.path} is closed"
        self._disk.check_power()

    def _grow(self, size: int) -> None:
        self._inode.data.extend(bytes(max(0, size - len(self._inode.data))))

    def _put(self, data: bytes, offset: int) -> None:
        self._grow(offset)
        self._inode.data[offset : offset + len(data)] = data
        self._inode.given_up.difference_update(
            range(offset // SECTOR_BYTES, -(-(offset + len(data)) // SECTOR_BYTES))
        )
        self._inode.bad.difference_update(  # the disk puts good ones in their place
            range(-(-offset // SECTOR_BYTES), (offset + len(data)) // SECTOR_BYTES)
        )
