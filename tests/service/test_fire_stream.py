"""When the timer service's stream to a broker looks again for what has become sendable."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace

import grpc.aio
import pytest

from duemq.errors import DuemqError, FencedProducer, OutOfSequence, Overloaded, Unavailable
from duemq.transport import status
from duemq.v1 import broker_pb2, view_pb2
from duemq_server.timer_service.edge import fire_stream
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import FireOutcome
from duemq_server.timer_service.timers.log_entries import LaneId
from tests.played_log_loop import LOG_LOOP, no_loop_fails
from tests.service.playing import PINGS
from tests.service.running_cluster import until

__all__ = ["no_loop_fails"]

DUE_MS = 5


class Held:
    """A dispatcher with one batch, held until DUE_MS."""

    def __init__(self) -> None:
        self.batches = [SimpleNamespace(records=b"")]

    def sendable(
        self, broker: str, now_ms: int, bytes_max: int, ahead_ms: int
    ) -> list[SimpleNamespace]:
        return self.batches if now_ms >= DUE_MS - ahead_ms else []

    def next_retry_ms(self, broker: str, now_ms: int, ahead_ms: int) -> int:
        return DUE_MS - ahead_ms if now_ms < DUE_MS - ahead_ms else NEVER


@pytest.mark.parametrize("first", range(DUE_MS + 1))
async def test_a_batch_that_falls_due_between_two_looks_at_the_clock_is_sent(
    first: int, monkeypatch
) -> None:
    clock = count(first)
    monkeypatch.setattr(fire_stream, "now_ms", lambda: next(clock))
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    sent: asyncio.Future[list[SimpleNamespace]] = asyncio.get_running_loop().create_future()

    async def send(self, call, batches) -> None:
        sent.set_result(batches)
        await asyncio.Event().wait()

    monkeypatch.setattr(fire_stream.FireStream, "_send", send)
    held = Held()
    shard = SimpleNamespace(log_loop=LOG_LOOP, scheduler=SimpleNamespace(dispatcher=held))
    writing = asyncio.create_task(
        fire_stream.FireStream(shard, "b", "b:1", BrokerClock())._write(None)
    )
    assert await asyncio.wait_for(sent, 30) is held.batches
    writing.cancel()


async def test_who_has_something_to_send_does_not_look_for_what_is_held_back(monkeypatch) -> None:
    """With 20,000 lanes that look took six times as long as a request."""
    monkeypatch.setattr(fire_stream, "now_ms", lambda: DUE_MS)
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    requests = [[SimpleNamespace(records=b"")] for _ in range(3)]
    told: list[str] = []
    looked = asyncio.Event()

    def look(*_) -> int:
        told.append("look")
        looked.set()
        return NEVER

    async def send(self, call, batches) -> None:
        told.append("send")

    monkeypatch.setattr(fire_stream.FireStream, "_send", send)
    dispatcher = SimpleNamespace(
        sendable=lambda *_: requests.pop() if requests else [], next_retry_ms=look
    )
    shard = SimpleNamespace(log_loop=LOG_LOOP, scheduler=SimpleNamespace(dispatcher=dispatcher))
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    writing = asyncio.create_task(stream._write(None))
    await asyncio.wait_for(looked.wait(), 30)
    assert told == ["send"] * 3 + ["look"]
    writing.cancel()


async def test_a_stream_sends_ahead_while_little_is_on_its_way(monkeypatch) -> None:
    monkeypatch.setattr(fire_stream, "now_ms", lambda: DUE_MS - fire_stream.SENT_AHEAD_MS)
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    looked, sent = asyncio.Event(), asyncio.Event()

    async def send(self, call, batches) -> None:
        sent.set()
        await asyncio.Event().wait()

    class Looked(Held):
        def next_retry_ms(self, broker: str, now_ms: int, ahead_ms: int) -> int:
            looked.set()
            return super().next_retry_ms(broker, now_ms, ahead_ms)

    monkeypatch.setattr(fire_stream.FireStream, "_send", send)
    shard = SimpleNamespace(log_loop=LOG_LOOP, scheduler=SimpleNamespace(dispatcher=Looked()))
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    for number in range(fire_stream.AHEAD_REQUESTS_MAX):
        stream._requests.append(fire_stream._Request(number, [], 0))
    writing = asyncio.create_task(stream._write(None))
    await asyncio.wait_for(looked.wait(), 30)
    assert not sent.is_set()

    stream._requests.popleft()  # it is answered
    stream.kick()
    await asyncio.wait_for(sent.wait(), 30)
    writing.cancel()


async def test_a_stream_with_nothing_to_send_sleeps_until_there_is(monkeypatch) -> None:
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    timeouts: asyncio.Queue[float | None] = asyncio.Queue()
    timeout = asyncio.timeout

    def told(delay_s: float | None):
        timeouts.put_nowait(delay_s)
        return timeout(delay_s)

    monkeypatch.setattr(fire_stream.asyncio, "timeout", told)
    idle = SimpleNamespace(sendable=lambda *_: [], next_retry_ms=lambda *_: NEVER)
    shard = SimpleNamespace(log_loop=LOG_LOOP, scheduler=SimpleNamespace(dispatcher=idle))
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    writing = asyncio.create_task(stream._write(None))
    assert await timeouts.get() is None
    writing.cancel()


@pytest.mark.parametrize("repeated", [False, True])
async def test_the_first_answer_to_a_batch_is_not_that_of_another_one(
    repeated: bool, monkeypatch
) -> None:
    """Its number was given out before, by a machine that was set back since, say."""
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    told: list[FireOutcome] = []
    shard = SimpleNamespace(
        log_loop=LOG_LOOP, answered=lambda batch, outcome, *_: told.append(outcome)
    )
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    lane = SimpleNamespace(id=LaneId("b", "t", 0))
    batch = SimpleNamespace(lane=lane, repeated=repeated)
    stream._take(batch, view_pb2.BatchResultView(duplicate=True), 0, 0)
    assert told == [FireOutcome.STORED if repeated else FireOutcome.OUT_OF_SEQUENCE]


@pytest.mark.parametrize(
    ("error", "begun", "outcome"),
    [
        (OutOfSequence("sequence"), True, FireOutcome.OUT_OF_SEQUENCE),
        (FencedProducer("producer_epoch"), False, FireOutcome.OUT_OF_SEQUENCE),
        (FencedProducer("producer_epoch"), True, FireOutcome.REFUSED),
        (Overloaded("the disk is behind"), False, FireOutcome.REFUSED),
    ],
)
async def test_a_batch_that_is_of_another_time_gets_a_new_epoch(
    error: DuemqError, begun: bool, outcome: FireOutcome, monkeypatch
) -> None:
    """Of a copy of this machine's data: starts since have begun epochs at the broker.

    One that began after this start's is of a copy that runs beside it, and fires the same.
    """
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    told: list[FireOutcome] = []
    shard = SimpleNamespace(
        log_loop=LOG_LOOP, answered=lambda batch, outcome, *_: told.append(outcome)
    )
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    lane = SimpleNamespace(id=LaneId("b", "t", 0), failures=0, begun=begun)
    batch = SimpleNamespace(lane=lane, repeated=True)
    stream._take(batch, view_pb2.BatchResultView(error=status.to_proto(error)), 0, 0)
    assert told == [outcome]


class Played:
    """A broker that answers on its first stream as it is told, and on the next ones not at all."""

    def __init__(self, results: int | None) -> None:
        """So many results of a batch; None: an answer that nobody asked for."""
        self.streams = 0
        self.again = asyncio.Event()
        self.results = results

    async def SendStream(self, requests, context):
        self.streams += 1
        if self.streams > 1:
            self.again.set()
            await asyncio.Event().wait()
        if self.results is None:
            yield broker_pb2.SendResponse(request_id=1)
        async for request in requests:
            results = [broker_pb2.BatchResult() for _ in range(self.results or 0)]
            yield broker_pb2.SendResponse(request_id=request.request_id, results=results)


@asynccontextmanager
async def stream_to(
    played: Played, check: Callable[[grpc.aio.Channel], Awaitable[object]] | None = None
) -> AsyncIterator[fire_stream.FireStream]:
    """One that has a batch to send, if any result is to come."""
    server = grpc.aio.server(options=PINGS)
    handler = grpc.stream_stream_rpc_method_handler(
        played.SendStream,
        request_deserializer=broker_pb2.SendRequest.FromString,
        response_serializer=broker_pb2.SendResponse.SerializeToString,
    )
    methods = grpc.method_handlers_generic_handler("duemq.v1.Broker", {"SendStream": handler})
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    batch = SimpleNamespace(
        lane=SimpleNamespace(id=LaneId("b", "t", 0), epoch=0),
        sequence=0,
        records=b"",
        sizes=b"",
        tag_hashes=b"",
        key_hashes=b"",
        last_due_ms=0,
        early_ms=lambda _: b"",
    )
    left = [] if played.results is None else [[batch]]
    dispatcher = SimpleNamespace(
        sendable=lambda *_: left.pop() if left else [], next_retry_ms=lambda *_: NEVER
    )
    shard = SimpleNamespace(
        log_loop=LOG_LOOP,
        scheduler=SimpleNamespace(dispatcher=dispatcher),
        directory=SimpleNamespace(producer_id=1),
        connected=lambda *_: None,
        disconnected=lambda *_: None,
        answered=lambda *_: None,
    )
    address = f"127.0.0.1:{port}"
    stream = fire_stream.FireStream(shard, "b", address, BrokerClock(), check=check)
    try:
        yield stream
    finally:
        await stream.stop()
        await server.stop(None)


@pytest.mark.parametrize("results", [None, 0, 2])
async def test_a_broker_whose_answers_fit_nothing_is_connected_to_anew(
    results: int | None,
) -> None:
    """One that it was not asked for; results of fewer, or more, batches than there are."""
    played = Played(results)
    async with stream_to(played) as stream:
        await until(lambda: played.again.is_set() or stream._task.done())
        assert played.again.is_set()


async def test_another_broker_at_the_address_is_sent_nothing() -> None:
    """It would store what is sent, and the one that is meant would get it, too."""
    played, checked, is_meant = Played(1), asyncio.Queue[int](), asyncio.Event()

    async def check(_: grpc.aio.Channel) -> None:
        checked.put_nowait(played.streams)
        if not is_meant.is_set():
            raise Unavailable("b has another store")

    async with stream_to(played, check):
        assert [await checked.get() for _ in range(2)] == [0, 0]
        is_meant.set()
        await until(lambda: played.streams == 1)
