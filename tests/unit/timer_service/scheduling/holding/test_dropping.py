"""A hold that ends without some of its timers: which go, whatever lies between."""

import pytest

from duemq.errors import InvalidArgument
from duemq_server.timer_service.far.far_segments import Flush
from duemq_server.timer_service.scheduling.holding import changes, dropping
from duemq_server.timer_service.scheduling.holding.dropping import Backlogged, Dropping, Sifting
from duemq_server.timer_service.timers.hold_entry import (
    DROP_OLDER,
    NEWEST,
    RESUMING,
    Hold,
    HoldChange,
    decode,
    encode,
)
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from duemq_server.timer_service.views.listing import Page, PageQuery
from tests.property.timer_world import SOURCE, START_MS, World
from tests.unit.timer_service.scheduling.holding.test_holds import (
    accept,
    figures,
    go,
    hold,
    pass_time,
    restart,
    schedule,
    world,
)

__all__ = ["world"]


def drop(world: World, limit: int = 3) -> None:
    """As the shell does, but for the last step."""
    there = world.scheduler.holds.resuming()
    assert there is not None
    sifting, after = Sifting(there, world.scheduler.holds.within(there)), None
    while not sifting.over:
        wanted = PageQuery(there.topic, 0, sifting.to_ms, limit, after)
        page = Page(world.scheduler, wanted, sifting.make, wants_all=False)
        page.run()
        listed = page.still_pending(world.scheduler)
        after = page.next
        handles = [
            Backlogged(Cancelled(SourceId(at.store_id, at.queue_id), at.offset, at.due_ms), made)
            for at, _, made in listed
        ]
        gone = sifting.take(handles, last=after is None)
        dropped = Dropping(world.scheduler, gone)
        while not dropped.advance(world.now_ms):
            query = dropped.query()
            look_up = world.look_up([query])
            look_up.run()
            world.scheduler.segments.looked_up(look_up)
            dropped.answered(query)


def resume_some(world: World, policy: int, older_ms: int = 0) -> bool:
    return changes.resume_some(
        world.scheduler, world.now_ms, "any", "", policy=policy, older_ms=older_ms
    )


def end(world: World) -> None:
    assert changes.resume(world.scheduler, world.now_ms, "any", "")
    world.holds.now = frozenset()
    go(world)


def dropped(world: World) -> int:
    world.scheduler.check()
    [ledger] = [each for name, each in world.scheduler.topics if name == "any"]
    assert ledger.dropped == world.scheduler.ledger.dropped
    assert world.scheduler.ledger.cancelled == 0
    return ledger.dropped


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("parked", [False, True])
def test_what_is_too_old_is_dropped_over_restarts(world: World, parked: bool, saved: bool) -> None:
    hold(world, "any")
    accept(world, [100, 200, 300, 900, 50_000])
    pass_time(world, 1_000)
    if parked:
        [target] = world.scheduler.dispatcher.due.turns()
        job = world.scheduler.parking.begin([target], world.now_ms)
        assert isinstance(job, Flush)
        world.run(job)
    assert resume_some(world, DROP_OLDER, 500)
    assert resume_some(world, DROP_OLDER, 500)
    with pytest.raises(InvalidArgument, match="another policy"):
        resume_some(world, NEWEST)
    restart(world, saved=saved)
    go(world)
    assert figures(world) == (0, 5, 4)
    drop(world)
    assert dropped(world) == 3
    restart(world, saved=saved)
    assert dropped(world) == 3
    drop(world)
    assert dropped(world) == 3
    world.keyed.gone.update(range(3))
    assert world.cancel_handles([Cancelled(SOURCE, 0, START_MS + 100)]) == ["CANCELLED"]
    end(world)
    assert figures(world) == (1, 1, 0)
    pass_time(world, 60_000)
    assert figures(world) == (2, 0, 0)


@pytest.mark.parametrize("policy", [DROP_OLDER, NEWEST])
@pytest.mark.parametrize("prefix", ["", "a/"])
def test_what_a_hold_of_longer_keys_keeps_back_is_not_dropped(
    world: World, prefix: str, policy: int
) -> None:
    """Whoever holds it decides on it; what it is about is gone for good otherwise."""
    for held in ("", "a/", "a/1"):
        hold(world, "any", held)
    schedule(world, "a/1x", "a/1y", "a/2", wait=5)
    pass_time(world, 1_000)
    scheduler, now_ms = world.scheduler, world.now_ms
    assert changes.resume_some(scheduler, now_ms, "any", prefix, policy=policy, older_ms=0)
    drop(world)
    # Of one key's hold the topic's is no part: it was asked for by name.
    assert dropped(world) == (prefix == "a/" and policy == DROP_OLDER)
    assert changes.resume_some(scheduler, now_ms, "any", "a/1", policy=DROP_OLDER, older_ms=0)
    assert changes.resume(scheduler, now_ms, "any", prefix)
    drop(world)
    assert dropped(world) == 2 + (prefix == "a/" and policy == DROP_OLDER)


def test_held_again_it_stays(world: World) -> None:
    hold(world, "any")
    accept(world, [10, 20])
    pass_time(world, 1_000)
    resume_some(world, DROP_OLDER)
    assert not changes.hold(world.scheduler, world.now_ms, "any", "")
    assert world.scheduler.holds.resuming() is None
    go(world)
    assert figures(world) == (0, 2, 2)
    assert not changes.resume_some(world.scheduler, world.now_ms, "none", "", NEWEST, 0)


def found(number: int, key: str) -> Backlogged:
    return Backlogged(Cancelled(SOURCE, number, number), key)


@pytest.mark.parametrize("keys_max", [1, 2, 3, 1_000])
@pytest.mark.parametrize("size", [1, 7])
def test_of_a_key_the_newest_goes(
    keys_max: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropping, "KEYS_MAX", keys_max)
    backlog = [found(number, f"k{number * 7 % 10}") for number in range(40)]
    sifting = Sifting(Hold(1, "t", "", 0, NEWEST, 100))
    gone: set[Cancelled] = set()
    while not sifting.over:
        left = [each for each in backlog if each.handle not in gone]
        for start in range(0, len(left), size):
            last = start + size >= len(left)
            gone.update(sifting.take(left[start : start + size], last=last))
    newest = {each.key: each.handle for each in backlog}
    assert gone == {each.handle for each in backlog} - set(newest.values())


def test_an_entry_and_back() -> None:
    change = HoldChange(RESUMING, Hold(7, "t", "p/", 0, DROP_OLDER, START_MS, 5))
    assert decode(memoryview(encode(change))) == change


def test_nothing_that_is_nowhere_is_dropped(world: World) -> None:
    asked = Dropping(world.scheduler, [Cancelled(SOURCE, 5, START_MS)])
    assert asked.advance(world.now_ms)
    assert world.scheduler.ledger.dropped == 0
