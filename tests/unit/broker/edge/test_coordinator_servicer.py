"""What the servicer asks of the coordinator core by itself."""

import asyncio
from contextlib import suppress

from duemq.protocol.route import RouteCache
from duemq_server.broker.edge.coordinator_servicer import CoordinatorServicer
from duemq_server.broker.groups.coordinator import Coordinator
from duemq_server.broker.groups.group_table import GroupTable
from duemq_server.broker.slices import Slices
from duemq_server.broker.store.offsets import Offsets
from tests.service.running_cluster import until
from tests.unit.broker.groups.coordinating import T0, TIMEOUT_MS, hello


class Kept:
    """A GroupStore that never refuses."""

    async def save(self, groups: GroupTable) -> tuple[()]:
        groups.snapshot()
        return ()


async def test_a_session_that_is_over_ends_though_rebalances_of_others_come_before_it() -> None:
    """Their time is none that this broker slept, for which sessions would be prolonged: neither one
    that is over before the wait for their turn, nor one that is over meanwhile."""
    now_ms = T0
    coordinator = Coordinator("b1", session_timeout_ms=TIMEOUT_MS)
    coordinator.set_routes({}, ["b1"], T0)
    coordinator.enter(hello("m1"), T0)
    coordinator.enter(hello("m2"), T0 + 2_000)
    servicer = CoordinatorServicer(
        coordinator, RouteCache(), Offsets(), Kept(), asyncio.Event(), lambda: now_ms
    )
    begun, over = asyncio.Event(), asyncio.Event()

    async def take_long(_: Slices) -> None:
        begun.set()
        await over.wait()

    rebalancer = servicer._rebalancer
    rebalancer.post(take_long)
    running = asyncio.create_task(servicer.run())
    try:
        await begun.wait()
        now_ms = T0 + TIMEOUT_MS
        servicer._earlier.set()  # a look at the clock
        await until(lambda: bool(rebalancer._waiting))
        now_ms += 5_000
        over.set()
        await until(lambda: not coordinator.group("g").members)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
