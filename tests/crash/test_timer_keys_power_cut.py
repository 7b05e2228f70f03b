"""The power goes at every single operation of a shard on its disk, while timers come under keys.

Of what was answered all is true afterwards: nothing is lost, comes twice, or comes though it was
cancelled or replaced; and what is asked again is answered as it was.
"""

from collections.abc import Callable

import pytest

from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.limits import AHEAD_MS
from tests.crash.faulty_disk import PowerCut
from tests.property.timer_world import TIGHT, World

FAR_MS = 60_000
HOUR_MS = 3_600_000
KEYS = ["a", "b", "c", "d"]


def keys(*names: str) -> list[TimerKey]:
    return [TimerKey("any", name) for name in names]


def flush(world: World) -> None:
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))


def pass_time(world: World, by_ms: int) -> None:
    world.now_ms += by_ms
    world.tick(AHEAD_MS)


def script(world: World) -> list[Callable[[], object]]:
    """Timers under keys in memory and in blocks: replaced, kept, cancelled, moved, fired."""
    model = world.keyed

    def schedule(names: list[str], waits: list[int], *, if_absent: bool = False) -> None:
        model.schedule(names, waits, 20, "any", if_absent=if_absent)
        model.finish_all()

    def cancel(*names: str) -> None:
        model.cancel(keys(*names))
        model.finish_all()

    def reschedule(*which: int | TimerKey, wait: int) -> None:
        model.reschedule(which, [wait + at for at in range(len(which))])
        model.finish_all()

    return [
        lambda: world.broker.accept([world.now_ms + FAR_MS, world.now_ms + 100], 10, "any"),
        lambda: world.ingest(1),
        lambda: schedule(KEYS, [100, FAR_MS, FAR_MS + 1, HOUR_MS]),
        world.sync,
        lambda: flush(world),
        lambda: schedule(["a", "b"], [FAR_MS, 200]),
        lambda: schedule(["c", "e"], [50, 300], if_absent=True),
        world.sync,
        world.checkpoint,
        lambda: reschedule(0, *keys("d"), wait=FAR_MS + 5),
        lambda: cancel("c", "nobody"),
        world.sync,
        lambda: flush(world),
        lambda: reschedule(*keys("a", "b"), wait=FAR_MS + 7),
        world.sync,
        world.checkpoint,
        lambda: pass_time(world, 400),
        world.sync,
        world.send,
        lambda: schedule(["e", "d"], [FAR_MS, FAR_MS]),
        lambda: cancel("d"),
        world.sync,
        lambda: pass_time(world, FAR_MS),
        world.housekeep,
        world.sync,
        world.send,
        world.checkpoint,
    ]


def run(world: World, kill: bool) -> None:
    world.set_away(set())
    for step in script(world):
        try:
            step()
        except PowerCut:
            (world.kill if kill else world.power_cut)()
            for which in range(len(world.keyed.done)):
                world.keyed.repeat(which / len(world.keyed.done))
    world.drain()


def operations() -> int:
    """How many the script takes."""
    world = World(limits=TIGHT)
    before = world.disk.operations
    run(world, kill=False)
    assert world.keyed.replaced
    assert world.keyed.moved > 2
    return world.disk.operations - before


@pytest.mark.parametrize("kill", [False, True])
def test_what_was_answered_is_true_whenever_the_power_goes(kill: bool) -> None:
    cuts = 0
    for at in range(1, operations() + 1):
        for seed in range(1 if kill else 3):
            world = World(seed, TIGHT)
            world.cut_power_in(at)
            run(world, kill)
            cuts += world.restarts > 0
    assert cuts
