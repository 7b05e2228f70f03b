"""A shard that leads replicas: nothing happens to the outside before they have what it rests on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq.errors import Unavailable
from duemq.v1 import message_pb2, timer_pb2
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import LogFull
from duemq_server.timer_service.disk.data_directory import load_checkpoint
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.edge.servicer import TimerServicer
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, FIRED
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.property.timer_world import BROKER, SOURCE, BrokerModel
from tests.service.running_cluster import until

HOUR_MS = 3_600_000
LIMITS = replace(Limits(), checkpoint_interval_ms=1, uncommitted_max=2_000)


class Replicas:
    """Have what they are told to have."""

    def __init__(self) -> None:
        self.advance: Callable[[int], None] = lambda position: None
        self.synced_to = 0
        self.held = False

    def synced(self, position: int) -> None:
        self.synced_to = position
        if not self.held:
            self.advance(position)

    def follow(self) -> None:
        self.held = False
        self.advance(self.synced_to)


class Led:
    """A shard, its replicas, and a broker."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self.now_ms = 1_700_000_000_000
        standby = Standby.open(self.path, RealDisk(), LIMITS, clock=lambda: self.now_ms)
        self.replicas = Replicas()
        self.shard = Shard(standby.promote(), replicas=self.replicas)
        self.log = self.shard.directory.log
        self.scheduler = self.shard.scheduler
        self.broker = BrokerModel()
        self.sendable: list[str] = []
        self.shard.log_loop.on_sendable = self.sendable.append
        self.scheduler.dispatcher.set_routes({"any": {BROKER: 2}})
        self.scheduler.dispatcher.connected(BROKER)
        self.shard.log_loop.start()

    async def take(self, due_ms: int, size: int = 10) -> Cancelled:
        offset = len(self.broker.due_ms)
        self.broker.accept([due_ms], size, "any")
        frames = self.broker.frames_from(offset, 1)
        await self.shard.ingest(SOURCE, BROKER, frames, offset)
        return Cancelled(SOURCE, offset, due_ms)

    async def synced(self) -> None:
        await until(lambda: self.replicas.synced_to == self.log.end_position)

    def saved(self) -> int:
        """Where the last checkpoint was made."""
        found = load_checkpoint(self.path, RealDisk())
        assert found is not None
        return found.position

    def sent(self) -> int:
        return len(self.scheduler.dispatcher.sendable(BROKER, self.now_ms, 1 << 20))


@pytest.fixture
async def led(tmp_path: Path) -> AsyncIterator[Led]:
    made = Led(tmp_path)
    yield made
    made.shard.resign()
    await made.shard.stop()


async def test_a_batch_is_sent_and_an_offset_told_when_replicas_have_them(led: Led) -> None:
    led.replicas.held = True
    await led.take(led.now_ms)
    led.scheduler.tick(led.now_ms)
    await led.synced()
    [source] = led.shard.sources()
    assert (source.next_offset, source.durable_offset) == (1, 0)
    assert not led.sent()
    assert not led.sendable

    led.replicas.follow()

    assert led.sendable == [BROKER]
    assert source.durable_offset == 1
    assert led.sent() == 1


async def test_a_timer_is_located_when_replicas_have_it(led: Led) -> None:
    """Another shard writes down that it is here: it could come to that one, were it lost here."""
    links = SimpleNamespace(check_may_serve=lambda: None, epoch=1)
    nothing: Any = None
    servicer = TimerServicer(led.shard, cast(Any, links), nothing, nothing)
    led.replicas.held = True
    handle = await led.take(led.now_ms + HOUR_MS)
    await led.synced()
    named = [
        message_pb2.TimerHandle(store_id=SOURCE.store_id, queue_id=SOURCE.queue_id, offset=offset)
        for offset in (handle.offset, handle.offset + 1)
    ]

    await servicer.LocateTimers(timer_pb2.LocateTimersRequest(handles=named[1:]), None)
    asked = servicer.LocateTimers(timer_pb2.LocateTimersRequest(handles=named), None)
    located = asyncio.create_task(asked)
    done, _ = await asyncio.wait({located}, timeout=0)
    assert not done
    led.replicas.follow()

    assert list((await located).here) == [True, False]


@pytest.mark.parametrize("outcome", [CANCELLED, FIRED])
async def test_a_cancel_is_answered_when_replicas_have_it(led: Led, outcome: str) -> None:
    led.replicas.held = True
    handle = await led.take(led.now_ms + (HOUR_MS if outcome == CANCELLED else 0))
    led.scheduler.tick(led.now_ms)
    led.shard.firing.ahead_ms = lambda: led.now_ms  # type: ignore[method-assign]
    led.shard._cancels._clock = lambda: led.now_ms
    waiting = asyncio.create_task(led.shard.cancel([handle], 5))
    await led.synced()
    await until(lambda: not led.shard._cancels._tasks)
    await led.synced()
    assert not waiting.done()

    led.replicas.follow()

    assert await waiting == [outcome]


async def test_a_checkpoint_is_saved_when_replicas_have_all_of_it(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    led.replicas.held = True
    loop, waits_for = led.shard.log_loop, []
    durable = loop.durable

    async def noted(position: int) -> None:
        waits_for.append(position)
        await durable(position)

    monkeypatch.setattr(loop, "durable", noted)
    await led.take(led.now_ms + HOUR_MS)
    await led.synced()
    jobs = asyncio.create_task(led.shard.disk_jobs.run())
    await until(lambda: led.log.end_position in waits_for)
    thread = led.shard.disk_jobs._thread
    await asyncio.get_running_loop().run_in_executor(thread, lambda: None)
    assert led.saved() == 0

    led.replicas.follow()

    await until(lambda: led.saved() == led.log.end_position)
    jobs.cancel()
    await asyncio.gather(jobs, return_exceptions=True)


async def test_while_replicas_are_away_no_more_than_a_bound_is_taken_over(led: Led) -> None:
    led.replicas.held = True
    await led.take(led.now_ms, 2_000)
    waiting = asyncio.create_task(led.take(led.now_ms, 10))
    with pytest.raises(LogFull, match="wait for replicas"):
        led.scheduler.tick(led.now_ms)
    await led.synced()
    assert not waiting.done()

    led.replicas.follow()

    await waiting
    led.scheduler.tick(led.now_ms)
    await led.synced()
    assert led.scheduler.ledger.fired == 2
    assert led.sent() == 1


async def test_what_a_quiet_shard_holds_is_committed_and_nothing_comes_to_it(led: Led) -> None:
    led.replicas.held = True
    handle = await led.take(led.now_ms + HOUR_MS)
    waiting = asyncio.create_task(led.shard.cancel([handle], 5))
    await until(lambda: bool(led.scheduler.ledger.cancelled))
    led.shard.quiesce()
    end = led.log.end_position
    late = asyncio.create_task(led.take(led.now_ms))
    await led.synced()
    assert not waiting.done()

    led.replicas.follow()

    assert await waiting == [CANCELLED]
    assert led.log.end_position == end
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_who_waits_for_a_shard_that_resigns_is_sent_elsewhere(led: Led) -> None:
    led.replicas.held = True
    handle = await led.take(led.now_ms + HOUR_MS)
    waiting = asyncio.create_task(led.shard.cancel([handle], 5))
    await until(lambda: bool(led.scheduler.ledger.cancelled))
    led.shard.resign()
    with pytest.raises(Unavailable, match="does not lead"):
        await waiting
    other = Cancelled(SOURCE, 0, led.now_ms)
    with pytest.raises(Unavailable, match="does not lead"):
        await led.shard.cancel([other], 5)
    before = led.saved()
    await led.shard.stop()
    assert led.saved() == before
