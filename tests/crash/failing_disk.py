"""A disk of which one call fails, whichever it is: full, or with an input/output error.

    faults = Faults("full", at=7)
    disk = FailingDisk(faults)             # as do the disks that are made of it

Counts more than FaultyDisk's operations: also what only reads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from duemq_server.storage.disk import Buffer
from duemq_server.storage.errors import DiskFailed, DiskFull
from tests.crash.faulty_disk import FaultyDisk, FaultyFile


@dataclass
class Faults:
    """What fails: `kind` is "full", which passes, or "broken".  `at`: the call, the first is 1."""

    kind: str = ""
    at: int = 0
    calls: int = field(default=0, init=False)
    over: bool = False
    """Nothing fails any more, and no call counts."""

    def meet(self, call: str, path: str, *, fills: bool = True, raw: bool = False) -> None:
        """`fills`: also a full disk, or too many open files, refuses it.  `raw`: its OSError is
        not translated (storage/disk.py)."""
        if self.over:
            return
        self.calls += 1
        if self.calls != self.at:
            return
        if self.kind == "full":
            if fills:
                raise DiskFull(f"{call} {path}: as it happens")
        elif raw:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        else:
            raise DiskFailed(f"{call} {path}: as it happens")


def calls_of(live: Callable[[Faults], object], step: int = 1) -> range:
    """Of those that may fail the first, and each `step`-th behind it."""
    faults = Faults()
    live(faults)
    return range(1, faults.calls + 1, step)


class FailingDisk(FaultyDisk):
    """Implements duemq_server.storage.disk.Disk."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    @classmethod
    def of(cls, disk: FaultyDisk, faults: Faults) -> FailingDisk:
        """In place of another one."""
        failing = cls(faults)
        vars(failing).update(vars(disk))
        return failing

    def after_kill(self) -> FailingDisk:
        return self.of(super().after_kill(), self.faults)

    def after_power_cut(self, keep: Random | None = None) -> FailingDisk:
        return self.of(super().after_power_cut(keep), self.faults)

    def open(self, path: str, *, create: bool = False) -> FailingFile:
        self.faults.meet("open", path, raw=not create)
        file = super().open(path, create=create)
        return FailingFile(self, file._inode, path)

    def listdir(self, path: str) -> list[str]:
        self.faults.meet("list", path, raw=True)
        return super().listdir(path)

    def makedirs(self, path: str) -> None:
        if not self.exists(path):
            self.faults.meet("create", path)
        super().makedirs(path)

    def rename(self, source: str, target: str) -> None:
        self.faults.meet("rename", source)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.faults.meet("remove", path)
        super().unlink(path)

    def fsync_dir(self, path: str) -> None:
        self.faults.meet("fsync", path)
        super().fsync_dir(path)


class FailingFile(FaultyFile):
    """Implements duemq_server.storage.disk.DiskFile."""

    _disk: FailingDisk

    def pread(self, length: int, offset: int, nowait: bool = False) -> memoryview:
        self._disk.faults.meet("read", self.path, fills=False, raw=True)
        return super().pread(length, offset, nowait)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk.faults.meet("write", self.path)
        return super().pwritev(buffers, offset)

    def allocate(self, offset: int, length: int) -> None:
        self._disk.faults.meet("allocate", self.path)
        super().allocate(offset, length)

    def fdatasync(self) -> None:
        try:
            self._disk.faults.meet("fdatasync", self.path, fills=False)
        except DiskFailed:
            self._inode.fail_sync()
            raise
        super().fdatasync()

    def truncate(self, size: int) -> None:
        self._disk.faults.meet("truncate", self.path)
        super().truncate(size)
