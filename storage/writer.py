"""The threads that write a log: natural group commit.

While one group is being synced the next one gathers; no delay is ever added, so
groups are as large as the load makes them.  There are two threads, so that the next
group is copied to the page cache while the disk is busy with the one before: copying
a megabyte takes as long as a good part of its sync.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from duemq_server.storage.errors import DiskFailed, DiskFull
from duemq_server.storage.log import GROUP_BYTES_MAX, Group, SegmentedLog
from duemq_server.storage.record import ENTRY_BYTES_MAX
from duemq_server.storage.replicas.replica_log import ReplicaLog

RETRY_SECONDS = 0.25
"""How often a write is tried again while the disk is full."""
THREADS = 2
TOP_UP_BYTES_MAX = 64 * 1024
"""What has gathered by a thread's turn to sync joins that sync if it is no more than this: it
need not wait for one more, and takes little time to copy."""
UNSYNCED_BYTES = 64 * 1024 * 1024
"""With a sync interval: written bytes from which the sync does not wait for it."""
UNSYNCED_BYTES_MAX = UNSYNCED_BYTES + GROUP_BYTES_MAX + ENTRY_BYTES_MAX
"""What a power failure takes at most then: the group that came to them, and its last entry."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """Figures of one group commit, for metrics.

    `group` is what was told to be durable; an entry that is being written by the other thread
    may be counted one commit early.
    """

    group: Group
    write_seconds: float
    sync_seconds: float


class LogWriter:
    """Writes what is appended to a log, in threads of its own.

    `on_durable(position)` is called in one of them after each sync: everything
    before `position` may be acknowledged.  With `sync_interval_s` set, groups
    are acknowledged when the operating system has them, and synced that often:
    a crash of the machine may then lose the last interval, UNSYNCED_BYTES_MAX at
    most.
    `on_fatal(error)` is called once, when the disk failed: the process must stop.
    `on_disk_full(full)` tells when space runs out and when it is back; nothing
    is lost meanwhile.  `on_commit` gets the figures of each group.
    No two of these calls run at a time.
    """

    def __init__(
        self,
        log: SegmentedLog,
        on_durable: Callable[[int], None],
        on_fatal: Callable[[BaseException], None],
        *,
        sync_interval_s: float | None = None,
        on_disk_full: Callable[[bool], None] | None = None,
        on_commit: Callable[[Commit], None] | None = None,
        name: str = "commitlog-writer",
    ) -> None:
        self._log = log
        self._on_durable = on_durable
        self._on_fatal = on_fatal
        self._on_disk_full = on_disk_full or (lambda full: None)
        self._on_commit = on_commit
        self._sync_interval_s = sync_interval_s
        self._doorbell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threads = THREADS if sync_interval_s is None else 1
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._turn = threading.Lock()  # guards the sync and all that is told to the owner
        self._told = log.durable_position
        self._entries = 0  # of those told
        self._synced_at = 0.0
        self._full = False
        self._failed = False

    def start(self) -> None:
        """Starts the threads."""
        self._log.on_append = self._ring
        for thread in self._threads:
            thread.start()
        self._ring()

    def stop(self) -> None:
        """Writes and syncs all that waits, then ends the threads.

        While the disk is full it gives up instead: what waits was not acknowledged.
        """
        self._stopping.set()
        for _ in self._threads:
            self._ring()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def truncate(self, position: int) -> None:
        """ReplicaLog.truncate between two group commits: what comes then is told anew."""
        if not isinstance(self._log, ReplicaLog):
            raise TypeError("only a log with replicas is truncated")
        with self._turn:
            self._log.truncate(position)
            self._told = min(self._told, position)

    def _ring(self) -> None:
        self._doorbell.put(None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wait()
                self._write_all()
            self._write_all()
            if self._log.disk_full:
                logger.error("%s: stopped while the disk was full", self._log.directory)
            self._log.sync()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            if self._failed:
                return
            self._failed = True
            if not isinstance(error, DiskFailed):
                logger.exception("%s: the writer failed", self._log.directory)
            self._on_fatal(error)

    def _wait(self) -> None:
        """Sleeps until something was appended, a sync is due, or a retry is."""
        timeout = None
        interval = self._sync_interval_s
        if self._full:
            timeout = RETRY_SECONDS
        elif interval is not None and self._log.durable_position < self._log.written_position:
            timeout = max(0.0, self._synced_at + interval - time.monotonic())
        try:
            self._doorbell.get(timeout=timeout)
            while not self._stopping.is_set():
                self._doorbell.get_nowait()
        except queue.Empty:
            pass

    def _write_all(self) -> None:
        try:
            while self._write_group():
                pass
        except DiskFull as error:
            with self._turn:
                self._tell_full(True, str(error))
        if self._sync_interval_s is not None:
            self._sync_if_due(self._sync_interval_s)

    def _write_group(self) -> bool:
        started = time.perf_counter()
        group = self._log.write_group()
        if group is None:
            return False
        written = time.perf_counter()
        with self._turn:
            self._tell_full(False)
            if group.end_position <= self._told:  # the other thread's sync came after our write
                return True
            self._top_up()
            turn = time.perf_counter()
            if self._sync_interval_s is None:
                position = self._log.sync()
            else:
                self._sync_if_due(self._sync_interval_s)
                position = group.end_position
            self._tell(position, written - started, time.perf_counter() - turn)
        return True

    def _top_up(self) -> None:
        """Writes what came while it was the other thread's turn."""
        if self._sync_interval_s is None and 0 < self._log.pending_bytes <= TOP_UP_BYTES_MAX:
            with suppress(DiskFull):  # which the next write will tell
                self._log.write_group()

    def _tell(self, position: int, write_seconds: float, sync_seconds: float) -> None:
        entries, size = self._log.entries_written - self._entries, position - self._told
        self._entries, self._told = self._log.entries_written, position
        if self._on_commit is not None:
            self._on_commit(Commit(Group(entries, size, position), write_seconds, sync_seconds))
        self._on_durable(position)

    def _sync_if_due(self, interval_s: float) -> None:
        unsynced = self._log.written_position - self._log.durable_position
        if unsynced >= UNSYNCED_BYTES or time.monotonic() >= self._synced_at + interval_s:
            self._log.sync()
            self._synced_at = time.monotonic()

    def _tell_full(self, full: bool, reason: str = "") -> None:
        if full == self._full:
            return
        self._full = full
        if full:
            logger.error("%s: disk full, holding writes: %s", self._log.directory, reason)
        else:
            logger.warning("%s: space is back, writing again", self._log.directory)
        self._on_disk_full(full)
