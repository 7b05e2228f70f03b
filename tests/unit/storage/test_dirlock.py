"""The lock of a directory, on a disk that has no room for who holds it."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.errors import DirectoryLocked, DiskFailed


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("1234567890123\n")  # of a process that ended
    for _ in range(2):
        with (
            DirLock(str(tmp_path)),
            pytest.raises(DirectoryLocked, match=rf"by process {os.getpid()}$"),
        ):
            DirLock(str(tmp_path))


def test_a_full_disk_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with DirLock(str(tmp_path)), pytest.raises(DirectoryLocked, match="by process unknown"):
        DirLock(str(tmp_path))
    DirLock(str(tmp_path)).close()


def test_a_file_system_without_locks_is_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DirLock(str(tmp_path)).close()  # its process id stays

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DiskFailed, match="LOCK: No locks available"):
        DirLock(str(tmp_path))
