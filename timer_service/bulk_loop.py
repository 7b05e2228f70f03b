"""Jobs that cancel or shift what is pending of a topic: one at a time, a slice between other work.

Owned by the event loop.  A slice is some milliseconds; behind each others have their turn for as
long as it took, so that a job takes half of the loop at most.  Blocks are read in the thread
`timer-bulk`.

A job that is open when the shard starts goes on.  Whoever asks about one waits for a while; who
asks with another one meanwhile waits, too, and is told that it was not accepted.  But a cancel
passes a job that waits for space on the disk, or for routes, where it may (`Which.may_pass`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from duemq.errors import Corrupt, InvalidArgument, Unavailable
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.firing import RETRY_S
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.bulk.counting import Counting
from duemq_server.timer_service.scheduling.bulk.jobs import Job, Which
from duemq_server.timer_service.scheduling.bulk.matching import Reading
from duemq_server.timer_service.scheduling.bulk.walk import Walk, accept, go_on
from duemq_server.timer_service.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

PAUSE_S_MIN = 0.001  # between slices
PAUSE_S = 0.0001  # of the thread
FLUSH_WAIT_S = 0.005  # until there may be room in the memtable


def _pause() -> None:
    """The thread lets the event loop have the interpreter at once, not in 5 ms."""
    time.sleep(PAUSE_S)


class BulkLoop:
    """Runs the open job of a shard."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], int],
        log_loop: LogLoop,
        flush: Callable[[], None],
        short_of_space: Callable[[], bool],
    ) -> None:
        """`flush` is called when the memtable is full."""
        self._scheduler = scheduler
        self._clock = clock
        self._log_loop = log_loop
        self._flush = flush
        self._short_of_space = short_of_space
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timer-bulk")
        self._counting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()  # of the open job, or it gave way
        self._short = False  # the open job waits for space, or for routes
        self._gives_way = asyncio.Event()  # another job passed it
        self._halted = False

    def start(self) -> None:
        """A job that was open when the shard stopped goes on."""
        jobs = self._scheduler.bulk
        job = jobs.open or jobs.behind
        if job is not None and self._task is None and not self._halted:
            self._over = asyncio.Event()
            self._task = asyncio.create_task(self._run(job), name="bulk job")

    def halt(self) -> None:
        """Nothing more is done; the job goes on where the shard starts next."""
        self._halted = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Nobody may ask any more."""
        self.halt()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._thread.shutdown)

    async def change(self, job_id: bytes, which: Which, wait_s: float) -> Job | None:
        """The job of this id as it stands, over or after `wait_s`; None: another one is open.

        It is accepted if it is new; what is told is durable.  Raises InvalidArgument (the id of
        another job), Unavailable (not the leader any more), Internal.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        jobs = self._scheduler.bulk
        while (job := jobs.find(job_id)) is None:
            if self._halted:
                raise Unavailable("this timer service stops, or does not lead any more")
            first = jobs.open or jobs.behind
            # The one that waits has not heard yet that another one passed it, if there is one.
            short = self._short and jobs.behind is None
            if first is not None and not (short and which.may_pass(first.which)):
                if self._task is None:  # its end would be waited for in vain
                    raise Unavailable(
                        "a job of this timer service has failed, or waits for its start"
                    )
                if not await self._is_over(deadline):
                    return None
                continue
            try:
                job = accept(self._scheduler, job_id, which, self._clock())
            except (LogFull, DiskFull):
                await self._log_loop.progress_or(RETRY_S)
                if asyncio.get_running_loop().time() > deadline:
                    return None
            else:
                self._gives_way.set()
                self.start()
        if job.which != which:
            raise InvalidArgument(
                "another request had this id: each needs one of its own", field="request_id"
            )
        while not job.over_ms and self._task is not None and await self._is_over(deadline):
            pass  # one that it passes, or that passes it, gave way
        told = dataclasses.replace(job)
        await self._log_loop.durable(self._scheduler.log.end_position)
        return told

    async def _is_over(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def count(self, which: Which, wait_s: float = math.inf) -> int | None:
        """How many timers a job would touch; None: it cannot be told within about `wait_s`.

        Raises Corrupt.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._counting.acquire()
        except TimeoutError:
            return None
        try:
            counted = await self._count(Counting(self._scheduler, which), deadline)
        finally:
            self._counting.release()
        if counted is not None:
            await self._log_loop.durable(self._scheduler.log.end_position)
        return counted

    async def _count(self, counting: Counting, deadline: float) -> int | None:
        with self._scheduler.segments.pinned(counting.files()):
            await self._in_thread(counting.scan)
            while (reading := counting.reading()) is not None:
                if asyncio.get_running_loop().time() > deadline:
                    return None
                await self._run_reading(reading)
                for _ in counting.read(reading):
                    await asyncio.sleep(0)
        if counting.problems:
            raise Corrupt("; ".join(counting.problems[:3]))
        return counting.count

    async def _run(self, job: Job) -> None:
        done = False
        try:
            if job is self._scheduler.bulk.behind:
                await self._go_on()
            await self._work(Walk(self._scheduler, job))
            done = True
        except Unavailable as error:  # it goes on under another leader
            log.info("a bulk job stops here: %s", error)
        except Exception as error:
            self._log_loop.fail(error)
        finally:
            self._task = None
            self._over.set()
            if done:
                self.start()  # the one that it passed, or that passed it

    async def _go_on(self) -> None:
        while True:
            try:
                go_on(self._scheduler, self._clock())
                return
            except (LogFull, DiskFull):
                await self._log_loop.progress_or(RETRY_S)

    async def _work(self, walk: Walk) -> None:
        while True:
            reading = walk.reading()
            if reading is not None:
                await self._read(walk, reading)
                continue
            if not await self._room(walk.job):
                return
            began = time.perf_counter()
            try:
                if not walk.step(self._clock()):
                    return  # at once: the next job would find this one's task, and wait for ever
            except (LogFull, DiskFull):
                await self._log_loop.progress_or(RETRY_S)
                continue
            await asyncio.sleep(max(PAUSE_S_MIN, time.perf_counter() - began))

    async def _read(self, walk: Walk, reading: Reading) -> None:
        with self._scheduler.segments.pinned(reading.files()):
            await self._run_reading(reading)
        walk.read(reading)

    async def _run_reading(self, reading: Reading) -> None:
        """As far as it comes: while too many files are open the rest waits."""
        try:
            await self._in_thread(reading.run)
        except DiskFull:
            await self._log_loop.progress_or(RETRY_S)

    async def _room(self, job: Job) -> bool:
        """Until what comes has room: in memory, and on the disk.  False: the job gave way.

        Where to what is moved goes is known once routes are, which a start does not wait for.
        """
        if not job.which.brings:
            return True
        try:
            while True:
                full = self._scheduler.tiers.memtable_full()
                to = job.which.to_topic
                aimless = bool(to) and self._scheduler.dispatcher.queues(to) is None
                self._short = aimless or self._short_of_space()
                if not (full or self._short):
                    return True
                if full:
                    self._flush()
                self._gives_way.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if self._short else FLUSH_WAIT_S):
                        await self._gives_way.wait()
                if self._scheduler.bulk.open is not job:
                    return False
        finally:
            self._short = False

    async def _in_thread(self, work: Callable[[Callable[[], None]], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, _pause)
