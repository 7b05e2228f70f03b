"""Runs what housekeeping wants done on the disk: one job at a time, in the thread `timer-disk`.

And says whether the disk has room for more.  Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from duemq.errors import ReadOnly
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service import malloc
from duemq_server.timer_service.disk.data_directory import DataDirectory
from duemq_server.timer_service.disk.housekeeping import Housekeeper, Job, Save
from duemq_server.timer_service.log_loop import LogLoop

log = logging.getLogger(__name__)

RETRY_S = 0.25  # after a full disk
TRIM_INTERVAL_S = 1.0
TOLD_INTERVAL_S = 60.0  # between two lines that a kind of job has no space
SPACE_INTERVAL_S = 0.1  # between two looks for requests: one costs as much as a small request


class DiskJobs:
    """Flushes, loads and checkpoints, as housekeeping.py chooses them."""

    def __init__(
        self, directory: DataDirectory, log_loop: LogLoop, now_ms: Callable[[], int]
    ) -> None:
        self._directory = directory
        self._log_loop = log_loop
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timer-disk")
        self._work = asyncio.Event()
        self._done = 0  # since memory was given back
        self._trimmed_s = self._loop.time()
        self._full = FullDisk(self._loop.time)

    def wake(self) -> None:
        """There may be something to do."""
        self._work.set()

    async def run(self) -> None:
        """For ever.  Raises StorageError when the disk has failed."""
        keeper = self._directory.housekeeper
        while True:
            self._work.clear()
            try:
                job = keeper.next_job(self._now_ms())
                if job is None:
                    self._directory.scheduler.flush_acks()
            except (LogFull, DiskFull):
                await self._log_loop.progress_or(RETRY_S)
                continue
            if job is None:
                await self._give_back_memory()
                now = self._now_ms()
                await self._work_or((keeper.next_look_ms(now) - now) / 1000)
                continue
            if isinstance(job, Save):
                await self._log_loop.durable(job.position)
            if await self._run(job):
                keeper.finish(job, self._now_ms())
                self._done += 1
            else:
                keeper.no_space(job, self._now_ms())

    async def _work_or(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()

    async def _run(self, job: Job) -> bool:
        """Runs a job; False: the disk is full, and nothing is lost."""
        kind = type(job).__name__.lower()
        try:
            await self._loop.run_in_executor(self._thread, job.run)
        except DiskFull as error:
            self._full.refused(kind, error)
            return False
        self._full.took(kind)
        return True

    async def _give_back_memory(self) -> None:
        """Returns freed memory to the operating system, a while after work was done."""
        if self._done and self._loop.time() - self._trimmed_s > TRIM_INTERVAL_S:
            self._trimmed_s = self._loop.time()
            self._done = 0
            await self._loop.run_in_executor(self._thread, malloc.give_back)

    async def close(self) -> None:
        """Waits for the job that is being run.  `run` must have ended."""
        await asyncio.to_thread(self._thread.shutdown)


class FullDisk:
    """Says in the log that the disk is full, and that it has space again: once for many tries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._tries: dict[str, int] = {}  # by kind of job: those that failed, since the last line
        self._quiet_to_s: dict[str, float] = {}

    def refused(self, kind: str, error: DiskFull) -> None:
        """A job had no space; its kind will be tried again."""
        if kind not in self._tries and self._clock() < self._quiet_to_s.get(kind, 0.0):
            log.debug("%s: %s; trying again", kind, error)
            return
        tries = self._tries.get(kind, 0)
        log.log(logging.DEBUG if tries else logging.ERROR, "%s: %s; trying again", kind, error)
        self._tries[kind] = tries + 1
        if not tries:
            self._quiet_to_s[kind] = self._clock() + TOLD_INTERVAL_S

    def took(self, kind: str) -> None:
        """A job ran."""
        tries = self._tries.pop(kind, 0)
        if tries:
            log.warning("%s: there is space again, after %d tries", kind, tries)


class Space:
    """Whether the disk has room for more timers.

    While it has not, nothing is taken over; what is here fires, and so makes room.
    """

    def __init__(self, housekeeper: Housekeeper, free_bytes_min: int) -> None:
        self._housekeeper = housekeeper
        self._free_bytes_min = free_bytes_min
        self._short = False  # at the last look
        self._look_at_s = 0.0  # when `check` is to look again

    def is_short(self) -> bool:
        """Looks; says in the log when it is another answer than before."""
        short = self._housekeeper.short_of_space()
        if short != self._short:
            self._short = short
            log.log(
                logging.ERROR if short else logging.WARNING,
                "less than %d bytes are free: nothing is taken over"
                if short
                else "%d bytes are free again: taking over",
                self._free_bytes_min,
            )
        return short

    def check(self) -> None:
        """Raises ReadOnly if it is short; looks now and then."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + SPACE_INTERVAL_S
            self.is_short()
        if self._short:
            raise ReadOnly(
                f"less than {self._free_bytes_min} bytes are free: this timer service takes nothing"
                " over",
                field="free_bytes_min",
                limit=self._free_bytes_min,
            )
