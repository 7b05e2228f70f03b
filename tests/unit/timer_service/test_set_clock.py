"""What goes on in time though the clock is set."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq.protocol.route import RouteCache
from duemq_recurring.occurrences import CatchUp
from duemq_server.timer_service.edge import broker_links
from duemq_server.timer_service.edge.metrics import ShardCollector
from duemq_server.timer_service.schedule_loop import SLEEP_S_MAX
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.scheduling.schedules import changes
from duemq_server.timer_service.timers.limits import Limits
from tests.manual_loop import ManualLoop
from tests.property.schedule_world import START_MS, ScheduleWorld, plan_of
from tests.unit.timer_service.test_shard import MINUTE_MS, Quiet, loop, run

__all__ = ["loop"]

HOUR_MS = 60 * MINUTE_MS


def linked(
    quiet: Quiet,
    monkeypatch: pytest.MonkeyPatch,
    clock: BrokerClock,
    ask_for_time: Callable[[], None] = lambda: None,
) -> broker_links.BrokerLinks:
    """A link to a broker that has this clock."""
    loop = quiet.loop
    monkeypatch.setattr(broker_links, "now_ms", lambda: loop.wall_ms)
    monkeypatch.setattr(broker_links, "steady_ms", lambda: int(loop.time() * 1_000))
    sendable, nothing = quiet.shard.log_loop.on_sendable, cast(Any, None)
    links = broker_links.BrokerLinks(quiet.shard, RouteCache(), nothing, nothing)
    links._clocks.cancel()
    quiet.shard.log_loop.on_sendable = sendable
    link = SimpleNamespace(clock=clock, ask_for_time=ask_for_time)
    links.by_name = {"b1": cast(Any, link)}
    quiet.shard.firing.check_clock = links.look_at_clock
    return links


@pytest.mark.parametrize("by_ms", [60 * MINUTE_MS, -60 * MINUTE_MS])
def test_checkpoints_go_on_though_the_clock_is_set(loop: ManualLoop, by_ms: int) -> None:
    """A restart would have to read all of the log since."""

    async def main(quiet: Quiet) -> None:
        await quiet.take(24 * 60 * MINUTE_MS)
        await loop.silence(60)
        loop.set_clock(by_ms)
        await loop.silence(5)
        await quiet.take(24 * 60 * MINUTE_MS)
        end = quiet.world.directory.log.end_position
        await loop.silence(60)
        assert quiet.world.directory.housekeeper._saved_position >= end

    run(loop, main)


@pytest.mark.parametrize("with_the_broker", [False, True])
def test_a_clock_that_jumps_ahead_sends_nothing_early(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch, with_the_broker: bool
) -> None:
    """Not even for the second until the next look.  What is sent cannot be cancelled any more."""
    clock = BrokerClock()
    asked: list[str] = []

    async def main(quiet: Quiet) -> None:
        links = linked(quiet, monkeypatch, clock, lambda: asked.append("b1"))
        clock.observe(loop.wall_ms, loop.wall_ms, 0)

        await quiet.take(MINUTE_MS)
        await loop.silence(10)
        assert not asked
        loop.set_clock(60 * MINUTE_MS)
        await loop.silence(2)
        assert asked == ["b1"]
        assert quiet.shard.scheduler.ledger.in_flight == 0
        assert not quiet.delivered_ms

        answered_ms = loop.wall_ms - (0 if with_the_broker else 60 * MINUTE_MS)
        clock.observe(loop.wall_ms, answered_ms, int(loop.time() * 1_000))
        links.keep_time()
        await loop.silence(2)
        assert quiet.shard.scheduler.ledger.fired == with_the_broker
        await loop.silence(50)
        assert quiet.shard.scheduler.ledger.fired == 1

    run(loop, main)


@pytest.mark.parametrize("policy", [CatchUp.LATEST, CatchUp.NONE])
def test_a_clock_that_jumps_ahead_skips_nothing_of_a_schedule(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch, policy: CatchUp
) -> None:
    """Whoever is first to look at what is due then: what it takes for missed does not come."""

    async def main() -> None:
        quiet = Quiet(loop)
        quiet.world = world = ScheduleWorld(limits=Limits())
        quiet.start()
        links = linked(quiet, monkeypatch, clock := BrokerClock())
        clock.observe(loop.wall_ms, loop.wall_ms, 0)
        quiet.connect()
        quiet.shard.schedule_loop.start()
        changes.put(world.scheduler, "s", plan_of("hours", policy), loop.wall_ms)
        await loop.silence(60.5)
        assert world.broker.came["s"] == [START_MS]
        world.scheduler.schedules.on_sooner()  # from now on it looks between two ticks
        await loop.silence(SLEEP_S_MAX - 0.1)

        loop.set_clock(5 * HOUR_MS)
        await loop.silence(2)
        clock.observe(loop.wall_ms, loop.wall_ms - 5 * HOUR_MS, int(loop.time() * 1_000))
        links.keep_time()
        await loop.silence(2 * 3_600)
        assert world.broker.came["s"] == [START_MS, START_MS + HOUR_MS, START_MS + 2 * HOUR_MS]

    loop.run_until_complete(main())


def test_metrics_which_are_read_in_another_thread_correct_no_clock(loop: ManualLoop) -> None:
    async def main(quiet: Quiet) -> None:
        checked: list[str] = []
        quiet.shard.firing.check_clock = lambda: checked.append(threading.current_thread().name)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: list(ShardCollector(quiet.shard, lambda: 0).collect())).result()
        assert not checked
        quiet.shard.now_ms()
        assert checked == [threading.current_thread().name]

    run(loop, main)
