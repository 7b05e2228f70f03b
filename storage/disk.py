"""The seam between storage and the operating system.

Everything in `storage` reaches a disk through `Disk` and `DiskFile`, so that
tests can put a disk of their own in its place that forgets what was not
synced, tears a write, or is full (`tests/crash/faulty_disk.py`).

Reads never go through mmap: slicing a cold mapping holds the GIL for the whole
read.  `pread(..., nowait=True)` answers from the page cache or raises
BlockingIOError, so an event loop can try inline and fall back to a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from duemq_server.storage.errors import DiskFailed, DiskFull, StorageError, TooManyFiles

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes to write.  A NumPy array goes in as its `.data`."""

IOV_MAX = 1024
"""Buffers one pwritev takes (Linux UIO_MAXIOV)."""

# Connections may have taken all; they pass, as a full disk does.
_TOO_MANY_OPEN = frozenset({errno.EMFILE, errno.ENFILE})
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def nbytes(buffer: Buffer) -> int:
    """Size of a bytes-like object in bytes."""
    return len(buffer) if isinstance(buffer, bytes | bytearray) else buffer.nbytes


class ReadableFile(Protocol):
    """An open file, for who only reads it.  Positions and lengths are bytes."""

    def pread(self, length: int, offset: int, nowait: bool = False) -> memoryview:
        """Reads up to `length` bytes; less only at the end of the file.

        With `nowait` it raises BlockingIOError if the bytes are not in memory.
        """
        ...

    def size(self) -> int:
        """The file's size."""
        ...


class DiskFile(ReadableFile, Protocol):
    """An open file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes and answers how many bytes were written, perhaps not all.

        Raises DiskFull, DiskFailed.
        """
        ...

    def allocate(self, offset: int, length: int) -> None:
        """Reserves blocks that read as zeros and extends the size.

        Raises DiskFull: as much as there was may be taken, and the size be larger (ext4).
        """
        ...

    def fdatasync(self) -> None:
        """Makes data (and the size) durable.  Raises DiskFailed."""
        ...

    def truncate(self, size: int) -> None:
        """Sets the size; what is beyond is gone.  Not durable before fdatasync."""
        ...

    def close(self) -> None:
        """Closes; later use raises.  Also done when the last reference goes."""
        ...


class Disk(Protocol):
    """A file system, as far as storage needs one.  Paths are absolute or cwd-relative."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Opens for reading and writing.  Raises FileNotFoundError unless `create`, and DiskFull
        while too many files are open."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted.  Raises DiskFull while too many files are open."""
        ...

    def makedirs(self, path: str) -> None:
        """Makes a directory and its parents, durably; fine when it exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replaces `target` atomically.  Durable after `fsync_dir`."""
        ...

    def unlink(self, path: str) -> None:
        """Removes a file.  Durable after `fsync_dir`."""
        ...

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        ...

    def fsync_dir(self, path: str) -> None:
        """Makes names created, renamed or removed in a directory durable.

        Raises DiskFailed, and DiskFull while too many files are open: it may be repeated.
        """
        ...

    def free_bytes(self, path: str) -> int:
        """Space left for this process on the file system that holds `path`."""
        ...


@contextlib.contextmanager
def _passing(what: str, path: str) -> Iterator[None]:
    """Turns the OSErrors of too many open files into TooManyFiles (try again)."""
    try:
        yield
    except OSError as error:
        if error.errno in _TOO_MANY_OPEN:
            raise TooManyFiles(f"{what} {path}: {error.strerror}") from error
        raise


@contextlib.contextmanager
def _translated(what: str, path: str) -> Iterator[None]:
    """Turns OSError of a write into DiskFull (try again) or DiskFailed (stop)."""
    try:
        yield
    except OSError as error:
        reason = f"{what} {path}: {error.strerror or error}"
        if error.errno in _TOO_MANY_OPEN:
            raise TooManyFiles(reason) from error
        if error.errno in _FULL_ERRNOS:
            raise DiskFull(reason) from error
        raise DiskFailed(reason) from error


class RealFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, length: int, offset: int, nowait: bool = False) -> memoryview:
        """See DiskFile."""
        view = np.empty(length, np.uint8).data  # bytearray would zero it first
        if nowait:
            return view[: self._pread_cached(view, offset)]
        done = 0
        while done < length:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from error
            if not got:
                break
            done += got
        return view[:done]

    def _pread_cached(self, view: memoryview, offset: int) -> int:
        try:
            done = os.preadv(self._fd, [view], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            raise BlockingIOError(errno.EAGAIN, "cannot tell what is cached", self.path) from error
        if done < len(view) and offset + done < self.size():
            raise BlockingIOError(errno.EAGAIN, "not in the page cache", self.path)
        return done

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """See DiskFile."""
        with _translated("write", self.path):
            return os.pwritev(self._fd, buffers[:IOV_MAX], offset)

    def allocate(self, offset: int, length: int) -> None:
        """See DiskFile."""
        with _translated("allocate", self.path):
            os.posix_fallocate(self._fd, offset, length)

    def fdatasync(self) -> None:
        """See DiskFile."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:  # never DiskFull: what was written before is in doubt
            raise DiskFailed(f"fdatasync {self.path}: {error.strerror}") from error

    def truncate(self, size: int) -> None:
        """See DiskFile."""
        with _translated("truncate", self.path):
            os.ftruncate(self._fd, size)

    def size(self) -> int:
        """See DiskFile."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """See DiskFile."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # A reader in another thread may still hold a file that the cache of
        # open files dropped; its descriptor must live as long as the reader.
        with contextlib.suppress(AttributeError, OSError):
            self.close()


class RealDisk:
    """The operating system's file system.  Stateless; share one freely."""

    def open(self, path: str, *, create: bool = False) -> RealFile:
        """See Disk."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        if create:
            with _translated("create", path):
                return RealFile(path, os.open(path, flags, 0o644))
        with _passing("open", path):
            return RealFile(path, os.open(path, flags))

    def exists(self, path: str) -> bool:
        """See Disk."""
        return os.path.exists(path)

    def listdir(self, path: str) -> list[str]:
        """See Disk."""
        with _passing("list", path):
            return sorted(os.listdir(path))

    def makedirs(self, path: str) -> None:
        """See Disk."""
        missing = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        for directory in reversed(missing):
            with _translated("create", directory):
                os.makedirs(directory, exist_ok=True)
            self.fsync_dir(os.path.dirname(directory))

    def rename(self, source: str, target: str) -> None:
        """See Disk."""
        with _translated("rename", source):
            os.replace(source, target)

    def unlink(self, path: str) -> None:
        """See Disk."""
        with _translated("remove", path):
            os.unlink(path)

    def rmdir(self, path: str) -> None:
        """See Disk."""
        with _translated("remove", path):
            os.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        """See Disk."""
        with _translated("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise DiskFailed(f"fsync {path}: {error.strerror}") from error
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        """See Disk."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def short_of_space(disk: Disk, path: str, free_bytes_min: int) -> bool:
    """Whether less than that is free; False where nobody can tell."""
    try:
        return disk.free_bytes(path) < free_bytes_min
    except OSError:
        return False


def write_all(file: DiskFile, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes every buffer at `offset`, however short single writes are.

    Answers the end.  Raises DiskFull, DiskFailed; the call may be repeated.
    """
    if len(buffers) <= IOV_MAX:
        total = sum(map(nbytes, buffers))
        done = file.pwritev(buffers, offset)
        if done == total:
            return offset + done
        return _write_rest(file, b"".join(bytes(b) for b in buffers), done, offset)
    end = offset
    for first in range(0, len(buffers), IOV_MAX):
        end = write_all(file, buffers[first : first + IOV_MAX], end)
    return end


def _write_rest(file: DiskFile, data: bytes, done: int, offset: int) -> int:
    view = memoryview(data)
    while done < len(view):
        wrote = file.pwritev([view[done:]], offset + done)
        if wrote <= 0:
            raise DiskFailed(f"a write at {offset + done} took no bytes")
        done += wrote
    return offset + done


def write_whole(path: str, pieces: Iterable[Buffer], disk: Disk) -> None:
    """A file that is there with all of it or as it was before: its name after `fsync_dir`.

    Raises DiskFull: what was written takes up no space; DiskFailed.
    """
    unfinished = f"{path}.tmp"
    try:
        with contextlib.closing(disk.open(unfinished, create=True)) as file:
            end = 0
            for piece in pieces:
                end = write_all(file, [piece], end)
            file.truncate(end)
            file.fdatasync()
        disk.rename(unfinished, path)
    except DiskFull:
        with contextlib.suppress(StorageError):
            disk.unlink(unfinished)
        raise


def remove_durably(path: str, disk: Disk) -> None:
    """Raises DiskFull: try again; DiskFailed."""
    if disk.exists(path):  # else the try before came so far
        disk.unlink(path)
    disk.fsync_dir(os.path.dirname(path))
