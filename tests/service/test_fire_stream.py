"""When the timer service's stream to a broker looks again for what has become sendable."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest

from duemq_server.timer_service.edge import fire_stream
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.scheduling.dispatch import NEVER

DUE_MS = 5


class Held:
    """A dispatcher with one batch, held until DUE_MS."""

    def __init__(self) -> None:
        self.batches = [SimpleNamespace(records=b"")]

    def sendable(self, broker: str, now_ms: int, bytes_max: int) -> list[SimpleNamespace]:
        return self.batches if now_ms >= DUE_MS else []

    def next_retry_ms(self, broker: str, now_ms: int) -> int:
        return DUE_MS if now_ms < DUE_MS else NEVER


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
    shard = SimpleNamespace(scheduler=SimpleNamespace(dispatcher=held))
    writing = asyncio.create_task(
        fire_stream.FireStream(shard, "b", "b:1", BrokerClock())._write(None)
    )
    assert await asyncio.wait_for(sent, 30) is held.batches
    writing.cancel()


async def test_a_stream_sends_ahead_while_little_is_on_its_way(monkeypatch) -> None:
    monkeypatch.setattr(fire_stream, "now_ms", lambda: DUE_MS - fire_stream.SENT_AHEAD_MS)
    monkeypatch.setattr(fire_stream.FireStream, "_run", lambda self: asyncio.sleep(0))
    looked, sent = asyncio.Event(), asyncio.Event()

    async def send(self, call, batches) -> None:
        sent.set()
        await asyncio.Event().wait()

    class Looked(Held):
        def next_retry_ms(self, broker: str, now_ms: int) -> int:
            looked.set()
            return super().next_retry_ms(broker, now_ms)

    monkeypatch.setattr(fire_stream.FireStream, "_send", send)
    shard = SimpleNamespace(scheduler=SimpleNamespace(dispatcher=Looked()))
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
    shard = SimpleNamespace(scheduler=SimpleNamespace(dispatcher=idle))
    stream = fire_stream.FireStream(shard, "b", "b:1", BrokerClock())
    writing = asyncio.create_task(stream._write(None))
    assert await timeouts.get() is None
    writing.cancel()
