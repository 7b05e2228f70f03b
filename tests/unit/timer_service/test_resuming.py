"""What who resumes a hold with a policy is told."""

import asyncio
from typing import Any

from duemq_server.timer_service.resuming import Resuming
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.timers.hold_entry import NEWEST
from tests.property.timer_world import World


class Slow:
    """An inspector that reads for ever."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def page(self, *_: object, wants_all: bool) -> Any:
        self.reads.set()
        await asyncio.Event().wait()


async def test_what_a_shard_that_stops_leaves_held_is_not_done() -> None:
    """Its next start, or another leader, goes on with it."""
    world, inspector = World(), Slow()
    changes.hold(world.scheduler, 0, "any", "")
    changes.resume_some(world.scheduler, 0, "any", "", NEWEST, 0)
    to: Any = inspector
    nothing: Any = None
    resuming = Resuming(world.scheduler, to, nothing, lambda: 0, nothing)
    resuming.start()
    asked = asyncio.create_task(resuming.wait(600.0))
    await inspector.reads.wait()
    resuming.halt()
    assert not await asked
    assert world.scheduler.holds.resuming() is not None
    await resuming.stop()
