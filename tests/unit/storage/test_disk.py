"""The real disk: what the fake one in tests/crash stands for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.disk import IOV_MAX, RealDisk, RealFile, write_all
from duemq_server.storage.errors import DirectoryLocked, DiskFailed, DiskFull
from duemq_server.storage.open_files import OpenFiles


@pytest.fixture
def file(tmp_path: Path) -> RealFile:
    return RealDisk().open(str(tmp_path / "file"), create=True)


def test_what_is_written_is_read(file: RealFile) -> None:
    assert write_all(file, [b"hello ", memoryview(b"world"), bytearray(b"!")], 3) == 15
    assert bytes(file.pread(100, 3)) == b"hello world!"
    assert bytes(file.pread(5, 9, nowait=True)) == b"world"
    assert bytes(file.pread(5, 100)) == b""
    assert file.size() == 15


def test_more_buffers_than_one_call_takes_are_written(file: RealFile) -> None:
    buffers = [b"%05d" % i for i in range(IOV_MAX * 2 + 7)]
    assert write_all(file, buffers, 0) == len(buffers) * 5
    assert bytes(file.pread(file.size(), 0)) == b"".join(buffers)


def test_reserved_space_reads_as_zeros(file: RealFile) -> None:
    file.allocate(0, 5000)
    assert bytes(file.pread(6000, 0)) == bytes(5000)
    file.truncate(10)
    file.fdatasync()
    assert file.size() == 10


def test_a_missing_file_is_not_made_by_chance(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RealDisk().open(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EROFS, DiskFull),
        (errno.EIO, DiskFailed),
    ],
)
def test_errors_of_a_write_are_told_apart(
    file: RealFile, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(expected, match=os.strerror(number)):
        file.pwritev([b"x"], 0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_pass_as_a_full_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk, path = RealDisk(), str(tmp_path / "file")
    disk.open(path, create=True).close()

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        for opening in (
            lambda: disk.open(path),
            lambda: disk.open(path, create=True),
            lambda: disk.fsync_dir(str(tmp_path)),
        ):
            with pytest.raises(DiskFull, match=os.strerror(number)):
                opening()
    disk.fsync_dir(str(tmp_path))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_error_of_a_sync_is_final(
    file: RealFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(DiskFailed):
        file.fdatasync()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_read_that_would_wait_says_so(
    file: RealFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(BlockingIOError):
        file.pread(10, 0, nowait=True)


def test_a_partly_cached_read_that_would_wait_says_so(
    file: RealFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(file, [bytes(100)], 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 50)
    with pytest.raises(BlockingIOError):
        file.pread(100, 0, nowait=True)


def test_names_are_made_replaced_and_removed(tmp_path: Path) -> None:
    disk = RealDisk()
    folder = str(tmp_path / "a" / "b")
    disk.makedirs(folder)
    disk.makedirs(folder)
    disk.open(f"{folder}/x", create=True).close()
    disk.open(f"{folder}/y", create=True).close()
    assert disk.listdir(folder) == ["x", "y"]
    disk.rename(f"{folder}/x", f"{folder}/y")
    disk.fsync_dir(folder)
    assert disk.listdir(folder) == ["y"]
    disk.unlink(f"{folder}/y")
    disk.rmdir(folder)
    assert not disk.exists(folder)
    assert disk.free_bytes(str(tmp_path)) > 0


def test_only_so_many_files_stay_open(tmp_path: Path) -> None:
    files = OpenFiles(RealDisk(), limit=2)
    first = files.get(str(tmp_path / "0"), create=True)
    write_all(first, [b"still readable"], 0)
    for name in ("1", "2", "3"):
        files.get(str(tmp_path / name), create=True)
    assert bytes(first.pread(100, 0)) == b"still readable"
    assert files.get(str(tmp_path / "0")) is not first
    assert files.get(str(tmp_path / "3")) is files.get(str(tmp_path / "3"))
    files.forget(str(tmp_path / "3"))
    files.close()


def test_a_file_that_nobody_holds_is_closed(tmp_path: Path) -> None:
    files = OpenFiles(RealDisk(), limit=2)
    before = len(os.listdir("/proc/self/fd"))
    for name in range(20):
        files.get(str(tmp_path / str(name)), create=True)
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_a_directory_belongs_to_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with DirLock(path), pytest.raises(DirectoryLocked, match=f"in use by process {os.getpid()}"):
        DirLock(path)
    with DirLock(path) as lock:
        lock.close()
        lock.close()


def test_a_data_directory_that_the_lock_makes_has_a_durable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(RealDisk, "fsync_dir", lambda _, path: synced.append(path))
    with DirLock(str(tmp_path / "new" / "data")):
        assert synced == [str(tmp_path), str(tmp_path / "new")]


def test_a_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().open(str(tmp_path / "bad"), create=True)

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="bad") as caught:
        file.pread(10, 0)
    assert caught.value.errno == errno.EIO
