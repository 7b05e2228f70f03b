"""Fixed-size entries by number, in files of a fixed number of entries.

One thread appends, cuts and drops; any thread may read, flush or sync meanwhile.
Derived data: unchecked, durable only after `sync`, rebuilt by its owner from a
log.  A file is named by the 20-digit number of its first entry.  The newest
entries wait in memory, up to FLUSH_BYTES, so that an append costs no system
call and a reader at the tail needs none.
"""

from __future__ import annotations

import bisect
import os
import threading

from storage.disk import Buffer, Disk, nbytes, write_all
from storage.errors import CorruptFile
from storage.open_files import OpenFiles

NAME_DIGITS = 20
FILE_BYTES = 8 * 1024 * 1024
"""Size of a full file; what retention frees at a time."""
FLUSH_BYTES = 64 * 1024
"""Entries kept in memory before they are written."""

_REMEDY = "It is derived data: remove the checkpoint to have it rebuilt from the log"


class FixedIndex:
    """An array of entries on disk that grows at its end and shrinks from its start.

    Entries are numbered from 0 for ever; `first` is the oldest kept, `end` the
    number of the next one.
    """

    def __init__(
        self,
        directory: str,
        disk: Disk,
        entry_bytes: int,
        *,
        files: OpenFiles | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.directory = directory
        self.entry_bytes = entry_bytes
        self._disk = disk
        self._files = files or OpenFiles(disk)
        self._per_file = max(1, file_bytes // entry_bytes)
        self._flush_lock = threading.RLock()  # guards the files, _starts and _unsynced
        self._lock = threading.Lock()  # guards _tail, _flushed, end; never held over I/O
        self._tail = bytearray()
        self._unsynced: set[str] = set()
        self._new_names = False
        names = disk.listdir(directory) if disk.exists(directory) else []
        self._starts = sorted(int(n) for n in names if _is_name(n))  # replaced, never changed
        self.first = self._starts[0] if self._starts else 0
        self._flushed = self._starts[-1] + self._entries_in_last() if self._starts else 0
        self.end = self._flushed

    def _entries_in_last(self) -> int:
        size = self._files.get(self._path(self._starts[-1])).size()
        return min(size // self.entry_bytes, self._per_file)

    def _path(self, start: int) -> str:
        return os.path.join(self.directory, f"{start:0{NAME_DIGITS}d}")

    # -- writing ----------------------------------------------------------

    def append(self, data: Buffer) -> None:
        """Adds whole entries.  Raises DiskFull and then has added none of them."""
        size = nbytes(data)
        if size % self.entry_bytes:
            raise ValueError(f"{size} bytes are not whole entries of {self.entry_bytes}")
        if len(self._tail) + size > FLUSH_BYTES:
            self.flush()
        with self._lock:
            self._tail += data
            self.end += size // self.entry_bytes

    def flush(self) -> None:
        """Hands what waits in memory to the operating system.  Raises DiskFull."""
        with self._flush_lock:
            while self._tail:
                start, room = self._last_file()
                path = self._path(start)
                with self._lock:
                    data = bytes(self._tail[: room * self.entry_bytes])
                write_all(self._files.get(path), [data], (self._flushed - start) * self.entry_bytes)
                self._unsynced.add(path)
                with self._lock:
                    self._flushed += len(data) // self.entry_bytes
                    del self._tail[: len(data)]

    def _last_file(self) -> tuple[int, int]:
        """Start of the file that takes the next entry, and for how many it has room."""
        if self._starts:
            start = self._starts[-1]
            room = start + self._per_file - self._flushed
            if room > 0:
                return start, room
        else:
            self._disk.makedirs(self.directory)
        start = self._flushed
        self._files.get(self._path(start), create=True)
        self._starts = [*self._starts, start]
        self._new_names = True
        return start, self._per_file

    @property
    def dirty(self) -> bool:
        """Whether `sync` has anything to do.  From any thread: what leaves the tail is noted as
        unsynced before."""
        return bool(self._tail or self._unsynced or self._new_names)

    def sync(self) -> None:
        """Makes all entries durable that were appended before.  Raises DiskFull, DiskFailed."""
        with self._flush_lock:
            self.flush()
            files = [self._files.get(path) for path in sorted(self._unsynced)]
            new_names = self._new_names
            self._unsynced.clear()
            self._new_names = False
        for file in files:
            file.fdatasync()
        if new_names:
            self._disk.fsync_dir(self.directory)

    # -- reading ----------------------------------------------------------

    def read(self, first: int, count: int, nowait: bool = False) -> memoryview:
        """Up to `count` entries from number `first` on; fewer at the end of a file.

        Empty at or beyond `end`.  Raises IndexError before `first`, CorruptFile,
        and BlockingIOError with `nowait` if the file is not in memory.
        """
        if first < self.first:
            raise IndexError(f"entry {first} is gone, the first is {self.first}")
        with self._lock:
            count = max(0, min(count, self.end - first))
            at = first - self._flushed
            if at >= 0:
                size = self.entry_bytes
                return memoryview(bytes(self._tail[at * size : (at + count) * size]))
            count = min(count, -at)
        starts = self._starts
        start = starts[bisect.bisect_right(starts, first) - 1]
        count = min(count, start + self._per_file - first)
        offset = (first - start) * self.entry_bytes
        path = self._path(start)
        data = self._files.get(path).pread(count * self.entry_bytes, offset, nowait)
        if len(data) < count * self.entry_bytes:
            raise CorruptFile(path, offset + len(data), "entries are missing", _REMEDY)
        return data

    # -- cutting ----------------------------------------------------------

    def truncate(self, end: int) -> None:
        """Drops all entries from number `end` on.

        Raises IndexError if the index does not reach `end` or starts after it.
        """
        if not self.first <= end <= self.end:
            raise IndexError(
                f"{self.directory} cannot be cut at {end}: it holds {self.first} to {self.end}"
            )
        with self._flush_lock:
            self.flush()
            while len(self._starts) > 1 and self._starts[-1] >= end:
                self._remove(self._starts[-1])
            if self._starts:
                start = self._starts[-1]
                path = self._path(start)
                self._files.get(path).truncate((end - start) * self.entry_bytes)
                self._unsynced.add(path)
            self._flushed = self.end = end

    def reset(self, first: int) -> None:
        """Empties the index; the next entry will have number `first`."""
        with self._flush_lock:
            for start in self._starts:
                self._remove(start)
            with self._lock:
                self._tail.clear()
                self.first = self._flushed = self.end = first
            if first:
                self._last_file()  # its name tells the next start where the index begins

    def drop_before(self, number: int) -> None:
        """Forgets the entries before `number`; removes the files that are done."""
        number = min(number, self.end)
        self.first = max(self.first, number)
        with self._flush_lock:
            while len(self._starts) > 1 and self._starts[1] <= number:
                self._remove(self._starts[0])

    def _remove(self, start: int) -> None:
        path = self._path(start)
        self._starts = [s for s in self._starts if s != start]
        self._unsynced.discard(path)
        self._files.forget(path)
        self._disk.unlink(path)
        self._new_names = True

    def close(self) -> None:
        """Flushes; does not sync."""
        self.flush()
        for start in self._starts:
            self._files.forget(self._path(start))


def _is_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdigit()
