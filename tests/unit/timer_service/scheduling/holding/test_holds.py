"""Timers that are kept back: nothing of them is dispatched, and nothing of them is lost."""

from dataclasses import replace

import pytest

from duemq.errors import Overloaded
from duemq_server.timer_service.far.far_segments import Flush
from duemq_server.timer_service.scheduling import stuck
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.holds import HOLDS_MAX
from duemq_server.timer_service.timers.hold_entry import Hold, HoldChange, decode, encode
from duemq_server.timer_service.timers.keyed import TimerKey
from tests.property.timer_world import LIMITS, START_MS, World
from tests.unit.timer_service.scheduling.keyed.test_changes import FAR_MS


@pytest.fixture
def world() -> World:
    world = World()
    world.set_away(set())
    return world


def hold(world: World, topic: str, prefix: str = "") -> bool:
    before = world.holds.now
    world.holds.hold(topic, prefix)
    return world.holds.now != before


def resume(world: World, topic: str, prefix: str = "") -> bool:
    before = world.holds.now
    world.holds.resume(topic, prefix)
    return world.holds.now != before


def accept(world: World, waits: list[int], topic: str = "any") -> None:
    world.broker.accept([world.now_ms + wait for wait in waits], 10, topic)
    world.ingest(100)


def schedule(world: World, *keys: str, wait: int) -> None:
    world.keyed.schedule(keys, [wait] * len(keys), 10, "any", if_absent=False)
    world.keyed.finish_all()


def pass_time(world: World, ms: int = FAR_MS) -> None:
    """Until all that is due then is in memory, and went as far as it may."""
    world.now_ms += ms
    go(world)


def go(world: World) -> None:
    for _ in range(50):
        world.tick()
        world.sync()
        world.send()
        if not world.housekeep() and world.scheduler.next_tick_ms() > world.now_ms:
            return
    raise AssertionError("it does not come to rest")


def figures(world: World) -> tuple[int, int, int]:
    """Fired, pending, held."""
    world.scheduler.check()
    ledger = world.scheduler.ledger
    return ledger.fired, ledger.pending, changes.waiting(world.scheduler).total()


def restart(world: World, *, saved: bool) -> None:
    world.sync()
    if saved:
        world.checkpoint()
    world.kill()


@pytest.mark.parametrize("saved", [False, True])
def test_a_held_topic_waits_over_a_restart_and_others_go_on(world: World, saved: bool) -> None:
    accept(world, [100, 5_000, FAR_MS, 3 * FAR_MS])
    accept(world, [100], "keyed")
    assert hold(world, "any")
    assert not hold(world, "any")
    pass_time(world)
    assert figures(world) == (1, 4, 3)

    restart(world, saved=saved)
    pass_time(world, 1)
    assert figures(world) == (1, 4, 3)
    assert [each.topic for each in world.scheduler.holds] == ["any"]
    assert resume(world, "any")
    assert not resume(world, "any")
    go(world)
    assert figures(world) == (4, 1, 0)
    restart(world, saved=saved)
    world.drain()
    assert world.scheduler.ledger.fired == 5


@pytest.mark.parametrize("saved", [False, True])
def test_keys_are_held_by_their_beginning(world: World, saved: bool) -> None:
    for key in ("a/1", "a/2", "b/1", "a"):
        schedule(world, key, wait=500)
    accept(world, [500])
    assert hold(world, "any", "a/")
    pass_time(world, 1_000)
    assert figures(world) == (3, 2, 2)

    restart(world, saved=saved)
    pass_time(world, 1)
    assert figures(world) == (3, 2, 2)
    world.keyed.cancel([TimerKey("any", "a/1")])
    assert figures(world) == (3, 1, 1)
    world.keyed.reschedule([TimerKey("any", "a/2")], [9])
    assert figures(world) == (3, 1, 0)
    pass_time(world, 100)
    assert figures(world) == (3, 1, 1)
    assert resume(world, "any", "a/")
    go(world)
    assert figures(world) == (4, 0, 0)


def test_what_waited_for_its_broker_when_it_was_held_is_held(world: World) -> None:
    world.set_away({"b1", "b2"})
    schedule(world, "a/1", wait=5)
    accept(world, [5])
    world.now_ms += 100
    world.tick()
    hold(world, "any", "a/")
    world.set_away(set())
    go(world)
    assert figures(world) == (1, 1, 1)


def test_of_two_holds_the_longer_one_counts(world: World) -> None:
    schedule(world, "a/1", "a/2", "b", wait=5)
    hold(world, "any", "a/")
    hold(world, "any", "a/1")
    hold(world, "any")
    pass_time(world, 100)
    assert figures(world) == (0, 3, 3)
    resume(world, "any")
    go(world)
    assert figures(world) == (1, 2, 2)
    resume(world, "any", "a/")
    go(world)
    assert figures(world) == (2, 1, 1)
    resume(world, "any", "a/1")
    go(world)
    assert figures(world) == (3, 0, 0)


@pytest.mark.parametrize("prefix", ["", "a/"])
def test_what_is_held_is_parked_when_memory_is_short(prefix: str) -> None:
    world = World(limits=replace(LIMITS, near_rows_max=60))
    world.set_away(set())
    hold(world, "any", prefix)
    for part in range(10):
        keys = [f"a/{part}-{n}" for n in range(20)]
        schedule(world, *keys, wait=50)
        pass_time(world, 60)
    assert world.scheduler.segments.parked()
    assert figures(world) == (0, 200, 200)
    accept(world, [5], "keyed")
    pass_time(world, 10)
    assert figures(world) == (1, 200, 200)
    restart(world, saved=True)
    pass_time(world, 1)
    assert figures(world) == (1, 200, 200)
    reasons = {each.reason for each in stuck.find(world.scheduler)}
    assert [each for each in reasons if "held" in each]
    resume(world, "any", prefix)
    world.drain()
    assert figures(world) == (201, 0, 0)


def hold_and_park(world: World) -> None:
    """The timers of the keys `a/1` and `a/2`."""
    hold(world, "any", "a/")
    schedule(world, "a/1", "a/2", wait=5)
    pass_time(world, 10)
    [room] = world.scheduler.dispatcher.due.turns()
    job = world.scheduler.parking.begin([room], world.now_ms)
    assert isinstance(job, Flush)
    world.run(job)


def test_a_hold_that_is_made_again_keeps_what_is_parked(world: World) -> None:
    hold_and_park(world)
    resume(world, "any", "a/")
    hold(world, "any", "a/")
    go(world)
    assert figures(world) == (0, 2, 2)
    assert not world.scheduler.segments.parked()


def test_what_is_parked_goes_though_more_than_a_tick_takes_waited_in_memory() -> None:
    """It was taken for held until something else woke it, with the next connection, say."""
    world = World(limits=replace(LIMITS, tick_rows_max=7))
    world.set_away(set())
    hold_and_park(world)
    schedule(world, *(f"a/of-{n}" for n in range(10)), wait=5)
    pass_time(world, 10)
    assert figures(world) == (0, 12, 12)

    resume(world, "any", "a/")
    assert not world.housekeep()  # before the first tick

    pass_time(world, 100)
    world.housekeep()
    pass_time(world, 100)
    assert figures(world) == (12, 0, 0)


def test_what_was_dispatched_before_is_on_its_way(world: World) -> None:
    accept(world, [0])
    world.tick()
    hold(world, "any")
    go(world)
    assert figures(world) == (1, 0, 0)
    assert world.broker.delivered[0] == 1


def test_a_resumed_backlog_holds_up_no_other_topic() -> None:
    world = World(limits=replace(LIMITS, near_rows_max=5_000, near_bytes_max=1 << 20))
    world.set_away(set())
    hold(world, "any")
    for _ in range(10):
        accept(world, [1] * 300)
    pass_time(world, 10)
    resume(world, "any")
    accept(world, [0], "keyed")
    world.tick()
    assert {each.id.topic for each in world.scheduler.dispatcher.lanes()} >= {"keyed"}
    world.drain()
    assert world.scheduler.ledger.fired == 3_001


def test_holds_are_bounded(world: World) -> None:
    for number in range(HOLDS_MAX):
        hold(world, f"t{number}")
    with pytest.raises(Overloaded, match=f"{HOLDS_MAX} holds"):
        changes.hold(world.scheduler, world.now_ms, "any", "")
    assert not hold(world, "t0")
    resume(world, "t0")
    assert hold(world, "any")


def test_an_entry_and_back() -> None:
    for topic, prefix in (("t", ""), ("reminders", "kündigung/")):
        change = HoldChange(2, Hold(7, topic, prefix, START_MS))
        body = encode(change)
        assert len(body) % 8 == 0
        assert decode(memoryview(body)) == change
