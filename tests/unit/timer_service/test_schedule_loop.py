"""Schedules at a start, while there is no room for more."""

import pytest

from duemq_recurring.occurrences import CatchUp
from duemq_server.timer_service.scheduling.schedules import changes
from duemq_server.timer_service.timers.limits import Limits
from tests.manual_loop import ManualLoop
from tests.property.schedule_world import START_MS, ScheduleWorld, plan_of
from tests.unit.timer_service.test_shard import Quiet, loop

__all__ = ["loop"]

HOUR_MS = 3_600_000


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(
    ("policy", "came"), [(CatchUp.NONE, []), (CatchUp.LATEST, [3]), (CatchUp.ALL, [1])]
)
def test_what_was_missed_is_judged_before_anything_fires(
    loop: ManualLoop, policy: CatchUp, came: list[int], short: bool
) -> None:
    """Also while nothing new is taken over: what takes another one's place is no more."""

    async def main() -> None:
        quiet = Quiet(loop)
        quiet.world = world = ScheduleWorld(limits=Limits())
        quiet.start()
        quiet.shard.schedule_loop.start()
        quiet.connect()
        changes.put(world.scheduler, "s", plan_of("hours", policy), loop.wall_ms)
        await loop.silence(60)
        first = world.broker.came.get("s", [])
        assert first == [START_MS]
        quiet.shard.firing.stop()
        quiet.shard.schedule_loop.stop()
        await loop.silence(3.5 * 3_600)
        await quiet.kill()
        if short:
            world.fill_disk(Limits().free_bytes_min - 1)
        quiet.shard.schedule_loop.start()
        await loop.silence(60)
        found = [(at_ms - START_MS) // HOUR_MS for at_ms in world.broker.came["s"][1:]]
        assert found == (came if short or policy is not CatchUp.ALL else [1, 2, 3])
        world.free_disk()
        await loop.silence(3_600)
        assert (world.broker.came["s"][-1] - START_MS) // HOUR_MS == 4

    loop.run_until_complete(main())


def test_what_was_missed_is_judged_before_anything_fires_though_the_log_is_full(
    loop: ManualLoop,
) -> None:
    """Of many schedules some fill the log: what waits of the others does not fire meanwhile."""

    async def main() -> None:
        quiet = Quiet(loop)
        quiet.world = world = ScheduleWorld(limits=Limits(log_pending_bytes_max=4 << 10))
        quiet.start()
        plan = plan_of("odd", CatchUp.LATEST)
        names = [f"s{number}" for number in range(3 * changes.ENTRY_SCHEDULES_MAX)]
        for name in names:
            changes.put(world.scheduler, name, plan, loop.wall_ms)
            world.directory.log.write_pending()
        quiet.shard.firing.stop()
        await loop.silence(3.5 * 7.3)
        await quiet.kill()
        quiet.shard.schedule_loop.start()
        await loop.silence(2)
        assert world.broker.came == {name: [START_MS + 17 + 3 * 7_300] for name in names}

    loop.run_until_complete(main())
