"""Cancels of many callers: how they share look-ups, and how they end."""

import asyncio

import pytest

from duemq.errors import Unavailable
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service import cancels
from duemq_server.timer_service.cancels import Cancels
from duemq_server.timer_service.scheduling.cancelling import CANCELLED
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.property.timer_world import SOURCE, START_MS, World

FAR_MS = 20_000
TIMERS = 20


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A shard with timers in blocks, whose cancels go by in slices of two."""
    monkeypatch.setattr(cancels, "SLICE", 2)
    monkeypatch.setattr(cancels, "SPACING_S", 0)
    world = World()
    world.broker.accept([START_MS + FAR_MS + n for n in range(TIMERS)], 10, "any")
    world.ingest(1)
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))
    return world


def counted(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many timers each look-up was for."""
    looked_up: list[int] = []
    make = world.scheduler.segments.look_up

    def look_up(queries, number_of):  # type: ignore[no-untyped-def]
        looked_up.append(sum(len(query) for query in queries))
        return make(queries, number_of)

    monkeypatch.setattr(world.scheduler.segments, "look_up", look_up)
    return looked_up


async def no_room() -> None:
    raise AssertionError("the log is not full")


def handles(world: World) -> list[Cancelled]:
    return [Cancelled(SOURCE, n, world.broker.due_ms[n]) for n in range(TIMERS)]


async def decide(world: World) -> list[object]:
    asked = Cancels(world.scheduler, lambda: world.now_ms, no_room)
    try:
        return list((await asked.decide(handles(world))).outcomes)
    finally:
        await asked.stop()


def test_a_list_is_looked_up_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = counted(world, monkeypatch)

    assert asyncio.run(decide(world)) == [CANCELLED] * TIMERS
    assert looked_up == [TIMERS]


def test_too_many_open_files_are_no_damage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again is answered; nobody is told to set anything aside."""

    def none_left(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(world.disk, "open", none_left)
        with pytest.raises(Unavailable, match="too many open files"):
            asyncio.run(decide(world))
    assert asyncio.run(decide(world)) == [CANCELLED] * TIMERS


def test_a_long_list_is_looked_up_while_more_of_it_is_decided_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancels, "LOOK_UP_SLICES", 3)
    looked_up = counted(world, monkeypatch)

    assert asyncio.run(decide(world)) == [CANCELLED] * TIMERS
    assert looked_up[0] < TIMERS
    assert sum(looked_up) == TIMERS


def test_a_stop_waits_for_what_is_asked(world: World) -> None:
    async def stopped() -> list[object]:
        begun = asyncio.Event()

        def clock() -> int:
            begun.set()
            return world.now_ms

        asked = Cancels(world.scheduler, clock, no_room)
        deciding = asyncio.create_task(asked.decide(handles(world)))
        await begun.wait()
        await asked.stop()
        assert all(not task.get_name().startswith("cancels") for task in asyncio.all_tasks())
        return list((await deciding).outcomes)

    assert asyncio.run(stopped()) == [CANCELLED] * TIMERS
