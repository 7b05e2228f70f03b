"""One shard at work: the core, the loops around it, and what the faces ask of them.

Owned by the event loop.  Threads: two `timerlog-writer` sync the log; `timer-disk` runs one job at
a time, `timer-look-up` and `timer-key-look-up` one look-up each (cancels.py, keyed_requests.py),
`timer-bulk` reads blocks for jobs (bulk_loop.py).
All come back through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from duemq.errors import (
    DuemqError,
    Internal,
    InvalidArgument,
    InvariantError,
    Overloaded,
    Unavailable,
)
from duemq_server.storage.errors import DiskFull, LogFull, StorageError
from duemq_server.storage.writer import Commit
from duemq_server.timer_service.bulk_loop import BulkLoop
from duemq_server.timer_service.cancels import Cancels
from duemq_server.timer_service.disk.data_directory import DataDirectory, save_now
from duemq_server.timer_service.disk_jobs import DiskJobs, Space
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.firing import RETRY_S, Firing
from duemq_server.timer_service.inspecting import Inspector
from duemq_server.timer_service.keyed_requests import KeyedRequests
from duemq_server.timer_service.log_loop import LogLoop, Replicas
from duemq_server.timer_service.resuming import Resuming
from duemq_server.timer_service.schedule_loop import ScheduleLoop
from duemq_server.timer_service.scheduling.cancelling import NOT_YET
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireOutcome
from duemq_server.timer_service.scheduling.keyed.changes import (
    CancellingKeys,
    KeyedChange,
    Rescheduling,
    Scheduling,
)
from duemq_server.timer_service.scheduling.lateness import Lateness
from duemq_server.timer_service.scheduling.scheduler import Ingested, Scheduler
from duemq_server.timer_service.scheduling.topic_lateness import TopicLateness
from duemq_server.timer_service.timers.keyed import (
    EXISTS,
    FIRED,
    REPLACED,
    RESCHEDULED,
    SCHEDULED,
    UNKNOWN,
    Handle,
    KeyedRecords,
    RescheduleResult,
    ScheduleResult,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import CANCELLED, NO_REQUEST, RequestKey
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

log = logging.getLogger(__name__)
T = TypeVar("T")

KEYS_AT_ONCE = 250  # of a list to be cancelled: some 3 ms of work


class Shard:
    """One shard's timers, alive."""

    def __init__(
        self,
        directory: DataDirectory,
        on_commit: Callable[[Commit], None] | None = None,
        replicas: Replicas | None = None,
        number: int = 0,
        formers: Iterable[int] = (),
    ) -> None:
        """`number`: this shard's, of those of the cluster; `formers`: its ids before losses."""
        self.directory = directory
        self.scheduler = directory.scheduler
        self.scheduler.keyed.source = SourceId(directory.producer_id, number)
        self.scheduler.keyed.formers = frozenset(SourceId(each, number) for each in formers)
        self._space = Space(directory.housekeeper, self.scheduler.limits.free_bytes_min)
        self.lateness = Lateness()
        self.topic_lateness = TopicLateness()
        self.log_loop = LogLoop(directory.log, self.scheduler, on_commit, replicas)
        self.firing = Firing(self.scheduler, self.log_loop)
        self.disk_jobs = DiskJobs(directory, self.log_loop, self.firing.now_ms)
        room = partial(self.log_loop.progress_or, RETRY_S)
        self._cancels = Cancels(self.scheduler, self.firing.ahead_ms, room)
        self.inspector = Inspector(self.scheduler, self.log_loop, self.firing.now_ms)
        self.resuming = Resuming(
            self.scheduler, self.inspector, self.log_loop, self.firing.now_ms, room
        )
        self._keyed = KeyedRequests(self.scheduler, self.firing.now_ms, room)
        self.bulk = BulkLoop(
            self.scheduler,
            self.firing.now_ms,
            self.log_loop,
            self.disk_jobs.wake,
            self._space.is_short,
        )
        self._streams: dict[str, object] = {}
        self.schedule_loop = ScheduleLoop(
            self.scheduler, self.firing, self.log_loop, self._space.is_short
        )

    async def ingest(
        self, source: SourceId, broker: str, frames: bytes, fetched_from: int, begin: int = 0
    ) -> Ingested:
        """Takes frames over that were fetched from an offset on.

        What lies before `begin` is another shard's.  Waits while the log is full, or the disk
        nearly so.  Raises Corrupt, OffsetOutOfRange, Internal (the process is going to stop).
        """
        while True:
            if self._space.is_short():
                await asyncio.sleep(RETRY_S)
                continue
            try:
                ingested = self.scheduler.ingest(
                    source, broker, frames, self.firing.now_ms(), fetched_from, begin
                )
                break
            except (LogFull, DiskFull):
                await self.log_loop.progress_or(RETRY_S)
            except Exception as error:
                if isinstance(error, DuemqError) and not isinstance(error, InvariantError):
                    raise
                # Nobody would fetch any more; and the log may have what memory has not.
                self.log_loop.fail(error)
                raise Internal(f"frames of {broker} not taken over: {error}") from error
        if ingested.timers:
            self._cancels.arrived()
            self._memory_grew()
        return ingested

    def _memory_grew(self) -> None:
        if self.scheduler.tiers.memtable_full():
            self.disk_jobs.wake()

    def answered(
        self,
        batch: FireBatch,
        outcome: FireOutcome,
        store_ms: int,
        reason: str = "",
        sent_by_ms: int | None = None,
    ) -> None:
        """A broker answered a batch, and why it refused it.

        `sent_by_ms`: the clock by which it will be sent again, if that is another one.
        """
        now = self.firing.now_ms()
        again = now if sent_by_ms is None else sent_by_ms
        try:
            stored = self.scheduler.answered(batch, outcome, again, reason)
        except (LogFull, DiskFull):
            stored = outcome is FireOutcome.STORED  # the acknowledgements are kept for later
        if stored:
            self.lateness.record(batch.due_ms, store_ms, now, batch.past_due)
            topic = batch.lane.id.topic
            self.topic_lateness.record(topic, batch.due_ms, now, batch.past_due)

    def connected(self, broker: str, stream: object) -> None:
        """A broker can be sent to by `stream`, and by no other stream any more."""
        if broker in self._streams:
            self.scheduler.dispatcher.disconnected(broker, self.firing.now_ms())
        self._streams[broker] = stream
        self.scheduler.dispatcher.connected(broker)

    def disconnected(self, broker: str, stream: object) -> None:
        """The stream to a broker ended."""
        if self._streams.get(broker) is stream:
            del self._streams[broker]
            self.scheduler.dispatcher.disconnected(broker, self.firing.now_ms())

    async def cancel(
        self, handles: Sequence[Cancelled], timeout_s: float
    ) -> list[str | DuemqError]:
        """Cancels; waits for timers to arrive that have not, and for the disk.

        Outcome NOT_YET: it did not arrive in time.
        """
        outcomes, end = await self._cancels.cancel(handles, timeout_s)
        await self.log_loop.durable(end)
        return outcomes

    async def schedule(
        self, request_id: bytes, records: KeyedRecords, *, if_absent: bool = False
    ) -> list[ScheduleResult]:
        """Keeps records under their keys, all or none; durable when answered.

        What waits under a key is replaced, or stays (`if_absent`).  A request id (16 bytes) that
        comes again within 2 minutes is answered as the first one.  The caller has checked what it
        passes: keys, topic, limits.  Raises Overloaded, ReadOnly (short of space),
        Unavailable (not the leader any more), Corrupt, InvalidArgument (the id of another kind of
        request), Internal.
        """
        request = RequestKey(request_id)
        change = Scheduling(self.scheduler, request, records, if_absent=if_absent)
        decided = await self._decide(change, {SCHEDULED, REPLACED, EXISTS})
        return [ScheduleResult(outcome, *handles) for outcome, handles in decided.results]

    async def reschedule(
        self,
        request_id: bytes,
        timers: Sequence[Handle | TimerKey],
        due_ms: Sequence[int],
        *,
        fire: bool = False,
        elsewhere: Collection[Handle | TimerKey] = (),
        not_yet: Collection[Handle | TimerKey] = (),
    ) -> list[RescheduleResult]:
        """Gives timers other due times, one a timer; each gets a new handle.

        `fire`: these are now, and the old handles are from then on those of timers that fired.
        `elsewhere`: other shards have these; UNKNOWN here.  `not_yet`: these count as not arrived.

        Waits for none to arrive: an error Unavailable says that it has not, also when the request
        comes again.  Raises as `schedule`, and InvalidArgument for a timer that is named twice,
        TooLarge for bodies that are too large together.
        """
        request = RequestKey(request_id)
        asked = self.scheduler, request, timers, due_ms
        change = Rescheduling(*asked, fire=fire, elsewhere=elsewhere, not_yet=not_yet)
        decided = await self._decide(change, {RESCHEDULED, FIRED, UNKNOWN, NOT_YET})
        return [
            RescheduleResult("", error=_not_arrived(timer))
            if outcome == NOT_YET
            else RescheduleResult(outcome, next(iter(handles), None))
            for timer, (outcome, handles) in zip(timers, decided.results, strict=True)
        ]

    async def cancel_keys(
        self, request_id: bytes, keys: Sequence[TimerKey]
    ) -> list[str | DuemqError]:
        """Cancels what waits under keys: CANCELLED, FIRED, UNKNOWN or an error of each.

        Without a `request_id` (empty) a request that comes again cancels again.  Raises
        Unavailable, InvalidArgument, Internal.
        """
        parts = [keys[at : at + KEYS_AT_ONCE] for at in range(0, len(keys), KEYS_AT_ONCE)]
        asked = [
            self._cancel_part(RequestKey(request_id or NO_REQUEST, number), part)
            for number, part in enumerate(parts)
        ]
        return [outcome for part in await asyncio.gather(*asked) for outcome in part]

    async def _cancel_part(
        self, request: RequestKey, keys: Sequence[TimerKey]
    ) -> list[str | DuemqError]:
        change = CancellingKeys(self.scheduler, request, keys)
        try:
            decided = await self._decide(change, {CANCELLED, FIRED, UNKNOWN})
        except Overloaded as error:
            return [error] * len(keys)
        results = enumerate(decided.results)
        return [decided.errors.get(at) or outcome for at, (outcome, _) in results]

    async def _decide(self, change: KeyedChange, outcomes: set[str]) -> KeyedChange:
        """Durably; by a request that came before if it has the same id."""
        makes_room = isinstance(change, CancellingKeys)
        if not makes_room and not self.scheduler.keyed.requests.find(change.request):
            self._space.check()
        try:
            decided = await self._keyed.decide(change)
        except (StorageError, InvariantError) as error:
            self.log_loop.fail(error)
            raise Internal(f"timers under keys: {error}") from error
        if (
            len(decided.results) != change.size
            or {each.outcome for each in decided.results} - outcomes
        ):
            raise InvalidArgument(
                "another request had this id: each needs one of its own", field="request_id"
            )
        self._memory_grew()
        await self.log_loop.durable(decided.end)
        return decided

    async def change(
        self,
        change: Callable[[Scheduler, int], T],
        *,
        makes_room: bool = False,
    ) -> T:
        """One of the decisions of a changes.py of scheduling/; durable when answered.

        That is scheduling/schedules/ and scheduling/holding/.

        Waits while the log is full.  Raises what the decision does, ReadOnly (short of space)
        unless it makes room, Unavailable (not the leader any more), Internal.
        """
        while True:
            if not makes_room:
                self._space.check()
            try:
                outcome = change(self.scheduler, self.firing.now_ms())
                break
            except (LogFull, DiskFull):
                await self.log_loop.progress_or(RETRY_S)
            except (StorageError, InvariantError) as error:
                self.log_loop.fail(error)
                raise Internal(f"schedules and holds: {error}") from error
        self._memory_grew()
        await self.settled()
        return outcome

    async def settled(self) -> None:
        """Returns when all that was decided by now is durable: what is told of it stays true."""
        await self.log_loop.durable(self.scheduler.log.end_position)

    def now_ms(self) -> int:
        """The clock that due times are compared with, Unix ms."""
        return self.firing.now_ms()

    def topic_queues(self, topic: str) -> Mapping[str, int] | None:
        """Writable queues of a topic by broker; None: no routes are known yet."""
        return self.scheduler.dispatcher.queues(topic)

    def overdue(self) -> int:
        """Timers that are due and not dispatched, wherever they lie; also for other threads."""
        return self.scheduler.tiers.overdue(self.firing.corrected_ms())

    def sources(self) -> list[Source]:
        """Every source ever seen."""
        return self.scheduler.numbers.sources

    def quiesce(self) -> None:
        """With replicas: fires nothing more and appends nothing; what was is committed yet."""
        self._halt()
        self.log_loop.close()

    def resign(self) -> None:
        """As `quiesce`; and who waits until more is committed waits no longer."""
        self._halt()
        self.log_loop.resign(Unavailable("this replica does not lead any more", field="leader"))

    def _halt(self) -> None:
        self.firing.stop()
        self.schedule_loop.stop()
        self.bulk.halt()
        self.resuming.halt()

    async def stop(self) -> None:
        """Syncs the log and saves a last checkpoint.  The task of `disk_jobs` must have ended.

        With replicas, after `resign`, it saves none: not all may be committed.
        """
        self._halt()
        failed = self.log_loop.failed
        healthy = not failed.done()
        self.log_loop.end_waits()
        await self.disk_jobs.close()
        await self._cancels.stop()
        await self.resuming.stop()
        await self.inspector.stop()
        await self._keyed.stop()
        await self.bulk.stop()
        await self.log_loop.stop()
        if healthy and not self.log_loop.replicated and not self.directory.log.disk_full:
            try:
                await asyncio.to_thread(self._last_save, self.firing.now_ms())
            except StorageError as error:
                log.error("no last checkpoint: %s", error)
        if not failed.done():
            failed.cancel()
        self.directory.log.close()

    def _last_save(self, now_ms: int) -> None:
        if not self.scheduler.tiers.flushing:
            save_now(self.directory.log, self.directory.housekeeper, now_ms)


def _not_arrived(timer: Handle | TimerKey) -> Unavailable:
    assert not isinstance(timer, TimerKey)
    what = f"offset {timer.offset} of %TIMER%/{timer.source.queue_id}"
    return Unavailable(f"{what} has not arrived here yet", field="timers", value=timer.offset)
