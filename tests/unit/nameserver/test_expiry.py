"""When silent instances go, and when it is ready, by a clock that the test sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from duemq_server.nameserver import expiry
from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.expiry import Expiry
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, Version
from duemq_server.serving.unsent import Unsent

EXPIRY_MS = 30_000
READY_AFTER_MS = 10_000


class World:
    """Looks as often as the test lets it."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.ready = 0  # so often it was said
        self.wait_s = 0.0  # until the next look
        self.registry = Registry(READY_AFTER_MS, expiry_ms=EXPIRY_MS)
        servicer = NameserverServicer(self.registry, lambda: self.now_ms, 10, Unsent(1 << 20, 1.0))
        self.expiry = Expiry(self.registry, servicer, lambda: self.now_ms, self.got_ready)
        self.asleep: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.sleeper: asyncio.Event  # wakes it

    async def sleep(self, wait_s: float) -> None:
        self.wait_s = wait_s
        woken = asyncio.Event()
        self.asleep.put_nowait(woken)
        await woken.wait()

    def got_ready(self) -> None:
        self.ready += 1

    def register(self, name: str) -> None:
        self.registry.register(Version(1, 1), BrokerReport(name, "h:1"), self.now_ms)

    @property
    def names(self) -> list[str]:
        return [one.report.name for one in self.registry.brokers]

    async def looks_after(self, ms: int) -> None:
        self.now_ms += ms
        self.sleeper.set()
        self.sleeper = await self.asleep.get()

    async def passes(self, ms: int) -> None:
        for _ in range(ms // 500):
            await self.looks_after(500)


@asynccontextmanager
async def looking(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    running = asyncio.create_task(world.expiry.run())
    with monkeypatch.context() as patched:
        patched.setattr(expiry.asyncio, "sleep", world.sleep)
        world.sleeper = await world.asleep.get()
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World()
    async with looking(made, monkeypatch):
        yield made


async def test_who_is_silent_goes(world: World) -> None:
    world.register("b1")
    await world.passes(EXPIRY_MS - 500)
    assert world.names == ["b1"]
    await world.passes(500)
    assert world.names == []


async def test_a_nameserver_that_was_stopped_waits_for_what_was_said_meanwhile(
    world: World,
) -> None:
    world.register("b1")
    world.register("b2")
    await world.passes(10_000)
    await world.looks_after(3 * EXPIRY_MS)
    assert world.names == ["b1", "b2"]
    world.register("b1")
    await world.passes(EXPIRY_MS - 10_000 + 500)
    assert world.names == ["b1"]


async def test_it_is_ready_once_everybody_had_the_time_to_register(world: World) -> None:
    await world.passes(READY_AFTER_MS - 500)
    await world.looks_after(499)
    assert not world.ready
    await world.looks_after(1)
    await world.passes(2 * READY_AFTER_MS)
    assert world.ready == 1


async def test_it_wakes_when_it_gets_ready(world: World) -> None:
    """Whoever sleeps beyond that cannot tell how much of the pause came before."""
    await world.passes(READY_AFTER_MS - 500)
    await world.looks_after(400)
    assert world.wait_s == pytest.approx(0.1)


async def test_one_that_was_stopped_before_it_was_ready_waits_so_much_longer(world: World) -> None:
    await world.passes(READY_AFTER_MS - 2_000)
    await world.looks_after(500 + 2 * READY_AFTER_MS)
    await world.passes(1_000)
    assert not world.ready
    await world.passes(500)
    assert world.ready == 1


async def test_a_start_that_takes_long_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.now_ms = READY_AFTER_MS
    async with looking(world, monkeypatch):
        assert world.registry.ready_at_ms == 2 * READY_AFTER_MS
        assert not world.ready
