"""What goes on in time though the clock is set."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq.protocol.route import RouteCache
from duemq_server.timer_service.edge import broker_links
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from tests.manual_loop import ManualLoop
from tests.unit.timer_service.test_shard import MINUTE_MS, Quiet, loop, run

__all__ = ["loop"]


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
    monkeypatch.setattr(broker_links, "now_ms", lambda: loop.wall_ms)
    monkeypatch.setattr(broker_links, "steady_ms", lambda: int(loop.time() * 1_000))
    clock, asked = BrokerClock(), []

    async def main(quiet: Quiet) -> None:
        sendable, nothing = quiet.shard.log_loop.on_sendable, cast(Any, None)
        links = broker_links.BrokerLinks(quiet.shard, RouteCache(), nothing, nothing)
        links._clocks.cancel()
        quiet.shard.log_loop.on_sendable = sendable
        link = SimpleNamespace(clock=clock, ask_for_time=lambda: asked.append("b1"))
        links.by_name = {"b1": cast(Any, link)}
        quiet.shard.firing.before_tick = links.look_at_clock
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
