import dataclasses

from tests.property.timer_world import LIMITS, START_MS, World
from tests.unit.timer_service.scheduling.test_scheduler import HOUR_MS, fire, world_with


def test_sooner_timers_find_room_after_the_clock_went_back() -> None:
    world = World()
    world.now_ms += HOUR_MS
    world.tick()
    world.now_ms -= HOUR_MS
    world.broker.accept([START_MS + 9_000] * LIMITS.near_rows_max, 10, "any")
    world.ingest(1)
    world.broker.accept([START_MS + 1_000] * 20, 10, "any")
    world.ingest(1)
    for _ in range(10):
        world.now_ms += 100
        while world.housekeep():
            pass

    assert fire(world) == list(range(100, 120))


def test_a_piece_that_finds_no_room_is_fired_all_the_same() -> None:
    """Memory is not short, nothing in it can give way, and a piece of the memtable is too large."""
    limits = dataclasses.replace(LIMITS, memtable_bytes_max=1 << 20)
    world = World(limits=limits)
    world.set_topics(["any"])
    world.broker.accept([START_MS], 5_000, "keyed")
    world.ingest(1)
    world.tick()
    world.broker.accept([START_MS + 11_000] * 8, 1_000, "any")
    world.ingest(1)
    world.now_ms += 11_000
    while world.housekeep():
        pass

    assert fire(world) == list(range(1, 9))


def test_overdue_counts_what_is_due_wherever_it_lies() -> None:
    world = world_with(HOUR_MS, 2 * HOUR_MS)
    assert world.scheduler.tiers.overdue(START_MS + HOUR_MS) == 1

    flush = world.scheduler.tiers.begin_flush(START_MS)
    assert world.scheduler.tiers.overdue(START_MS + HOUR_MS) == 1
    flush.run()
    world.scheduler.tiers.end_flush(flush)
    assert world.scheduler.tiers.overdue(START_MS + HOUR_MS) == 1
    world.now_ms += 2 * HOUR_MS
    world.set_topics([])
    while world.housekeep():
        pass
    world.tick()
    assert world.scheduler.dispatcher.due.waiting == 2
    assert world.scheduler.tiers.overdue(world.now_ms) == 2


def test_the_next_due_time_is_that_of_what_is_written_out_or_waits_too() -> None:
    world = world_with(HOUR_MS, topic="keyed")
    tiers = world.scheduler.tiers
    flush = tiers.begin_flush(START_MS)
    assert tiers.next_due_ms() == START_MS + HOUR_MS
    flush.run()
    tiers.end_flush(flush)
    world.set_topics(["any"])
    world.now_ms += HOUR_MS
    while world.housekeep():
        pass
    world.tick()
    assert world.scheduler.dispatcher.due.waiting == 1
    assert tiers.next_due_ms() == START_MS + HOUR_MS

    [target] = world.scheduler.dispatcher.due.turns()
    park = world.scheduler.parking.begin([target], world.now_ms)
    assert park is not None
    park.run()
    tiers.end_flush(park)
    assert world.scheduler.segments.parked()
    assert tiers.next_due_ms() == START_MS + HOUR_MS
