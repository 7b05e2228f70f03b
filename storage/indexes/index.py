"""Fixed-size entries by number, in files of a fixed number of entries.

One thread appends, cuts and drops; any thread may read, flush, sync or remove what was dropped
meanwhile.
Numbers may be left out (`skip_to`): a gap lies between two files, and costs nothing.
Derived data: unchecked, durable only after `sync`, rebuilt by its owner from a
log.  A file is named by the 20-digit number of its first entry.  The newest
entries wait in memory, up to FLUSH_BYTES, so that an append costs no system
call and a reader at the tail needs none.
"""

from __future__ import annotations

import bisect
import os
import threading
from itertools import pairwise

from duemq_server.storage.disk import Buffer, Disk, nbytes, write_all
from duemq_server.storage.errors import CorruptFile, DiskFailed, DiskFull
from duemq_server.storage.open_files import OpenFiles

NAME_DIGITS = 20
FILE_BYTES = 8 * 1024 * 1024
"""Size of a full file; what retention frees at a time."""
FLUSH_BYTES = 64 * 1024
"""Entries kept in memory before they are written."""

REMEDY = "It is derived data: remove its folder while the broker is stopped, to have it rebuilt"


class FixedIndex:
    """An array of entries on disk that grows at its end and shrinks from its start.

    Entries are numbered from 0 for ever; `first` is the oldest kept, `end` the
    number of the next one.  Between them may be gaps: `present` steps over one.
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
        self._failure: DiskFailed | None = None
        names = disk.listdir(directory) if disk.exists(directory) else []
        self._starts = sorted(int(n) for n in names if _is_name(n))  # replaced, never changed
        self.first = self._starts[0] if self._starts else 0
        self._missing: list[int] = []  # where a file begins that is not there
        self._gaps = self._found_gaps()  # replaced, never changed
        self._flushed = self._end_of(self._starts[-1]) if self._starts else 0
        self.end = self._flushed

    def _end_of(self, start: int) -> int:
        """Past the last entry of a file."""
        size = self._files.get(self._path(start)).size()
        return start + min(size // self.entry_bytes, self._per_file)

    def _found_gaps(self) -> list[tuple[int, int]]:
        """A file whose successor is not the one of a full file ends at a gap.

        If it is full its successor is lost: a gap that begins there has an empty file (`skip_to`).
        """
        gaps = []
        for start, following in pairwise(self._starts):
            if following != start + self._per_file and (end := self._end_of(start)) < following:
                gaps.append((end, following))
                if end == start + self._per_file:
                    self._missing.append(end)
        return gaps

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
        self.hold(data)

    def hold(self, data: Buffer) -> None:
        """Adds whole entries in memory, and writes none: as much as the caller has room for."""
        with self._lock:
            self._tail += data
            self.end += nbytes(data) // self.entry_bytes

    def skip_to(self, number: int) -> None:
        """Leaves numbers out: the next entry will have `number`, beyond `end`.

        Raises DiskFull: mostly before anything has changed; DiskFailed.
        """
        with self._flush_lock:
            self.flush()
            self._disk.makedirs(self.directory)
            self._files.get(self._path(number), create=True)
            if self.first == self.end:
                self.reset(number)
                return
            start = self.end
            if self._starts[-1] == start:  # nothing has come since the last gap
                self._remove(start)
                start = self._gaps[-1][0]
                self._gaps = self._gaps[:-1]
                if self._starts[-1] == start:
                    self._remove(start)  # said that the file before is not full
            full = self._starts[-1] + self._per_file
            # Else it would look as if the file before were full, or one behind it were lost: but
            # where both are so, the gap is as long as a file, and a start rebuilds the index.
            if number == full or (start == full and number != full + self._per_file):
                self._new_file(start)
            self._gaps = [*self._gaps, (start, number)]
            self._flushed = self.end = number
            self._new_file(number)

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
        self._new_file(self._flushed)
        return self._flushed, self._per_file

    def _new_file(self, start: int) -> None:
        self._files.get(self._path(start), create=True)
        self._starts = [*self._starts, start]
        self._new_names = True

    @property
    def dirty(self) -> bool:
        """Whether `sync` has anything to do.  From any thread: what leaves the tail is noted as
        unsynced before."""
        return bool(self._tail or self._unsynced or self._new_names)

    def sync(self) -> None:
        """Makes all entries durable that were appended before.

        Raises DiskFull, and DiskFailed: no later sync proves anything then.
        """
        with self._flush_lock:
            if self._failure is not None:
                raise DiskFailed(str(self._failure))
            self.flush()
            files = [self._files.get(path) for path in sorted(self._unsynced)]
            new_names = self._new_names
            self._unsynced.clear()
            self._new_names = False
        try:
            for file in files:
                file.fdatasync()
            if new_names:
                self._disk.fsync_dir(self.directory)
        except DiskFull:  # too many open files: the names are still to be synced
            self._new_names = True
            raise
        except DiskFailed as error:
            self._failure = error
            raise

    # -- reading ----------------------------------------------------------

    def read(self, first: int, count: int, nowait: bool = False) -> memoryview:
        """Up to `count` entries from number `first` on; fewer at the end of a file or at a gap.

        Empty at or beyond `end`.  Raises IndexError before `first` and in a gap,
        CorruptFile, and BlockingIOError with `nowait` if the file is not in memory.
        """
        if first < self.first:
            raise self._gone(first)
        for start, past in self._gaps:
            if start <= first < past:
                raise IndexError(f"entry {first} was left out, the next is {past}")
            if first < start < first + count:
                count = start - first
        with self._lock:
            count = max(0, min(count, self.end - first))
            at = first - self._flushed
            if at >= 0:
                size = self.entry_bytes
                return memoryview(bytes(self._tail[at * size : (at + count) * size]))
            count = min(count, -at)
        starts = self._starts
        at = bisect.bisect_right(starts, first) - 1
        if at < 0:
            raise self._gone(first)  # just now
        start = starts[at]
        count = min(count, start + self._per_file - first)
        offset = (first - start) * self.entry_bytes
        path = self._path(start)
        try:
            file = self._files.get(path)
        except FileNotFoundError as error:
            if first < self.first:  # which `drop_before` raises before it removes a file
                raise self._gone(first) from error
            raise
        data = file.pread(count * self.entry_bytes, offset, nowait)
        if len(data) < count * self.entry_bytes:
            raise CorruptFile(path, offset + len(data), "entries are missing", REMEDY)
        return data

    def _gone(self, number: int) -> IndexError:
        return IndexError(f"entry {number} is gone, the first is {self.first}")

    def present(self, number: int) -> int:
        """The number itself, or where the gap ends that it lies in."""
        for start, past in self._gaps:
            if start <= number < past:
                return past
        return number

    def last_before(self, number: int) -> int:
        """Number of the newest entry before `number`; below `first` if there is none."""
        for start, past in self._gaps:
            if start < number <= past:
                return start - 1
        return number - 1

    def count(self, first: int) -> int:
        """How many entries there are from number `first` on."""
        first = max(first, self.first)
        left_out = sum(max(0, past - max(start, first)) for start, past in self._gaps)
        return max(0, self.end - first - left_out)

    # -- cutting ----------------------------------------------------------

    def truncate(self, end: int) -> None:
        """Drops all entries from number `end` on.

        Raises IndexError if the index does not reach `end`, starts after it or left it out, and
        CorruptFile if a file is lost before it.
        """
        for start in self._missing:
            if start < end:
                raise CorruptFile(self._path(start), 0, "the file is gone", REMEDY)
        in_gap = any(start < end < past for start, past in self._gaps)
        if in_gap or not self.first <= end <= self.end:
            raise IndexError(
                f"{self.directory} cannot be cut at {end}: it holds {self.first} to {self.end}"
            )
        with self._flush_lock:
            self.flush()
            self._gaps = [gap for gap in self._gaps if gap[1] <= end]
            kept = self._gaps[-1][1] if self._gaps else 0
            while len(self._starts) > 1 and self._starts[-1] >= end and self._starts[-1] != kept:
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
            self._gaps, self._missing = [], []
            with self._lock:
                self._tail.clear()
                self.first = self._flushed = self.end = first
            if first:
                self._last_file()  # its name tells the next start where the index begins

    def drop_before(self, number: int) -> None:
        """Forgets the entries before `number`; `remove_before` removes the files that are done."""
        self.first = max(self.first, self.present(min(number, self.end)))

    def remove_before(self, number: int) -> None:
        """Removes the files of entries before `number`, which were dropped.  Any thread."""
        number = self.present(min(number, self.end))
        while self._remove_first(number):
            pass
        with self._flush_lock:
            kept = self._starts[0] if self._starts else self.first
            self._gaps = [gap for gap in self._gaps if gap[1] > kept]

    def _remove_first(self, number: int) -> bool:
        """Whether there was a file that ends at or before `number`."""
        with self._flush_lock:  # file by file: who appends does not wait for all of them
            if len(self._starts) < 2 or self._starts[1] > number:
                return False
            self._remove(self._starts[0])
            return True

    def _remove(self, start: int) -> None:
        path = self._path(start)
        self._disk.unlink(path)  # if that fails it is tried again
        self._starts = [s for s in self._starts if s != start]
        self._unsynced.discard(path)
        self._files.forget(path)  # behind it, or a reader might open the file once more
        self._new_names = True

    def close(self) -> None:
        """Flushes; does not sync."""
        self.flush()
        for start in self._starts:
            self._files.forget(self._path(start))


def _is_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdigit()
