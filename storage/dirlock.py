"""One process a data directory."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import DirectoryLocked, DiskFailed

LOCK_NAME = "LOCK"
_ID_CHARS = 20


class DirLock:
    """Holds a directory for this process; a context manager.

    The lock (flock on the file LOCK) is the kernel's: it goes with the process,
    however that ends, and a LOCK file left behind locks nothing.
    Raises DirectoryLocked, naming the owner's process id if a full disk had room for it, and
    DiskFull, DiskFailed.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.join(path, LOCK_NAME)
        RealDisk().makedirs(path)  # what comes to lie in it is relied on
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise DirectoryLocked(f"{path} is in use by process {owner}") from error
        except OSError as error:  # of a network's file system
            self.close()
            raise DiskFailed(f"lock {self.path}: {error.strerror}") from error
        with suppress(OSError):  # full: who holds it is not told then
            # Over the one before: a file that was emptied might find no space again.
            os.pwrite(self._fd, f"{os.getpid():<{_ID_CHARS}}\n".encode(), 0)

    def close(self) -> None:
        """Releases the directory; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DirLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
