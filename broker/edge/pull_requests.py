"""Pulls: answered at once, or parked until an append, a deadline or a cancel.

Owned by: the event loop.  No pull polls: Store.on_visible wakes exactly those who wait for the
queue, and one timer stands for the nearest of all deadlines.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from google.protobuf.message import DecodeError

from duemq.errors import (
    Corrupt,
    DuemqError,
    OffsetOutOfRange,
    Unavailable,
)
from duemq.protocol import checks
from duemq.protocol.limits import PULL_BYTES_MAX, PULL_WAIT_MS_MAX
from duemq.transport import status
from duemq.v1 import broker_pb2, message_pb2
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.edge.offset_requests import OffsetRequests
from duemq_server.broker.edge.pull_stream import Parked, ParkedPull, PullStream
from duemq_server.broker.filtering.filters import Filter
from duemq_server.broker.filtering.sql_filter import Fields, SqlFilter
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.reading import filtered_read, pull_encoding, reader
from duemq_server.broker.reading.pull import Pull, QueueRead, parse
from duemq_server.broker.reading.pull_encoding import QueueAnswer
from duemq_server.broker.reading.reader import Frames, Records
from duemq_server.broker.reading.waiters import QueueKey, Waiters
from duemq_server.broker.slices import compiled
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.serving.unsent import BudgetShare, Unsent
from duemq_server.storage.errors import StorageError

log = logging.getLogger(__name__)

FRAMES_BYTES_DEFAULT = 4 << 20
READER_THREADS = 4
# What filters look at before others have a turn, in reads as large as they may be.
SCANS_PER_TURN = 2
LINGER_MS_MAX = 1_000

T = TypeVar("T")


class Caller(Protocol):
    """Of one call: gRPC's context."""

    def peer(self) -> str:
        """Its connection."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        """To be called when the answer is gone, or the client."""


class _Lingering(NamedTuple):
    """A fetch that waits for more, from an offset on."""

    offset: int
    parked: Parked


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
        self._store_id = store_id
        # What is appended from now on is in memory as this process checked and wrote it.
        self._trusted_from = store.log.end_position
        self._waiters: Waiters[Parked] = Waiters()
        self._lingering: dict[QueueKey, list[_Lingering]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._turn = 0
        self._changes = 0  # of queues, other than appends: see `wake`
        self._closing = False
        self._streams: set[PullStream] = set()
        self._threads = ThreadPoolExecutor(READER_THREADS, "disk-reader")
        store.on_visible = self._wake

    def __len__(self) -> int:
        """Pulls that are parked now."""
        return len(self._waiters)

    @property
    def parked_queues(self) -> int:
        """Queues that they wait for, each counted as often as a pull waits for it."""
        return self._waiters.places

    def close(self) -> None:
        """Answers everybody who waits and ends the streams: the process is going to stop."""
        self._closing = True
        for parked in self._waiters.expire(1 << 62):
            _resolve(parked)
        for stream in self._streams:
            stream.end(_stopping())
        self._threads.shutdown(wait=False)

    # -- Pull -------------------------------------------------------------------------------------

    async def pull(self, request: broker_pb2.PullRequest, caller: Caller) -> bytes:
        """The encoded PullResponse."""
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
            head.commits.extend(await self._offsets.commit(request.group, request.commits))
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
            if parked.cancelled or self._is_over(pull.wait_ms, deadline_ms):
                pull.ended = True
                return self._progress(pull.reads)
            if looked_at and (parked.knows != self._changes or any(r.has_more for r in pull.reads)):
                await asyncio.sleep(0)  # a filter leaves out much: let others have a turn
                continue
            if not pull.was_parked and (progress := self._progress(pull.reads)):
                # A filter left out all that was there: the group can commit that now.  What comes
                # later and is left out is told at the end of the wait, not append by append.
                pull.give(0, 0)
                return progress
            pull.was_parked = True
            await self._park(parked, [read.key for read in pull.reads], deadline_ms)

    def _to_look_at(self, parked: ParkedPull) -> list[QueueRead]:
        """Most of a pull's queues are quiet: they are not looked up again at each append."""
        reads = parked.pull.reads
        if parked.knows == self._changes:
            return [read for read in reads if read.has_more]
        parked.knows = self._changes
        return reads

    def _is_over(self, wait_ms: int, deadline_ms: int) -> bool:
        return self._closing or not wait_ms or self._now_ms() >= deadline_ms

    async def _read(self, pull: Pull, reads: list[QueueRead]) -> list[QueueAnswer]:
        records_left, bytes_left = pull.records_next, pull.bytes_next
        answers: list[QueueAnswer] = []
        scans = 0.0
        self._turn += 1
        first = self._turn % len(reads)
        for read in reads[first:] + reads[:first]:
            if records_left <= 0 or bytes_left <= 0 or scans >= SCANS_PER_TURN:
                break
            try:
                queue = read.queue = self._queue_of(pull.group, read)
                if read.scanned == queue.max_offset:
                    continue
                records = await self._from_disk(
                    self._reader(queue, read, records_left, bytes_left, at_least_one=not answers)
                )
            except DuemqError as error:
                answers.append(self._failed(read, error))
                pull.ended = True
                continue
            scans += _scans(read.wanted, records.next_offset - read.scanned)
            read.scanned = records.next_offset
            if pull.group:
                key = GroupQueue(pull.group, read.topic, read.queue_id)
                self._activity.pulled(key, read.scanned)
            if not records.records:
                continue
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
            pull.give(pull.records_next - records_left, pull.bytes_next - bytes_left)
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
        queue = self._store.queue(read.topic, read.queue_id, read.topic_id)
        if group and read.generation:
            self._store.offsets.check_fence(
                GroupQueue(group, read.topic, read.queue_id), read.generation
            )
        reader.check_offset(queue, read.scanned)
        return queue

    def _failed(self, read: QueueRead, error: DuemqError) -> QueueAnswer:
        low = high = 0
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

    async def _from_disk(self, read: Callable[..., T]) -> T:
        """Reads inline what is in memory, in a thread what is not."""
        try:
            try:
                return read(nowait=True)
            except BlockingIOError:
                if self._closing:  # the threads take nothing more
                    raise _stopping() from None
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, read)
        except (IndexError, FileNotFoundError) as error:  # retention was faster
            raise OffsetOutOfRange(f"offset: just removed ({error})", field="offset") from error
        except (StorageError, OSError) as error:
            log.error("a read failed: %s", error)
            raise Corrupt(f"{type(error).__name__}: {error}") from error

    # -- PullStream -------------------------------------------------------------------------------

    async def stream(
        self,
        requests: AsyncIterator[broker_pb2.PullRequest],
        write: Callable[[bytes], Awaitable[None]],
        peer: str = "",
    ) -> None:
        """Answers each request when it has something, in whatever order that is."""
        stream = PullStream(self, write, peer)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)

    def cancel(self, parked: ParkedPull) -> None:
        """Has a pull answered with what there is."""
        parked.cancelled = True
        self._waiters.cancel(parked)
        _resolve(parked)

    def is_parked(self, parked: ParkedPull) -> bool:
        """Whether a pull waits for something to answer."""
        return parked in self._waiters

    # -- FetchFrames ------------------------------------------------------------------------------

    async def fetch(self, request: broker_pb2.FetchFramesRequest, caller: Caller) -> bytes:
        """Whole frames of one queue: the encoded FetchFramesResponse."""
        checks.between("wait_ms", request.wait_ms, 0, PULL_WAIT_MS_MAX)
        checks.between("max_bytes", request.max_bytes, 0, PULL_BYTES_MAX)
        checks.between("linger_ms", request.linger_ms, 0, LINGER_MS_MAX)
        deadline_ms = self._now_ms() + request.wait_ms
        bytes_max = request.max_bytes or FRAMES_BYTES_DEFAULT
        parked = Parked(peer=caller.peer())
        if request.linger_ms:
            await self._linger(parked, request)
        while True:
            queue = self._store.queue(request.topic, request.queue_id)
            frames, share = await self._frames(queue, request.offset, bytes_max, parked.peer)
            if frames.slices or self._is_over(request.wait_ms, deadline_ms):
                break
            if queue.max_offset > frames.next_offset:
                continue  # appended while a thread was reading
            await self._park(parked, [queue.key], deadline_ms)
        caller.add_done_callback(lambda _: share.give_back())
        return broker_pb2.FetchFramesResponse(
            store_id=self._store_id,
            frames=b"".join(frames.slices),
            next_offset=frames.next_offset,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
        ).SerializeToString()

    async def _linger(self, parked: Parked, request: broker_pb2.FetchFramesRequest) -> None:
        """Waits while more may come for the same answer, but not where it would be late."""
        queue = self._store.queue(request.topic, request.queue_id)
        deadline_ms = self._now_ms() + request.linger_ms
        mine = _Lingering(request.offset, parked)
        self._lingering.setdefault(queue.key, []).append(mine)
        try:
            while queue.at_once_end <= request.offset and not self._is_over(1, deadline_ms):
                await self._park(parked, (), deadline_ms)
        finally:
            self._lingering[queue.key].remove(mine)
            if not self._lingering[queue.key]:
                del self._lingering[queue.key]

    async def _frames(
        self, queue: Queue, offset: int, bytes_max: int, peer: str
    ) -> tuple[Frames, BudgetShare]:
        """Frames and the share that they have of the unread answers; none: it is given back."""
        share = await self._unsent.take(peer, bytes_max)
        try:
            frames = await self._from_disk(
                partial(reader.read_frames, self._store.log, queue, offset, bytes_max)
            )
        except BaseException:
            share.give_back()
            raise
        if frames.slices:
            share.resize(sum(map(len, frames.slices)))
        else:
            share.give_back()
        return frames, share

    # -- parking ----------------------------------------------------------------------------------

    async def _park(self, parked: Parked, keys: Iterable[QueueKey], deadline_ms: int) -> None:
        parked.woken = asyncio.get_running_loop().create_future()
        self._waiters.park(parked, keys, deadline_ms, parked.peer)
        self._set_timer()
        try:
            await parked.woken
        finally:
            self._waiters.cancel(parked)

    def _wake(self, queue: Queue) -> None:
        for parked in self._waiters.wake(queue.key):
            _resolve(parked)
        for each in self._lingering.get(queue.key, ()):
            if queue.at_once_end > each.offset:
                _resolve(each.parked)

    def wake(self, queues: Iterable[Queue]) -> None:
        """Something else than an append happened to them: those who wait for them look again."""
        self._changes += 1
        for queue in queues:
            self._wake(queue)

    def _set_timer(self) -> None:
        next_ms = self._waiters.next_ms()
        if next_ms is None or (self._timer is not None and self._timer_ms <= next_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = next_ms
        delay_s = max(0, next_ms - self._now_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for parked in self._waiters.expire(self._now_ms()):
            parked.knows = -1
            _resolve(parked)
        self._set_timer()


def _stopping() -> Unavailable:
    return Unavailable("the broker is stopping")


def _resolve(parked: Parked) -> None:
    if parked.woken is not None and not parked.woken.done():
        parked.woken.set_result(None)


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
