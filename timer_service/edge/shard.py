"""The scheduler at work: log writer, firing loop and housekeeping around the core.

Owned by the event loop.  Threads: two `timerlog-writer` sync the log; `timer-disk` runs one job at
a time, `timer-look-up` one look-up (cancels.py).  All come back through `call_soon_threadsafe`.

The firing loop is one timer of the event loop, set to the time at which the core wants to be called
next.  The core itself says when that becomes sooner (`Scheduler.on_sooner`), whoever called it: a
frame came, housekeeping moved a timer into memory, a broker answered, connected, or left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from duemq.errors import DuemqError, Internal, InvariantError
from duemq.tracing import spans
from duemq_server.storage.errors import DiskFull, LogFull, StorageError
from duemq_server.storage.writer import Commit, LogWriter
from duemq_server.timer_service.disk.data_directory import Store, save_now
from duemq_server.timer_service.disk.housekeeping import Save
from duemq_server.timer_service.edge import malloc
from duemq_server.timer_service.edge.cancels import Cancels
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.scheduling.cancelling import NOT_YET, source_of
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import Batch, Outcome
from duemq_server.timer_service.scheduling.lateness import Lateness
from duemq_server.timer_service.scheduling.scheduler import Ingested
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

log = logging.getLogger(__name__)

# At most so many ticks: below it, each costs more (log entry, sync, gRPC) than its timers.
TICK_SPACING_S = 0.001
RETRY_S = 0.25  # after a full disk
# The longest sleep of the firing loop: how late it notices that the clock was set.
SLEEP_S_MAX = 1.0
TRIM_INTERVAL_S = 1.0


def now_ms() -> int:
    """Unix time; what due times are compared with."""
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """A clock that nobody sets; for waits."""
    return time.monotonic_ns() // 1_000_000


class Arrival(NamedTuple):
    """Timers that were taken over and are not yet durable."""

    end: int
    done: Callable[[], None]


class Shard:
    """One shard's timers, alive."""

    def __init__(self, store: Store, on_commit: Callable[[Commit], None] | None = None) -> None:
        self.store = store
        self.scheduler = store.scheduler
        self.lateness = Lateness()
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self.loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self.on_sendable: Callable[[str], None] = lambda broker: None
        """Called when there is something new to send to a broker."""
        self._writer = LogWriter(
            store.log,
            self._on_durable,
            self._on_fatal,
            on_commit=on_commit,
            name="timerlog-writer",
        )
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="timer-disk")
        self._cancels = Cancels(
            self.scheduler, lambda: self.now_ms() + AHEAD_MS, lambda: self._progress_or(RETRY_S)
        )
        self._streams: dict[str, object] = {}
        self._progress = asyncio.Event()
        self._arrived = asyncio.Event()
        self._work = asyncio.Event()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_ms = NEVER  # what it is set for; 0: at once
        self._ticked_s = 0.0
        self._held = False  # the log takes nothing just now
        self._short = False  # of space, at the last look
        self._jobs_done = 0
        self._trimmed_s = self.loop.time()
        self._stopping = False
        self._durable_position = store.log.durable_position  # that the core was told
        self._behind_ms = 0

    def now_ms(self) -> int:
        """What due times are compared with: this machine's clock, or brokers' that are behind."""
        return now_ms() - self._behind_ms

    def keep_behind(self, behind_ms: int) -> None:
        """All brokers' clocks are so much behind this machine's."""
        if behind_ms != self._behind_ms:
            self.scheduler.dispatcher.clock_set(self._behind_ms - behind_ms)
            self._behind_ms = behind_ms
            self._arm(0)

    def start(self) -> None:
        """Starts the writer and the firing loop."""
        self._writer.start()
        self.scheduler.on_sooner(self._sooner)
        self._arm(0)

    # -- firing -----------------------------------------------------------

    def _sooner(self, at_ms: int) -> None:
        """The core wants to be called at `at_ms`, which may be sooner than it said; 0: at once."""
        at_ms = max(at_ms - AHEAD_MS, 0)
        if at_ms < self._timer_ms and not self._held:
            self._arm(at_ms)

    def _arm(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = at_ms
        delay_s = (at_ms + self._behind_ms) / 1000 - time.time()
        if at_ms:
            delay_s = max(delay_s, self._ticked_s + TICK_SPACING_S - self.loop.time())
        if delay_s <= 0:
            self._timer_ms = 0
            self._timer = self.loop.call_soon(self._tick)
        else:
            self._timer = self.loop.call_later(min(delay_s, SLEEP_S_MAX), self._tick)

    def _tick(self) -> None:
        if self._stopping or self.failed.done():
            return
        self._ticked_s = self.loop.time()
        self._held = False
        now = self.now_ms() + AHEAD_MS
        try:
            self.scheduler.tick(now)
        except (LogFull, DiskFull):
            self._hold()
            return
        except Exception as error:
            self._fail(error)
            return
        next_ms = self.scheduler.next_tick_ms()
        self._arm(next_ms - AHEAD_MS if next_ms > now else 0)

    def _hold(self) -> None:
        """Ticks again after a while, or sooner, when the log made progress."""
        self._held = True
        self._timer_ms = NEVER
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(RETRY_S, self._tick)

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._arm(0)

    # -- events -----------------------------------------------------------

    async def ingest(
        self, source: SourceId, broker: str, frames: bytes, fetched_from: int
    ) -> Ingested:
        """Takes frames over that were fetched from an offset on.

        Waits while the log is full, or the disk nearly so.  Raises Corrupt, OffsetOutOfRange,
        Internal (the process is going to stop).
        """
        while True:
            if self._short_of_space():
                await asyncio.sleep(RETRY_S)
                continue
            try:
                ingested = self.scheduler.ingest(
                    source, broker, frames, self.now_ms(), fetched_from
                )
                break
            except (LogFull, DiskFull):
                await self._progress_or(RETRY_S)
            except (StorageError, InvariantError) as error:
                self._fail(error)
                raise Internal(f"frames of {broker} not taken over: {error}") from error
        if ingested.timers:
            self._arrived.set()
            self._arrived = asyncio.Event()
            if self.scheduler.memtable_full():
                self._work.set()
        return ingested

    def _short_of_space(self) -> bool:
        short = self.store.housekeeper.short_of_space()
        if short != self._short:
            self._short = short
            log.log(
                logging.ERROR if short else logging.WARNING,
                "less than %d bytes are free: nothing is taken over"
                if short
                else "%d bytes are free again: taking over",
                self.scheduler.limits.free_bytes_min,
            )
        return short

    def answered(self, batch: Batch, outcome: Outcome, store_ms: int) -> None:
        """A broker answered a batch."""
        now = self.now_ms()
        try:
            stored = self.scheduler.answered(batch, outcome, now)
        except (LogFull, DiskFull):
            stored = outcome is Outcome.STORED  # the acknowledgements are kept for later
        if stored:
            self.lateness.record(batch.due_ms, store_ms, now, batch.past_due)

    def connected(self, broker: str, stream: object) -> None:
        """A broker can be sent to by `stream`, and by no other stream any more."""
        if broker in self._streams:
            self.scheduler.dispatcher.disconnected(broker, self.now_ms())
        self._streams[broker] = stream
        self.scheduler.dispatcher.connected(broker)

    def disconnected(self, broker: str, stream: object) -> None:
        """The stream to a broker ended."""
        if self._streams.get(broker) is stream:
            del self._streams[broker]
            self.scheduler.dispatcher.disconnected(broker, self.now_ms())

    async def cancel(
        self, handles: Sequence[Cancelled], timeout_s: float
    ) -> list[str | DuemqError]:
        """Cancels; waits for timers to arrive that have not, and for the disk.

        Outcome NOT_YET: it did not arrive in time.
        """
        deadline = self.loop.time() + timeout_s
        outcomes, end = await self._cancels.decide(handles)
        while waiting := [at for at, outcome in enumerate(outcomes) if outcome == NOT_YET]:
            arrived = await self._arrival(handles, waiting, deadline)
            if not arrived:
                break
            decided = await self._cancels.decide([handles[at] for at in arrived])
            end = max(end, decided.end)
            for at, outcome in zip(arrived, decided.outcomes, strict=True):
                outcomes[at] = outcome
        await self.durable(end)
        return outcomes

    async def _arrival(
        self, handles: Sequence[Cancelled], waiting: Sequence[int], deadline: float
    ) -> list[int]:
        """Waits until some of the timers arrived; those.  Empty: none did until the deadline."""
        first: dict[SourceId, Cancelled] = {}
        for at in waiting:
            handle = handles[at]
            if handle.offset < first.setdefault(handle.source, handle).offset:
                first[handle.source] = handle
        scheduler = self.scheduler
        try:
            async with asyncio.timeout_at(deadline):
                while all(source_of(scheduler, handle) is None for handle in first.values()):
                    await self._arrived.wait()
        except TimeoutError:
            return []
        return [at for at in waiting if source_of(scheduler, handles[at]) is not None]

    async def durable(self, position: int) -> None:
        """Returns when the core knows that the log is durable up to here.  Raises Internal."""
        while self._durable_position < position:
            if self.failed.done():
                self.failed.result()
            await self._progress.wait()

    async def _progress_or(self, timeout_s: float) -> None:
        progress = self._progress
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await progress.wait()

    def overdue(self) -> int:
        """Timers that are due and not dispatched, wherever they lie."""
        return self.scheduler.overdue(self.now_ms())

    def sources(self) -> list[Source]:
        """Every source ever seen."""
        return self.scheduler.numbers.sources

    # -- threads ----------------------------------------------------------

    def _on_durable(self, position: int) -> None:
        self.loop.call_soon_threadsafe(self._advance, position)

    def _on_fatal(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self._fail, error)

    def _advance(self, position: int) -> None:
        self._durable_position = position
        for broker in self.scheduler.durable(position):
            self.on_sendable(broker)
        self._release()
        self._progress.set()
        self._progress = asyncio.Event()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            log.critical("the timer shard failed", exc_info=error)
            self.failed.set_exception(Internal(f"the timer shard failed: {error}"))
        self._progress.set()

    # -- housekeeping -----------------------------------------------------

    async def housekeeping(self) -> None:
        """Flushes, loads and saves, for ever.  Raises StorageError when the disk has failed."""
        keeper = self.store.housekeeper
        while True:
            self._work.clear()
            try:
                job = keeper.next_job(self.now_ms())
                if job is None:
                    self.scheduler.flush_acks()
            except (LogFull, DiskFull):
                await self._progress_or(RETRY_S)
                continue
            if job is None:
                await self._give_back_memory()
                now = self.now_ms()
                await self._work_or((keeper.next_look_ms(now) - now) / 1000)
                continue
            if isinstance(job, Save):
                await self.durable(job.position)
            await self._run(job.run)
            keeper.finish(job, self.now_ms())
            self._jobs_done += 1

    async def _work_or(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()

    async def _run(self, work: Callable[[], None]) -> None:
        """Runs a job, again and again while the disk is full: nothing is lost meanwhile."""
        tries = 0
        while True:
            try:
                await self.loop.run_in_executor(self._disk_thread, work)
                break
            except DiskFull as error:
                log.log(logging.DEBUG if tries else logging.ERROR, "%s; trying again", error)
                tries += 1
                await asyncio.sleep(RETRY_S)
        if tries:
            log.warning("there is space again, after %d tries", tries)

    async def _give_back_memory(self) -> None:
        """Returns freed memory to the operating system, a while after work was done."""
        if self._jobs_done and self.loop.time() - self._trimmed_s > TRIM_INTERVAL_S:
            self._trimmed_s = self.loop.time()
            self._jobs_done = 0
            await self.loop.run_in_executor(self._disk_thread, malloc.give_back)

    async def stop(self) -> None:
        """Syncs the log and saves a last checkpoint.  Housekeeping must have ended."""
        self._stopping = True
        healthy = not self.failed.done()
        await asyncio.to_thread(self._disk_thread.shutdown)  # a job may be running
        await self._cancels.stop()
        await asyncio.to_thread(self._writer.stop)
        if healthy and not self.store.log.disk_full:
            try:
                await asyncio.to_thread(self._last_save)
            except StorageError as error:
                log.error("no last checkpoint: %s", error)
        if not self.failed.done():
            self.failed.cancel()
        self.store.log.close()

    def _last_save(self) -> None:
        if not self.scheduler.flushing:
            save_now(self.store.log, self.store.housekeeper, self.now_ms())


def traced(batch: Batch, offset: int, store_ms: int, sent_ns: int) -> None:
    """Records the fire spans of a stored batch."""
    lane = batch.lane.id
    spans.record_fire(
        lane.topic,
        lane.broker,
        lane.queue_id,
        offset,
        batch.due_ms.tolist(),
        store_ms=store_ms,
        start_ns=sent_ns,
        end_ns=time.time_ns(),
        records=batch.records,
        sizes=np.frombuffer(batch.sizes, dtype="<u4").tolist(),
    )
