"""What can go wrong with bytes on a disk.

StorageError
├── DirectoryLocked    another process owns the directory
├── DiskFull           no space, read-only, too many files open: refuse new work, try again later
│   └── TooManyFiles   …the last of these: no space would help
├── LogFull            too much is waiting for the disk: refuse new work, try again soon
├── DiskFailed         a write or sync failed for good: the process must stop
├── UnknownVersion     written by a newer release
└── CorruptFile        bytes are not what was written
    └── CorruptLog     …in a log, where they are the only copy: refuse to start
"""

from __future__ import annotations

__all__ = [
    "CorruptFile",
    "CorruptLog",
    "DirectoryLocked",
    "DiskFailed",
    "DiskFull",
    "LogFull",
    "StorageError",
    "TooManyFiles",
    "UnknownVersion",
]


class StorageError(Exception):
    """Base of everything that `storage` raises on purpose."""


class DirectoryLocked(StorageError):
    """Another process holds the lock of the directory."""


class DiskFull(StorageError):
    """No space left, quota used up, the file system became read-only, or too many files are open.

    Nothing that was accepted is lost: the log keeps it and tries again.
    """


class TooManyFiles(DiskFull):
    """Too many files are open: it passes, and no space would help."""


class LogFull(StorageError):
    """More bytes wait for the disk than the log's bound allows."""


class DiskFailed(StorageError):
    """A write or sync failed for good.

    After a failed sync nobody knows what the disk holds, so the process must
    stop and recover from what it reads at its next start.
    """


class UnknownVersion(StorageError):
    """A file or an entry was written by a newer release."""


class CorruptFile(StorageError):
    """Bytes on disk are not what was written.

    `path` and `offset` (bytes from the file's start) say where, `remedy` what
    an operator can do.
    """

    def __init__(self, path: str, offset: int, problem: str, remedy: str) -> None:
        super().__init__(f"{path}, offset {offset}: {problem}. {remedy}")
        self.path = path
        self.offset = offset
        self.problem = problem
        self.remedy = remedy


class CorruptLog(CorruptFile):
    """Damage in a log before data that is known to have been durable."""
