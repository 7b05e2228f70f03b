"""The key index of a queue: a sorted run of key hashes for each span of offsets, once it is built.

Owned by: Queue.  Mutated by: the thread that builds runs (`adopt`), look-ups (a damaged run goes),
any thread (`remove_dropped`), the event loop (`drop_before`, `close`).  Read by: any thread.

A run covers a span of the queue that ends below a saved checkpoint, so that a start finds nothing
of it to be taken back.  Where there is no run, `find` says so, and the consume queue is compared.
"""

import logging
import os
import threading
from contextlib import suppress

from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFailed, DiskFull, StorageError
from duemq_server.storage.indexes import key_run
from duemq_server.storage.indexes.key_run import KeyRun

log = logging.getLogger(__name__)

SPAN_RECORDS = 1 << 18
"""Why so many: README.md, "Look-ups"."""


class KeyIndex:
    """The runs of one queue, in its folder."""

    __slots__ = ("_bases", "_closed", "_directory", "_disk", "_dropped", "_lock", "span")

    def __init__(self, directory: str, disk: Disk) -> None:
        self.span = SPAN_RECORDS
        self._directory = directory
        self._disk = disk
        # Guards all below, and which runs there are in the folder.
        self._lock = threading.Lock()
        self._bases: set[int] = set()
        self._dropped: list[int] = []  # whose files are still there
        self._closed = False

    def __len__(self) -> int:
        return len(self._bases)

    def _path(self, base: int) -> str:
        return os.path.join(self._directory, key_run.name_of(base))

    # -- which runs there are ---------------------------------------------------------------------

    def load(self, low: int, high: int) -> None:
        """Takes the runs over that lie in a queue of these offsets; removes all others.  At start.

        Raises DiskFailed.
        """
        self._bases = set()
        if not self._disk.exists(self._directory):
            return
        for name in self._disk.listdir(self._directory):
            base = key_run.base_of(name)
            if base is None:
                continue
            if base % self.span == 0 and low < base + self.span <= high:
                self._bases.add(base)
            else:
                self._disk.unlink(self._path(base))

    def missing(self, low: int, high: int) -> int:
        """How many spans have no run that a queue of these offsets could have."""
        with self._lock:
            return max(0, high // self.span - low // self.span - len(self._bases))

    def bases_missing(self, low: int, high: int) -> list[int]:
        """Where those spans begin, the newest first."""
        span = self.span
        with self._lock:
            complete = range(low // span * span, high - span + 1, span)
            return [base for base in reversed(complete) if base not in self._bases]

    def adopt(self, base: int, path: str, low: int) -> bool:
        """Makes a file the run of a span, unless the queue begins beyond it or is gone: False.

        Raises DiskFull, DiskFailed.
        """
        with self._lock:
            if self._closed or base + self.span <= low:
                return False
            self._disk.rename(path, self._path(base))
            self._bases.add(base)
            return True

    def drop_before(self, offset: int) -> None:
        """Forgets the runs of spans that end at or before an offset; `remove_dropped` removes them.

        No other run takes the place of one of them (`adopt`).
        """
        with self._lock:
            done = [base for base in self._bases if base + self.span <= offset]
            self._bases.difference_update(done)
            self._dropped += done

    def remove_dropped(self) -> None:
        """Removes the files of runs that were dropped.  Any thread.  Raises DiskFailed."""
        while self._remove_one():
            pass

    def _remove_one(self) -> bool:
        with self._lock:  # one by one: who looks a key up does not wait for all of them
            if self._dropped:
                self._disk.unlink(self._path(self._dropped[-1]))
                self._dropped.pop()
            return bool(self._dropped)

    def close(self) -> None:
        """Touches the folder no more: the topic was deleted, and whoever did that removes it."""
        with self._lock:
            self._closed = True
            self._bases = set()
            self._dropped = []

    def discard(self, offset: int) -> None:
        """Removes the run of the span of an offset: it is damaged, and will be built anew."""
        base = offset - offset % self.span
        with self._lock:
            if base in self._bases:
                self._bases.remove(base)
                with suppress(DiskFailed):  # renaming the next one over it does as well
                    self._disk.unlink(self._path(base))

    # -- looking up -------------------------------------------------------------------------------

    def end_of_span(self, offset: int) -> int:
        """Where the span of an offset ends."""
        return offset - offset % self.span + self.span

    def find(self, key_hash: int, low: int, high: int, limit: int) -> list[int] | None:
        """Ascending offsets of records whose key has that hash, `limit` at most; None: no run says.

        `low` to `high`: both within one span, `high` not included.
        """
        base = low - low % self.span
        if base not in self._bases:
            return None
        try:
            file = self._disk.open(self._path(base))
            try:
                run = KeyRun(file, self._path(base))
                run.check_span(base, self.span)
                return run.find(key_hash, low, high, limit)
            finally:
                file.close()
        except DiskFull:  # too many open files
            return None
        except (StorageError, OSError) as error:
            if base in self._bases:  # else retention was faster
                log.warning("building a key run anew: %s", error)
                self.discard(base)
            return None
