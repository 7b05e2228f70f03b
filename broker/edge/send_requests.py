"""Sends: from the request to the answer after the disk has it; one path for Send and SendStream."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from duemq.errors import DuemqError, InvalidArgument, NotReady, Overloaded, Unavailable
from duemq.protocol import checks
from duemq.protocol.limits import BATCHES_MAX, FIRE_AHEAD_MS_MAX, SERVICE_IDS_FROM
from duemq.transport import status
from duemq.v1 import message_pb2, view_pb2
from duemq_server.broker.due_gate import HOLD_MS_MAX, DueGate
from duemq_server.broker.edge.commits import PENDING_BYTES_HIGH, ROOM_TIMEOUT_S, Commits, Waiting
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.reading.repeats import due_of
from duemq_server.broker.records import batch as batches
from duemq_server.broker.records.batch import BatchLimits, Columns, IncomingBatch
from duemq_server.broker.store.store import Accepted, Store
from duemq_server.serving.permissions.access import ACCESS
from duemq_server.serving.permissions.rights import Action, Need
from duemq_server.serving.tracing import spans

# Requests of one stream that wait for the disk; more of them wait in the connection's buffers.
STREAM_IN_FLIGHT_MAX = 256
# More than this is walked through in a thread: it takes about 2 ms a KiB at the worst.
WALK_INLINE_BYTES = 16 << 10
_OF_SERVICES = (Need(Action.SERVE),)

BatchOutcome = Accepted | DuemqError
Checked = dict[int, Columns | DuemqError]
"""By the batch's place in its request."""


class _InFlight(NamedTuple):
    request_id: int
    settled: int
    outcomes: list[BatchOutcome]
    began: float


class SendRequests:
    """Takes requests to the store and answers when they are durable."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        meters: Meters,
        now_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        *,
        broker: str,
        store_id: int,
        traced: bool = False,
    ) -> None:
        self._store = store
        self._commits = commits
        self._meters = meters
        self._now_ms = now_ms
        self._gate = DueGate(store, now_ms, steady_ms)
        self._broker = broker
        self._store_id = store_id
        self._traced = traced
        self._closing = False
        self._streams: set[asyncio.Task[Any]] = set()

    async def send(self, request: view_pb2.SendRequestView) -> view_pb2.SendResponseView:
        """Answers one request.  Raises its first batch's error if no batch was accepted."""
        refusal = None
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                await self._room()
        except TimeoutError:
            refusal = Overloaded(f"the disk is behind by more than {ROOM_TIMEOUT_S} s")
        in_flight = await self._accept(request, refusal)
        error = _first_error(in_flight.outcomes)
        if error is not None:
            raise error
        await self._commits.wait(in_flight.settled)
        return await self._answer(in_flight)

    async def stream(
        self,
        requests: AsyncIterator[view_pb2.SendRequestView],
        write: Callable[[view_pb2.SendResponseView], Awaitable[None]],
    ) -> None:
        """Answers the requests in their order; errors of batches travel in the answers."""
        stream = _Stream(self, write)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        writer = asyncio.create_task(stream.write_answers(), name="send stream")
        # A client that waits for its answers sends nothing that would show the failure.
        writer.add_done_callback(lambda _: task.cancel() if _failure(writer) else None)
        try:
            async for request in requests:
                if self._store.log.pending_bytes > PENDING_BYTES_HIGH:
                    await self._room()
                stream.put(await self._accept(request))
                if stream.full:
                    await stream.room()
                if writer.done():
                    break
            stream.end()
            await writer
        except asyncio.CancelledError:
            if (error := _failure(writer)) is not None:
                task.uncancel()
                raise error from None
            if not self._closing:
                raise
            stream.end()
            await writer
            raise Unavailable("the broker is stopping") from None
        except (DuemqError, DecodeError):  # of a request: those before it are answered first
            stream.end()
            await writer
            raise
        finally:
            self._streams.discard(task)
            writer.cancel()
            stream.leave()

    def close(self) -> None:
        """Ends the streams once what they took is answered: the process is going to stop."""
        self._closing = True
        self._gate.close()
        for task in self._streams:
            task.cancel()

    async def _room(self) -> None:
        while self._store.log.pending_bytes > PENDING_BYTES_HIGH and not self._store.log.disk_full:
            await self._commits.progress()

    def _slow(
        self, received: list[IncomingBatch]
    ) -> list[tuple[int, IncomingBatch, BatchLimits, int]]:
        """What would hold up the event loop: batches whose records are looked into one by one."""
        slow: list[tuple[int, IncomingBatch, BatchLimits, int]] = []
        size = 0
        for index, batch in enumerate(received):
            limits, message_bytes_max = self._store.limits_of(batch)
            walked = batches.bytes_to_walk(batch, limits, message_bytes_max)
            if walked:
                size += walked
                slow.append((index, batch, limits, message_bytes_max))
        return slow if size > WALK_INLINE_BYTES else []

    def _refused(self, received: list[IncomingBatch]) -> Checked:
        """Batches whose records are none.

        Not looked at: what `_check_all` decodes in a thread, and what was accepted before it fired.
        """
        refused: Checked = {}
        for index, batch in enumerate(received):
            inline = batch.sizes or len(batch.records) <= WALK_INLINE_BYTES
            if inline and not self._store.fires(batch):
                try:
                    _check_decodable(batch)
                except DuemqError as error:
                    refused[index] = error
        return refused

    async def _accept(
        self, request: view_pb2.SendRequestView, refusal: Overloaded | None = None
    ) -> _InFlight:
        """`refusal`: nothing new is taken, but a repeat is answered."""
        began = time.perf_counter()
        count = len(request.batches)
        checks.count("batches", count, 1, BATCHES_MAX, "in a request")
        received = [_taken(view) for view in request.batches]
        checked: Checked
        if refusal is not None:
            checked = dict.fromkeys(range(count), refusal)
        elif slow := self._slow(received):
            checked = self._refused(received) | await asyncio.to_thread(_check_all, slow)
        else:
            checked = self._refused(received)
        if (access := ACCESS.get()) is not None:
            for index, batch in enumerate(received):
                # Due messages that are refused become dead letters: who sends them is asked below.
                if batch.producer_id >= SERVICE_IDS_FROM:
                    continue
                if (denied := access.refusal(Need(Action.SEND, batch.topic))) is not None:
                    checked[index] = denied
        await self._gate.hold([batch.not_before_ms for batch in received])
        now_ms = self._now_ms()
        settled = 0
        outcomes: list[BatchOutcome] = []
        try:
            for index, batch in enumerate(received):
                due_ms = self._gate.due_ms(batch.not_before_ms)
                try:
                    if access is not None and batch.producer_id >= SERVICE_IDS_FROM:
                        access.check(_OF_SERVICES)
                    _check_time(batch, due_ms)
                    accepted = self._store.send(batch, now_ms, checked.get(index), due_ms)
                except DuemqError as error:
                    self._meters.refused(error)
                    outcomes.append(error)
                else:
                    settled = max(settled, accepted.settled)
                    outcomes.append(accepted)
        finally:
            self._gate.arm()  # what is hidden is shown, whatever became of the others
        if self._traced:
            self._trace(received, outcomes, settled)
        return _InFlight(request.request_id, settled, outcomes, began)

    async def _answer(self, in_flight: _InFlight) -> view_pb2.SendResponseView:
        """The answer to a request that is durable."""
        response = view_pb2.SendResponseView(
            request_id=in_flight.request_id,
            broker=self._broker,
            store_id=self._store_id,
            now_ms=self._now_ms(),
        )
        for outcome in in_flight.outcomes:
            result = response.results.add()
            if isinstance(outcome, DuemqError):
                result.error.CopyFrom(status.to_proto(outcome))
                continue
            stored, due_ms = outcome.stored, outcome.due_ms
            if outcome.timed and due_ms is None:
                try:
                    due_ms = await asyncio.to_thread(due_of, self._store.log, stored)
                except DuemqError as error:
                    result.error.CopyFrom(status.to_proto(error))
                    continue
            result.queue_id = stored.queue_id
            result.base_offset = stored.base_offset
            result.store_ms = stored.store_ms
            if outcome.duplicate:
                result.duplicate = True
            if due_ms is not None:
                result.due_ms = due_ms
        self._meters.send_seconds.observe(time.perf_counter() - in_flight.began)
        return response

    def _trace(
        self, received: list[IncomingBatch], outcomes: list[BatchOutcome], settled: int
    ) -> None:
        """Records a span for each frame once it is durable."""
        frames = [
            (batch.topic, batch.records, outcome)
            for batch, outcome in zip(received, outcomes, strict=True)
            if isinstance(outcome, Accepted)
            and not (outcome.duplicate or batch.untraced)
            and spans.traced(batch.topic)
        ]
        if not frames:
            return
        start_ns = time.time_ns()

        def record() -> None:
            end_ns = time.time_ns()
            for topic, records, outcome in frames:
                stored = outcome.stored
                spans.record_store(
                    topic,
                    self._broker,
                    stored.queue_id,
                    stored.base_offset,
                    stored.records,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    body_bytes=len(records),
                    records=records,
                    timed=outcome.timed,
                )

        self._commits.call(settled, record)


def _taken(view: view_pb2.BatchView) -> IncomingBatch:
    return IncomingBatch(
        view.topic,
        view.queue_id,
        view.producer_id,
        view.producer_epoch,
        view.sequence,
        view.records,
        view.sizes,
        view.tag_hashes,
        view.key_hashes,
        view.delays_ms,
        view.due_ms,
        view.delay_levels,
        view.not_before_ms,
        view.untraced,
        view.early_ms,
    )


def _check_time(batch: IncomingBatch, due_ms: int) -> None:
    if batch.not_before_ms > due_ms + FIRE_AHEAD_MS_MAX:
        raise NotReady(
            f"not_before_ms: {batch.not_before_ms} is {batch.not_before_ms - due_ms} ms ahead of"
            f" this broker's clock, at most {HOLD_MS_MAX} ms are waited for",
            field="not_before_ms",
            value=batch.not_before_ms,
            limit=due_ms + HOLD_MS_MAX,
        )


def _check_all(slow: list[tuple[int, IncomingBatch, BatchLimits, int]]) -> Checked:
    checked: Checked = {}
    for index, batch, limits, message_bytes_max in slow:
        try:
            checked[index] = batches.check(batch, limits, message_bytes_max)
            _check_decodable(batch)
        except DuemqError as error:
            checked[index] = error
    return checked


def _check_decodable(batch: IncomingBatch) -> None:
    """Raises InvalidArgument where a batch holds anything but records.

    A generated client could not decode an answer with such a record in it, now or later.
    """
    try:
        message_pb2.RecordBatch.FromString(batch.records)
    except DecodeError as error:
        message = f"records: they cannot be decoded: {error}"
        raise InvalidArgument(message, field="records") from None


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


class _Stream:
    """The requests of one stream between the log and their answers."""

    def __init__(
        self, sends: SendRequests, write: Callable[[view_pb2.SendResponseView], Awaitable[None]]
    ) -> None:
        self._sends = sends
        self._commits = sends._commits
        self._write = write
        self._in_flight: deque[_InFlight] = deque()
        self._calls: deque[Waiting] = deque()
        self._taken = asyncio.Event()
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None  # of `write_answers`

    def put(self, in_flight: _InFlight) -> None:
        """Takes a request over.  Only while not `full`."""
        self._in_flight.append(in_flight)
        # The writer is woken by the commit and not before: once a request, or once for many.
        if in_flight.settled > self._commits.position:
            while self._calls and self._calls[0].callback is None:
                self._calls.popleft()
            self._calls.append(self._commits.call(in_flight.settled, self._wake))
        else:
            self._wake()

    @property
    def full(self) -> bool:
        """Too many are in flight."""
        return len(self._in_flight) >= STREAM_IN_FLIGHT_MAX

    async def room(self) -> None:
        """Waits while it is full."""
        while self.full:
            self._taken.clear()
            await self._taken.wait()

    def end(self) -> None:
        """No more requests come."""
        self._ended = True
        self._wake()

    def leave(self) -> None:
        """Nobody waits for the answers any more."""
        for waiting in self._calls:
            self._commits.leave(waiting)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def write_answers(self) -> None:
        """Until all is answered after `end`."""
        while True:
            while self._in_flight and self._in_flight[0].settled <= self._commits.position:
                await self._write(await self._sends._answer(self._in_flight[0]))
                self._in_flight.popleft()
                self._taken.set()
            if self._ended and not self._in_flight:
                return
            self._waiting = self._loop.create_future()
            await self._waiting


def _first_error(outcomes: list[BatchOutcome]) -> DuemqError | None:
    """The first error if there is nothing else: then the whole call fails with it."""
    if outcomes and all(isinstance(outcome, DuemqError) for outcome in outcomes):
        first = outcomes[0]
        return first if isinstance(first, DuemqError) else None
    return None
