"""What who resumes a hold with a policy is told."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import Corrupt, Unavailable
from duemq.v1 import timer_holds_pb2
from duemq_server.timer_service import resuming as resuming_module
from duemq_server.timer_service.edge.holds_servicer import TimerHoldsServicer
from duemq_server.timer_service.resuming import Resuming
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.timers.hold_entry import NEWEST
from duemq_server.timer_service.views.listing import PageQuery
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
    hold = world.scheduler.holds.resuming()
    assert hold is not None
    asked = asyncio.create_task(resuming.wait(hold, 600.0))
    await inspector.reads.wait()
    resuming.halt()
    assert not await asked
    assert world.scheduler.holds.resuming() == hold
    await resuming.stop()


class Damaged:
    """An inspector that cannot read one topic's timers; of the others none fell due."""

    async def page(self, wanted: PageQuery, *_: object, wants_all: bool) -> Any:
        if wanted.topic == "bad":
            raise Corrupt("a block")
        return [], None


async def test_what_cannot_be_read_of_one_topic_holds_up_no_other() -> None:
    scheduler = World().scheduler
    holds = scheduler.holds
    for topic in ("bad", "good"):
        changes.hold(scheduler, 0, topic, "")
        changes.resume_some(scheduler, 0, topic, "", NEWEST, 0)
    bad = holds.get("bad", "")
    good = holds.get("good", "")
    assert bad is not None
    assert good is not None

    async def durable(_: int) -> None: ...

    to: Any = Damaged()
    log_loop: Any = SimpleNamespace(durable=durable)
    nothing: Any = None
    resuming = Resuming(scheduler, to, log_loop, lambda: 0, nothing)
    for _ in range(2):  # asked again, it says the same
        resuming.start()
        with pytest.raises(Corrupt, match="a block"):
            await resuming.wait(bad, 600.0)
        assert await resuming.wait(good, 600.0)
        assert [each.topic for each in holds] == ["bad"]
    await resuming.stop()


async def test_who_asks_and_goes_away_is_served_all_the_same() -> None:
    """Nobody else would go on with it: it would be held until the next start."""
    scheduler = World().scheduler
    changes.hold(scheduler, 0, "any", "")
    asked = asyncio.Event()

    async def durable(_: int) -> None: ...

    class Shard:
        """The answer to whoever asks waits for ever, for the disk, say."""

        def __init__(self) -> None:
            self.scheduler = scheduler
            self.inspector = SimpleNamespace(pending_of=lambda topic: 0)
            to: Any = Damaged()
            log_loop: Any = SimpleNamespace(durable=durable)
            nothing: Any = None
            self.resuming = Resuming(scheduler, to, log_loop, lambda: 0, nothing)

        async def change(self, change: Callable[..., bool], *, makes_room: bool) -> None:
            change(scheduler, 0)
            self.hold = scheduler.holds.resuming()
            asked.set()
            await asyncio.Event().wait()

    shard: Any = Shard()
    links: Any = SimpleNamespace(check_may_serve=lambda: None)
    servicer = TimerHoldsServicer(shard, links)
    request = timer_holds_pb2.ResumeTimersRequest(topic="any", policy=timer_holds_pb2.RESUME_NEWEST)
    call = asyncio.create_task(servicer.ResumeTimers(request, None))
    await asked.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await shard.resuming.wait(shard.hold, 600.0)
    await shard.resuming.stop()


class NoFileLeft:
    """An inspector that may open no file at first."""

    def __init__(self) -> None:
        self.tries = 0

    async def page(self, *_: object, wants_all: bool) -> Any:
        self.tries += 1
        if self.tries < 3:
            raise Unavailable("open: too many open files")
        return [], None


@pytest.mark.parametrize("retry_s", [0.0, 3_600.0])
async def test_too_many_open_files_are_waited_for(
    retry_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as often as something is logged: a look costs, and others' entries open no file."""
    monkeypatch.setattr(resuming_module, "RETRY_S", retry_s)
    scheduler, inspector = World().scheduler, NoFileLeft()
    changes.hold(scheduler, 0, "any", "")
    changes.resume_some(scheduler, 0, "any", "", NEWEST, 0)
    hold = scheduler.holds.get("any", "")
    assert hold is not None

    async def durable(_: int) -> None: ...

    async def room() -> None: ...

    failed: list[BaseException] = []
    to: Any = inspector
    log_loop: Any = SimpleNamespace(durable=durable, fail=failed.append)
    resuming = Resuming(scheduler, to, log_loop, lambda: 0, room)
    resuming.start()
    if retry_s:
        assert not await resuming.wait(hold, 0.0)  # it has begun
        assert inspector.tries == 1
    else:
        assert await resuming.wait(hold, 600.0)
        assert len(scheduler.holds) == 0
    assert not failed
    await resuming.stop()
