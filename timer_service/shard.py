"""The scheduler at work: log writer, firing loop and housekeeping around the core.

Owned by the event loop.  Threads: two `timerlog-writer` sync the log; `timer-disk` runs one job at
a time.  Both come back through `call_soon_threadsafe`.

The firing loop is one timer of the event loop, set to the next due millisecond; nothing polls.
Whatever may let more timers go (a frame came, an answer came, the log became durable) calls `wake`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from duemq import tracing
from duemq.errors import Internal, InvariantError
from storage.errors import DiskFull, LogFull, StorageError
from storage.writer import Commit, LogWriter
from timer_service import heap
from timer_service.entries import Cancelled, SourceId
from timer_service.jobs import Save
from timer_service.lane import Batch, Outcome
from timer_service.lateness import Lateness
from timer_service.numbering import Source
from timer_service.scheduler import NOT_YET, CancelOutcome, Ingested
from timer_service.store import Store, save_now

log = logging.getLogger(__name__)

# At most so many ticks: below it, each costs more (log entry, sync, gRPC) than its timers.
TICK_SPACING_S = 0.001
RETRY_S = 0.25  # after a full disk
# So long before they are due timers are dispatched, so that the sync of that is over in time.
# From then on a cancel answers FIRED.
AHEAD_MS = 3
# The longest sleep of the firing loop: how late it notices that the clock was set forward.
SLEEP_S_MAX = 1.0
TRIM_INTERVAL_S = 1.0


def now_ms() -> int:
    """Unix time; what due times are compared with."""
    return time.time_ns() // 1_000_000


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
        self._streams: dict[str, object] = {}
        self._progress = asyncio.Event()
        self._arrived = asyncio.Event()
        self._work = asyncio.Event()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_ms = 0
        self._ticked_s = 0.0
        self._jobs_done = 0
        self._trimmed_s = self.loop.time()
        self._stopping = False

    def start(self) -> None:
        """Starts the writer and the firing loop."""
        self._writer.start()
        self.wake()

    # -- firing -----------------------------------------------------------

    def wake(self) -> None:
        """Looks for due timers soon."""
        if self._timer_ms == 0 and self._timer is not None:
            return
        self._arm(0)

    def wake_for(self, due_ms: int | None) -> None:
        """As `wake`, if anything is due before the firing loop looks by itself."""
        if due_ms is not None and (self._timer is None or due_ms - AHEAD_MS < self._timer_ms):
            self._arm(due_ms - AHEAD_MS)

    def _arm(self, due_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = due_ms
        now_s = time.time()
        delay_s = due_ms / 1000 - now_s
        if due_ms:
            delay_s = max(delay_s, self._ticked_s + TICK_SPACING_S - now_s)
        if delay_s <= 0:
            self._timer_ms = 0
            self._timer = self.loop.call_soon(self._tick)
        else:
            self._timer = self.loop.call_later(min(delay_s, SLEEP_S_MAX), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_ms = 0
        self._ticked_s = time.time()
        now = now_ms() + AHEAD_MS
        if self._stopping or self.failed.done():
            return
        try:
            next_ms = self.scheduler.tick(now)
        except (LogFull, DiskFull):
            next_ms = now + int(RETRY_S * 1000)  # or sooner, when the log made progress
        except Exception as error:
            self._fail(error)
            return
        if next_ms is not None:
            self._arm(next_ms - AHEAD_MS if next_ms > now else 0)

    # -- events -----------------------------------------------------------

    async def ingest(
        self, source: SourceId, broker: str, frames: bytes, fetched_from: int
    ) -> Ingested:
        """Takes frames over that were fetched from an offset on; waits while the log is full.

        Raises Corrupt, OffsetOutOfRange, Internal (the process is going to stop).
        """
        while True:
            try:
                ingested = self.scheduler.ingest(source, broker, frames, now_ms(), fetched_from)
                break
            except (LogFull, DiskFull):
                await self._progress_or(RETRY_S)
            except (StorageError, InvariantError) as error:
                self._fail(error)
                raise Internal(f"frames of {broker} not taken over: {error}") from error
        if ingested.timers:
            self.wake_for(self.scheduler.near.wheel.next_due_ms())
            self._arrived.set()
            self._arrived = asyncio.Event()
            if self.scheduler.memtable_full():
                self._work.set()
        return ingested

    def answered(self, batch: Batch, outcome: Outcome, store_ms: int) -> None:
        """A broker answered a batch."""
        now = now_ms()
        try:
            stored = self.scheduler.answered(batch, outcome, now)
        except (LogFull, DiskFull):
            stored = outcome is Outcome.STORED  # the acknowledgements are kept for later
        if stored:
            self.lateness.record(store_ms - batch.due_ms, now)
        if self.scheduler.dispatcher.waiting:
            self.wake()

    def connected(self, broker: str, stream: object) -> None:
        """A broker can be sent to by `stream`, and by no other stream any more."""
        if broker in self._streams:
            self.scheduler.dispatcher.disconnected(broker, now_ms())
        self._streams[broker] = stream
        self.scheduler.dispatcher.connected(broker)
        self.wake()

    def disconnected(self, broker: str, stream: object) -> None:
        """The stream to a broker ended."""
        if self._streams.get(broker) is stream:
            del self._streams[broker]
            self.scheduler.dispatcher.disconnected(broker, now_ms())
            self.wake()

    async def cancel(self, handle: Cancelled, timeout_s: float, live: bool) -> CancelOutcome:
        """Cancels; waits for the timer to arrive, if it has not, and for the disk.

        `live`: a broker of the cluster owns the store, even if nothing has come from it yet.
        Outcome NOT_YET: it did not arrive in time.  Raises Overloaded.
        """
        outcome = await self._cancel(handle, self.loop.time() + timeout_s, live)
        await self.durable(outcome.end)
        return outcome

    async def _cancel(self, handle: Cancelled, deadline: float, live: bool) -> CancelOutcome:
        while True:
            arrived = self._arrived
            try:
                outcome = self.scheduler.cancel(handle, now_ms() + AHEAD_MS)
            except (LogFull, DiskFull):
                await self._progress_or(RETRY_S)
                continue
            if live and self.scheduler.numbers.source(handle.source) is None:
                outcome = CancelOutcome(NOT_YET)
            if outcome.outcome != NOT_YET or self.loop.time() >= deadline:
                return outcome
            try:
                async with asyncio.timeout_at(deadline):
                    await arrived.wait()
            except TimeoutError:
                continue

    async def durable(self, position: int) -> None:
        """Returns when the log is durable up to `position`.  Raises Internal."""
        while self.store.log.durable_position < position:
            progress = self._progress
            if self.failed.done():
                self.failed.result()
            if self.store.log.durable_position < position:
                await progress.wait()

    async def _progress_or(self, timeout_s: float) -> None:
        progress = self._progress
        try:
            async with asyncio.timeout(timeout_s):
                await progress.wait()
        except TimeoutError:
            return

    def sources(self) -> list[Source]:
        """Every source ever seen."""
        return self.scheduler.numbers.sources

    # -- threads ----------------------------------------------------------

    def _on_durable(self, position: int) -> None:
        self.loop.call_soon_threadsafe(self._advance, position)

    def _on_fatal(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self._fail, error)

    def _advance(self, position: int) -> None:
        for broker in self.scheduler.durable(position):
            self.on_sendable(broker)
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
            job = keeper.next_job(now_ms())
            if job is None:
                self._flush_acks()
                await self._give_back_memory()
                wait_s = (keeper.next_look_ms(now_ms()) - now_ms()) / 1000
                try:
                    async with asyncio.timeout(max(wait_s, 0.001)):
                        await self._work.wait()
                except TimeoutError:
                    pass
                continue
            if isinstance(job, Save):
                await self.durable(job.position)
            await self._run(job.run)
            keeper.finish(job, now_ms())
            self._jobs_done += 1
            self.wake_for(self.scheduler.near.wheel.next_due_ms())

    async def _run(self, work: Callable[[], None]) -> None:
        """Runs a job, again and again while the disk is full: nothing is lost meanwhile."""
        while True:
            try:
                await self.loop.run_in_executor(self._disk_thread, work)
                return
            except DiskFull as error:
                log.error("%s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _give_back_memory(self) -> None:
        """Returns freed memory to the operating system, a while after work was done."""
        if self._jobs_done and self.loop.time() - self._trimmed_s > TRIM_INTERVAL_S:
            self._trimmed_s = self.loop.time()
            self._jobs_done = 0
            await self.loop.run_in_executor(self._disk_thread, heap.give_back)

    def _flush_acks(self) -> None:
        try:
            self.scheduler.flush_acks()
        except (LogFull, DiskFull):
            return  # they are written with the next entry

    async def stop(self) -> None:
        """Syncs the log and saves a last checkpoint.  Housekeeping must have ended."""
        self._stopping = True
        healthy = not self.failed.done()
        await asyncio.to_thread(self._disk_thread.shutdown)  # a job may be running
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
            save_now(self.store.log, self.store.housekeeper, now_ms())


def traced(batch: Batch, offset: int, store_ms: int, sent_ns: int) -> None:
    """Records the fire spans of a stored batch."""
    lane = batch.lane.id
    tracing.record_fire(
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
