"""Schedules of a shard with replicas: each occurrence once, whoever leads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duemq_recurring.occurrences import CatchUp
from tests.property.replicated_timer_world import ReplicatedWorld, arrived, snapshot_of
from tests.property.schedule_world import START_MS, ScheduleWorld, plan_of
from tests.property.timer_world import LIMITS


class ReplicatedScheduleWorld(ScheduleWorld, ReplicatedWorld):
    """Both."""


@pytest.mark.parametrize("seed", range(4))
def test_whoever_takes_over_goes_on(seed: int) -> None:
    world = ReplicatedScheduleWorld(seed, replace(LIMITS, log_segment_bytes=2 << 10))
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.put("paused", plan_of("odd", CatchUp.ALL))
    world.pause("paused")
    world.sync()
    for number in range(1, 9):
        world.run_until(START_MS + 2_500 * number)
        world.sync()
        world.standby.apply(world.committed)
        if number % 2:
            world.standby.pass_now()
        world.kill()
        paused = world.scheduler.schedules.get("paused")
        assert paused is not None
        assert paused.state.paused
    world.run_until(START_MS + 21_000)
    came = [at_ms - START_MS for at_ms in world.broker.came["s"]]
    assert came == list(range(0, 21_001, 1_000))
    world.scheduler.check()


def test_a_snapshot_has_them() -> None:
    world = ReplicatedScheduleWorld(1, LIMITS)
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 2_500)
    world.sync()
    world.checkpoint()
    found = arrived(world.standby, snapshot_of(world.disk)).state.schedules
    assert found == world.scheduler.schedules.saved()
