"""When silent instances go, by a clock that the test sets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from duemq_server.nameserver import expiry
from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.expiry import Expiry
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, Version
from duemq_server.serving.unsent import Unsent

EXPIRY_MS = 30_000


class World:
    """Looks as often as the test lets it."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.registry = Registry(0, expiry_ms=EXPIRY_MS)
        servicer = NameserverServicer(self.registry, lambda: self.now_ms, 10, Unsent(1 << 20, 1.0))
        self.expiry = Expiry(self.registry, servicer, lambda: self.now_ms)
        self.asleep: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.sleeper: asyncio.Event  # wakes it

    async def sleep(self, _wait_s: float) -> None:
        woken = asyncio.Event()
        self.asleep.put_nowait(woken)
        await woken.wait()

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


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World()
    running = asyncio.create_task(made.expiry.run())
    with monkeypatch.context() as patched:
        patched.setattr(expiry.asyncio, "sleep", made.sleep)
        made.sleeper = await made.asleep.get()
        yield made
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


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
