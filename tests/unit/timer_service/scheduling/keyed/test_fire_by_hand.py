"""Fired by hand: what waits goes out at once, once, and its handle is that of one that fired."""

import pytest

from duemq_server.timer_service.scheduling.keyed.changes import Rescheduling
from duemq_server.timer_service.timers.keyed import (
    FIRED,
    RESCHEDULED,
    UNKNOWN,
    Handle,
    TimerKey,
)
from tests.property.timer_world import SOURCE, START_MS, World
from tests.unit.timer_service.scheduling.keyed.test_changes import (
    FAR_MS,
    KEY,
    decided,
    flush,
    ledger_holds,
    new_request,
    scheduling,
)


def firing(world: World, *timers: Handle | TimerKey) -> Rescheduling:
    due_ms = [world.now_ms] * len(timers)
    return Rescheduling(world.scheduler, new_request(), timers, due_ms, fire=True)


def restart(world: World, *, saved: bool) -> None:
    world.sync()
    if saved:
        world.checkpoint()
    world.kill()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("wait", [500, 5_000, FAR_MS])
def test_a_broker_s_timer_fires_once_and_stays_fired(wait: int, saved: bool) -> None:
    world = World()
    world.set_away(set())
    world.broker.accept([START_MS + wait, START_MS + wait], 10, "any")
    world.ingest(1)
    flush(world)
    handles = [Handle(SOURCE, n, due) for n, due in enumerate(world.broker.due_ms)]

    assert decided(world, firing(world, handles[0])) == [RESCHEDULED]
    world.broker.moved[0] = START_MS
    assert decided(world, firing(world, handles[0])) == [FIRED]
    world.tick()
    assert world.scheduler.ledger.fired == 1
    ledger_holds(world, replaced=1, pending=1)
    restart(world, saved=saved)
    assert world.cancel_handles(handles) == [FIRED, "CANCELLED"]
    assert decided(world, firing(world, *handles)) == [FIRED, UNKNOWN]
    world.now_ms += 2 * FAR_MS
    world.tick()
    assert world.cancel_handles(handles[:1]) == [FIRED]
    assert world.scheduler.ledger.fired == 1


def test_a_key_s_timer_fires_and_its_key_is_free() -> None:
    world = World()
    world.set_away(set())
    assert decided(world, scheduling(world, "k")) == ["SCHEDULED"]
    flush(world)

    assert decided(world, firing(world, KEY)) == [RESCHEDULED]
    world.tick()
    assert decided(world, firing(world, KEY)) == [FIRED]
    assert decided(world, scheduling(world, "k", if_absent=True)) == ["SCHEDULED"]
    ledger_holds(world, replaced=1, pending=1)


def test_what_is_overdue_keeps_its_due_time() -> None:
    world = World()
    world.set_away({"b1", "b2"})
    world.broker.accept([START_MS + 100], 10, "keyed")
    world.ingest(1)
    world.now_ms += 5_000
    world.tick()

    change = firing(world, Handle(SOURCE, 0, START_MS + 100))
    assert decided(world, change) == [RESCHEDULED]
    assert change.results[0].handles[0].due_ms == START_MS + 100
    ledger_holds(world, replaced=1, pending=1)
