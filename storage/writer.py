"""The thread that writes a log: natural group commit.

While one group is being synced the next one gathers; no delay is ever added, so
groups are as large as the load makes them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.errors import DiskFailed, DiskFull
from storage.log import Group, SegmentedLog

RETRY_SECONDS = 0.25
"""How often a write is tried again while the disk is full."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """Figures of one group commit, for metrics."""

    group: Group
    write_seconds: float
    sync_seconds: float


class LogWriter:
    """Writes what is appended to a log, in a thread of its own.

    `on_durable(position)` is called in that thread after each group: everything
    before `position` may be acknowledged.  With `sync_interval_s` set, groups
    are acknowledged when the operating system has them, and synced that often:
    a crash of the machine may then lose the last interval.
    `on_fatal(error)` is called once, when the disk failed: the process must stop.
    `on_disk_full(full)` tells when space runs out and when it is back; nothing
    is lost meanwhile.  `on_commit` gets the figures of each group.
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._synced_at = 0.0
        self._full = False

    def start(self) -> None:
        """Starts the thread."""
        self._log.on_append = self._ring
        self._thread.start()
        self._ring()

    def stop(self) -> None:
        """Writes and syncs all that waits, then ends the thread.

        While the disk is full it gives up instead: what waits was not acknowledged.
        """
        self._stopping.set()
        self._ring()
        if self._thread.is_alive():
            self._thread.join()

    def _ring(self) -> None:
        self._doorbell.put(None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wait()
                self._write_all()
            self._write_all()
            self._log.sync()
        except DiskFull:
            logger.error("%s: stopped while the disk was full", self._log.directory)
        except BaseException as error:
            if not isinstance(error, DiskFailed):
                logger.exception("%s: the writer failed", self._log.directory)
            self._on_fatal(error)

    def _wait(self) -> None:
        """Sleeps until something was appended, a sync is due, or a retry is."""
        timeout = None
        if self._full:
            timeout = RETRY_SECONDS
        elif self._log.durable_position < self._log.written_position:
            interval = self._sync_interval_s or 0.0
            timeout = max(0.0, self._synced_at + interval - time.monotonic())
        try:
            self._doorbell.get(timeout=timeout)
            while True:
                self._doorbell.get_nowait()
        except queue.Empty:
            pass

    def _write_all(self) -> None:
        try:
            while self._write_group():
                pass
        except DiskFull as error:
            if self._stopping.is_set():
                raise
            self._tell_full(True, str(error))
            return
        self._sync_if_due()

    def _write_group(self) -> bool:
        started = time.perf_counter()
        group = self._log.write_group()
        if group is None:
            return False
        self._tell_full(False)
        written = time.perf_counter()
        if self._sync_interval_s is None:
            self._log.sync()
        else:
            self._sync_if_due()
        self._on_durable(group.end_position)
        if self._on_commit is not None:
            self._on_commit(Commit(group, written - started, time.perf_counter() - written))
        return True

    def _sync_if_due(self) -> None:
        interval = self._sync_interval_s
        if interval is not None and time.monotonic() >= self._synced_at + interval:
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
