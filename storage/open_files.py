"""Open files, bounded in number.

Owned by a data directory's process; shared by its logs and indexes; any thread.
A file that falls out of the cache stays open as long as somebody reads from it
and is closed when the last reference goes (`RealFile.__del__`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from duemq_server.storage.disk import Disk, DiskFile

OPEN_FILES_MAX = 512
"""Files kept open; half of the usual soft limit of 1,024 descriptors."""


class OpenFiles:
    """A cache of open files by path; least recently used goes first."""

    def __init__(self, disk: Disk, limit: int = OPEN_FILES_MAX) -> None:
        self.disk = disk
        self._limit = limit
        self._files: OrderedDict[str, DiskFile] = OrderedDict()
        self._lock = threading.Lock()  # guards _files

    def get(self, path: str, *, create: bool = False) -> DiskFile:
        """Raises FileNotFoundError unless `create`."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self.disk.open(path, create=create)
                if len(self._files) > self._limit:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file

    def forget(self, path: str) -> None:
        """To be called when a file was removed or renamed: before that it may be opened again."""
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Drops all files."""
        with self._lock:
            self._files.clear()
