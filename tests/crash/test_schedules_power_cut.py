"""The power goes at every operation on the disk while schedules are made, changed, and run."""

from __future__ import annotations

import os

import pytest

from duemq_recurring.occurrences import CatchUp
from tests.crash.faulty_disk import PowerCut
from tests.property.schedule_world import START_MS, ScheduleWorld, plan_of

END_MS = START_MS + 10_000
ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))


def story(world: ScheduleWorld, done: list[str]) -> None:
    """`done`: what was durable."""
    world.put("all", plan_of("seconds", CatchUp.ALL))
    world.put("odd", plan_of("odd", CatchUp.LATEST))
    world.sync()
    done.append("made")
    world.run_until(START_MS + 2_500)
    world.pause("odd")
    world.sync()
    done.append("paused")
    world.checkpoint()
    world.run_until(START_MS + 4_500)
    world.put("odd", plan_of("jittered", CatchUp.ALL))
    world.resume("odd")
    world.sync()
    done.append("resumed")
    world.run_until(START_MS + 7_000)
    world.delete("odd")
    world.sync()
    done.append("deleted")
    world.checkpoint()
    world.run_until(START_MS + 8_000)


def operations() -> int:
    world = ScheduleWorld()
    before = world.disk.operations
    story(world, [])
    return world.disk.operations - before


@pytest.mark.parametrize("kept", range(ROUNDS))
def test_a_power_cut_at_every_operation(kept: int) -> None:
    """`kept`: seeds of what the disk keeps of what was not synced."""
    count = operations()
    assert count > 50
    for cut in range(1, count + 1):
        world, done = ScheduleWorld(seed=kept), []  # type: tuple[ScheduleWorld, list[str]]
        world.cut_power_in(cut)
        with pytest.raises(PowerCut):
            story(world, done)
        world.power_cut()
        if "made" in done:
            assert world.scheduler.schedules.get("all") is not None
        if "deleted" in done:
            assert world.scheduler.schedules.get("odd") is None
        elif done == ["made", "paused"]:
            odd = world.scheduler.schedules.get("odd")
            assert odd is not None
            assert odd.state.paused or odd.plan.recurrence.catch_up is CatchUp.ALL
        world.put("all", plan_of("seconds", CatchUp.ALL))  # as a client does that has no answer
        world.run_until(END_MS)
        came = [at_ms - START_MS for at_ms in world.broker.came["all"]]
        assert came == list(range(came[0], 10_001, 1_000))
        if "made" in done:
            assert came[0] == 0
        world.scheduler.check()
