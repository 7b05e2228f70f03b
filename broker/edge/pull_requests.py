"""Pulls: answered at once, or parked until an append, a deadline or a cancel (pulls/parking.py).

Owned by: the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from duemq.errors import DuemqError, OffsetOutOfRange, PermissionDenied
from duemq.protocol import checks
from duemq.transport import status
from duemq.v1 import broker_pb2, message_pb2
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.edge.offset_requests import OffsetRequests
from duemq_server.broker.edge.pull_stream import ParkedPull, PullStream
from duemq_server.broker.edge.pulls.disk_reads import DiskReads, stopping
from duemq_server.broker.edge.pulls.fetching import Caller, FrameFetches
from duemq_server.broker.edge.pulls.parking import Parking
from duemq_server.broker.filtering.filters import Filter
from duemq_server.broker.filtering.sql_filter import Fields, SqlFilter
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.reading import filtered_read, pull_encoding, reader
from duemq_server.broker.reading.pull import Pull, QueueRead, parse
from duemq_server.broker.reading.pull_encoding import QueueAnswer
from duemq_server.broker.reading.reader import Records
from duemq_server.broker.slices import compiled
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.serving.permissions.access import ACCESS
from duemq_server.serving.permissions.rights import Action, Need
from duemq_server.serving.unsent import Unsent

# What filters look at before others have a turn, in reads as large as they may be.
SCANS_PER_TURN = 2


class PullRequests:
    """Answers Pull, PullStream and FetchFrames."""

    def __init__(
        self,
        store: Store,
        offsets: OffsetRequests,
        meters: Meters,
        now_ms: Callable[[], int],
        store_id: int,
        activity: Activity,
        unsent: Unsent,
    ) -> None:
        self._store = store
        self._unsent = unsent
        self._activity = activity
        self._offsets = offsets
        self._meters = meters
        self._now_ms = now_ms
        # What is appended from now on is in memory as this process checked and wrote it.
        self._trusted_from = store.log.end_position
        self._parking = Parking(now_ms)
        self._disk = DiskReads()
        self._fetches = FrameFetches(store, self._parking, self._disk, now_ms, store_id, unsent)
        self._turn = 0
        self._streams: set[PullStream] = set()
        store.on_visible = self._parking.appended

    def __len__(self) -> int:
        """Pulls that are parked now."""
        return len(self._parking.waiters)

    @property
    def parked_queues(self) -> int:
        """Queues that they wait for, each counted as often as a pull waits for it."""
        return self._parking.waiters.places

    def close(self) -> None:
        """Answers everybody who waits and ends the streams: the process is going to stop."""
        self._parking.close()
        for stream in self._streams:
            stream.end(stopping())
        self._disk.close()

    def _check_open(self) -> None:
        """Nothing is given any more after `close`, whoever came before.  Raises Unavailable."""
        if self._parking.closing:
            raise stopping()

    def wake(self, queues: Iterable[Queue]) -> None:
        """Something else than an append happened to them: those who wait for them look again."""
        self._parking.changed(queues)

    # -- Pull -------------------------------------------------------------------------------------

    async def pull(self, request: broker_pb2.PullRequest, caller: Caller) -> bytes:
        """The encoded PullResponse."""
        self._check_open()
        pull = parse(request, await compiled(request.queues))
        if pull.standing or request.credit_request_id:
            raise checks.wrong(
                "credit_records",
                request.credit_records,
                "0: only a pull of PullStream can stand",
            )
        head = await self.head(request)
        parked = ParkedPull(pull=pull, peer=caller.peer())
        answers = await self.answer(parked)
        caller.add_done_callback(lambda _: parked.give_place())
        return pull_encoding.encode(head.SerializeToString(), answers)

    async def head(self, request: broker_pb2.PullRequest) -> broker_pb2.PullResponse:
        """All but the records; makes the commits that ride along."""
        head = broker_pb2.PullResponse(request_id=request.request_id)
        if request.commits:
            head.commits.extend(await self._offsets.commit_beside(request.group, request.commits))
        return head

    async def answer(self, parked: ParkedPull) -> list[QueueAnswer]:
        """The next answer, as soon as there is something to say."""
        pull = parked.pull
        deadline_ms = self._now_ms() + pull.wait_ms
        while True:
            if looked_at := self._to_look_at(parked):
                await parked.take_place(self._unsent)
                try:
                    answers = await self._read(pull, looked_at)
                except BaseException:
                    parked.give_place()
                    raise
                if answers and parked.share is not None:
                    parked.share.resize(pull_encoding.size_of(answers))
                    return answers + self._beside(answers, pull.reads)
                parked.give_place()
            if parked.cancelled or self._parking.is_over(pull.wait_ms, deadline_ms):
                pull.ended = True
                return self._progress(pull.reads)
            if looked_at and (
                parked.knows != self._parking.changes or any(r.has_more for r in pull.reads)
            ):
                await asyncio.sleep(0)  # a filter leaves out much: let others have a turn
                continue
            if not pull.was_parked and (progress := self._progress(pull.reads)):
                # A filter left out all that was there: the group can commit that now.  What comes
                # later and is left out is told at the end of the wait, not append by append.
                pull.give(0, 0)
                return progress
            pull.was_parked = True
            await self._parking.park(parked, [read.key for read in pull.reads], deadline_ms)

    def _to_look_at(self, parked: ParkedPull) -> list[QueueRead]:
        """Most of a pull's queues are quiet: they are not looked up again at each append."""
        reads = parked.pull.reads
        if parked.knows == self._parking.changes:
            return [read for read in reads if read.has_more]
        parked.knows = self._parking.changes
        return reads

    async def _read(self, pull: Pull, reads: list[QueueRead]) -> list[QueueAnswer]:
        # Credit may be added while a thread reads.
        records_max, bytes_max = pull.records_next, pull.bytes_next
        records_left, bytes_left = records_max, bytes_max
        answers: list[QueueAnswer] = []
        scans = 0.0
        if not pull.turn:
            self._turn += 1
            pull.turn = self._turn
        first = pull.turn % len(reads)
        pull.turn += 1
        for read in reads[first:] + reads[:first]:
            if records_left <= 0 or bytes_left <= 0 or scans >= SCANS_PER_TURN:
                break
            try:
                queue = read.queue = self._queue_of(pull.group, read)
                if read.scanned == queue.max_offset:
                    continue
                self._check_open()
                records = await self._disk.read(
                    self._reader(queue, read, records_left, bytes_left, at_least_one=not answers),
                    queue,
                    read.scanned,
                )
                self._check_open()  # a thread may have read
            except DuemqError as error:
                answers.append(self._failed(read, error))
                pull.ended = True
                continue
            scans += _scans(read.wanted, records.next_offset - read.scanned)
            read.scanned = records.next_offset
            if not records.records:
                continue
            if pull.group:  # what a filter leaves out is not handed out
                key = GroupQueue(pull.group, read.topic, read.queue_id)
                self._activity.pulled(key, read.scanned)
            read.offset = records.next_offset
            records_left -= records.records
            bytes_left -= records.size
            self._meters.pulled(records.records, records.size)
            answers.append(
                QueueAnswer(
                    read.topic,
                    read.queue_id,
                    records.slices,
                    records.size,
                    records.runs,
                    records.next_offset,
                    queue.min_offset,
                    queue.max_offset,
                    untraced=records.untraced,
                )
            )
        if answers:
            pull.give(records_max - records_left, bytes_max - bytes_left)
        return answers

    def _reader(
        self,
        queue: Queue,
        read: QueueRead,
        records_max: int,
        bytes_max: int,
        *,
        at_least_one: bool,
    ) -> Callable[..., Records]:
        """What reads on where the pull has come to; takes `nowait`."""
        place = (self._store.log, queue, read.scanned, records_max, bytes_max)
        if isinstance(read.wanted, SqlFilter):
            return partial(
                filtered_read.read_matching,
                *place,
                read.wanted,
                _fields_of,
                at_least_one=at_least_one,
            )
        return partial(
            reader.read_records,
            *place,
            read.wanted,
            at_least_one=at_least_one,
            trusted_from=self._trusted_from,
        )

    def _queue_of(self, group: str, read: QueueRead) -> Queue:
        if (access := ACCESS.get()) is not None:
            access.check((Need(Action.RECEIVE, read.topic), *_of_group(group)))
        queue = self._store.queue(read.topic, read.queue_id, read.topic_id)
        if group and read.generation:
            self._store.offsets.check_fence(
                GroupQueue(group, read.topic, read.queue_id), read.generation
            )
        reader.check_offset(queue, read.scanned)
        return queue

    def _failed(self, read: QueueRead, error: DuemqError) -> QueueAnswer:
        low = high = 0
        if not isinstance(error, PermissionDenied):
            with suppress(DuemqError):
                queue = self._store.queue(read.topic, read.queue_id)
                low, high = queue.min_offset, queue.max_offset
        encoded = status.to_proto(error).SerializeToString()
        return QueueAnswer(
            read.topic,
            read.queue_id,
            next_offset=read.offset if isinstance(error, OffsetOutOfRange) else read.scanned,
            min_offset=low,
            max_offset=high,
            error=encoded,
        )

    def _beside(self, answers: list[QueueAnswer], reads: list[QueueRead]) -> list[QueueAnswer]:
        """The progress of the other queues: what a filter left out is not looked at again."""
        filtered = [read for read in reads if read.wanted is not None]
        if not filtered:
            return []
        answered = {(answer.topic, answer.queue_id) for answer in answers}
        return self._progress([read for read in filtered if read.key not in answered])

    def _progress(self, reads: list[QueueRead]) -> list[QueueAnswer]:
        """Of the queues where a filter left everything out: how far the pull has come."""
        answers = []
        for read in reads:
            if read.scanned > read.offset:
                read.offset = read.scanned
                with suppress(DuemqError):  # the topic was deleted meanwhile
                    queue = self._store.queue(read.topic, read.queue_id)
                    answers.append(
                        QueueAnswer(
                            read.topic,
                            read.queue_id,
                            next_offset=read.scanned,
                            min_offset=queue.min_offset,
                            max_offset=queue.max_offset,
                        )
                    )
        return answers

    # -- PullStream -------------------------------------------------------------------------------

    async def stream(
        self,
        requests: AsyncIterator[broker_pb2.PullRequest],
        write: Callable[[bytes], Awaitable[None]],
        peer: str = "",
    ) -> None:
        """Answers each request when it has something, in whatever order that is."""
        self._check_open()
        stream = PullStream(self, write, peer)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)

    def cancel(self, parked: ParkedPull) -> None:
        """Has a pull answered with what there is."""
        parked.cancelled = True
        self._parking.cancel(parked)

    def is_parked(self, parked: ParkedPull) -> bool:
        """Whether a pull waits for something to answer."""
        return parked in self._parking.waiters

    # -- FetchFrames ------------------------------------------------------------------------------

    async def fetch(self, request: broker_pb2.FetchFramesRequest, caller: Caller) -> bytes:
        """Whole frames of one queue: the encoded FetchFramesResponse."""
        return await self._fetches.fetch(request, caller)


def _of_group(group: str) -> tuple[Need, ...]:
    return (Need(Action.JOIN, group),) if group else ()


def _scans(wanted: Filter, records: int) -> float:
    """Which part of a largest read a filter has looked at."""
    if wanted is None:
        return 0.0
    if isinstance(wanted, SqlFilter):
        return records / filtered_read.records_per_read(wanted)
    return records / reader.SCAN_ENTRIES_MAX


def _fields_of(record: bytes) -> Fields | None:
    """What SQL filters see of a stored record; None: it is none, and matches nothing."""
    try:
        return message_pb2.Record.FromString(record)
    except DecodeError:
        return None
