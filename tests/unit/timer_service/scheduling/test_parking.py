from unittest.mock import Mock

import pytest

from duemq.errors import InvariantError
from duemq_server.timer_service.disk import housekeeping
from duemq_server.timer_service.scheduling import dispatch, parking, scheduler
from tests.property.timer_world import LIMITS, START_MS, TOPICS, World
from tests.unit.timer_service.scheduling.test_scheduler import HOUR_MS, fire, world_with


def test_timers_of_a_dead_target_leave_memory_and_hold_up_no_other() -> None:
    world = World()
    world.set_topics(["any"])
    for _ in range(10):
        world.broker.accept([START_MS] * 20, 100, "keyed")
        world.ingest(1)
        world.tick()
        world.sync()
        while world.housekeep():
            pass
    assert len(world.scheduler.near) <= LIMITS.near_rows_max
    assert world.scheduler.segments.parked()

    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    while world.housekeep():
        pass
    assert fire(world) == [200]
    world.kill()
    world.drain()


def test_large_timers_of_a_dead_target_hold_up_no_other() -> None:
    """Too few to be worth a flush, but memory is full of them."""
    world = World()
    world.set_topics(["any"])
    world.broker.accept([START_MS] * 3, LIMITS.near_bytes_max // 3, "keyed")
    world.ingest(1)
    world.tick()
    world.broker.accept([START_MS + 100], 10, "any")
    world.ingest(1)
    world.now_ms += 100
    while world.housekeep():
        pass

    assert fire(world) == [3]


def herd(world: World, count: int) -> None:
    """So many timers for one queue, due within some milliseconds from now on."""
    due_ms = [world.now_ms + 1 + n // 4 for n in range(count)]
    world.broker.accept(due_ms, 100, "keyed")
    world.ingest(1)


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a hundred timers fill a lane."""
    monkeypatch.setattr(scheduler, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(dispatch, "SMALL_ROWS", 1)


def test_a_herd_at_a_busy_broker_comes_in_due_order_and_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_batches(monkeypatch)
    world = World()
    herd(world, 99)
    came: list[int] = []
    for n in range(100):
        world.now_ms += 10
        if n % 4 != 3:
            world.tick()
            world.sync()
        else:  # answers come now and then
            came += fire(world)
        world.housekeep()
        assert not world.scheduler.segments.parked()
    assert came == list(range(99))


def test_what_is_due_on_disk_waits_there_behind_a_herd_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(housekeeping, "BACKLOG", 30)
    small_batches(monkeypatch)
    world = World()
    world.broker.accept([START_MS + 20_000] * 10, 100, "keyed")
    world.ingest(1)
    world.flush()
    world.now_ms += 15_000
    herd(world, 80)
    world.now_ms += 5_000
    world.tick()
    while world.housekeep():
        pass
    assert world.scheduler.segments.pending == 10
    came = []
    while len(came) < 90:
        world.now_ms += 10
        came += fire(world)
        world.housekeep()
    assert came[:60] == [*range(10, 70)]
    assert sorted(came) == [*range(90)]


def test_what_comes_while_a_herd_fills_memory_gets_the_next_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_batches(monkeypatch)
    world = World()
    herd(world, 90)
    world.now_ms += 30
    world.tick()  # its lane is full
    assert world.scheduler.near.bytes > 0.9 * LIMITS.near_bytes_max
    world.broker.accept([world.now_ms], 1_000, "any")
    world.ingest(1)
    while world.housekeep():
        pass
    assert world.scheduler.tiers.memtable.rows == 1  # on disk it would wait behind the herd's
    world.drain()


def test_many_targets_leave_memory_and_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job for each took 40 s while a broker with 4,000 queues was away, and all that was on disk
    waited for as long; and 24 s when it was back."""
    world = World()
    topics = [f"topic-{number}" for number in range(40)]
    world.set_topics(["any"])
    for topic in topics:
        monkeypatch.setitem(TOPICS, topic, 1)
        world.broker.accept([START_MS, START_MS], 10, topic)
    world.ingest(40)
    world.tick()
    world.sync()
    jobs = jobs_of(world)
    assert 1 <= jobs <= 3
    assert len(world.scheduler.segments.parked()) > 10
    world.checkpoint()
    world.kill()
    world.set_topics([*topics, "any"])
    for _ in range(20):
        fire(world)
    jobs = jobs_of(world)
    assert 1 <= jobs <= 3
    assert not world.scheduler.segments.parked()
    world.drain()
    assert set(world.broker.delivered) == set(range(80))


def test_what_does_not_go_is_looked_at_once_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 queues of a broker that is away a tick took 50 ms: it looked at all of them again
    after each batch for another one."""
    small_batches(monkeypatch)
    world = World()
    topics = [f"topic-{number}" for number in range(40)]
    for topic in topics:
        monkeypatch.setitem(TOPICS, topic, 1)
        world.broker.accept([START_MS], 10, topic)
    world.broker.accept([START_MS], 10, "any")
    world.ingest(41)
    world.set_topics(["any"])
    fire(world)  # a lane begins with one batch
    world.broker.accept([START_MS] * 30, 10, "any")
    world.ingest(1)
    choose = Mock(wraps=world.scheduler.dispatcher.choose)
    monkeypatch.setattr(world.scheduler.dispatcher, "choose", choose)
    fired = world.scheduler.ledger.fired
    world.tick()

    assert world.scheduler.ledger.fired - fired > 2 * 3  # more than two batches
    assert choose.call_count < 2 * 40


def with_many_stuck(monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[str]]:
    """Two timers for each of these topics are due, and nobody serves them."""
    world = World()
    topics = [f"topic-{number}" for number in range(40)]
    for topic in topics:
        monkeypatch.setitem(TOPICS, topic, 1)
        world.broker.accept([START_MS] * 2, 10, topic)
    world.ingest(40)
    world.set_topics(["any"])
    world.tick()
    return world, topics


def test_what_is_stuck_is_not_looked_at_again_until_it_may_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 100,000 queues of brokers that are away each tick was 100 ms late, for everybody."""
    world, topics = with_many_stuck(monkeypatch)
    choose = Mock(wraps=world.scheduler.dispatcher.choose)
    monkeypatch.setattr(world.scheduler.dispatcher, "choose", choose)

    assert fire(world) == []
    world.broker.accept([START_MS] * 3, 10, topics[0])
    world.broker.accept([START_MS] * 3, 10, "any")
    world.ingest(2)
    assert fire(world) == [83, 84, 85]
    assert choose.call_count < 10

    monkeypatch.setattr(scheduler, "SLEEPS_MAX", 9)
    choose.reset_mock()
    world.set_topics(["any", topics[39]])
    assert fire(world) == []
    assert choose.call_count < 12
    assert world.scheduler.next_tick_ms() <= world.now_ms
    delivered = [fire(world) for _ in range(5)]
    assert [each for each in delivered if each] == [[78, 79]]


def test_parked_timers_to_which_nothing_can_go_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 100,000 queues of brokers that are away each look, every second, held up what was due
    for a quarter of one."""
    world, topics = with_many_stuck(monkeypatch)
    while world.housekeep():
        pass
    assert len(world.scheduler.segments.parked()) > 20
    monkeypatch.setattr(parking, "LOOKS_MAX", 15)
    for _ in range(3):
        assert not world.housekeep()
    choose = Mock(wraps=world.scheduler.dispatcher.choose)
    monkeypatch.setattr(world.scheduler.dispatcher, "choose", choose)

    assert not world.housekeep()
    assert choose.call_count == 0

    world.set_topics(["any", *topics[30:]])
    waits = world.directory.housekeeper.next_look_ms
    for _ in range(2):
        assert not world.housekeep()
        assert waits(world.now_ms) == world.now_ms + housekeeping.PRESSED_MS
    assert world.housekeep()
    world.drain()
    assert set(world.broker.delivered) == set(range(80))


def test_of_many_stuck_targets_some_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "LOOKS_MAX", 3)
    world = World()
    for number, count in enumerate((1, 1, 5, 9)):
        monkeypatch.setitem(TOPICS, f"topic-{number}", 1)
        world.broker.accept([START_MS] * count, 10, f"topic-{number}")
    world.ingest(4)
    world.set_topics([])
    world.tick()

    numbers = world.scheduler.numbers
    stuck = [numbers.targets[each].topic for each in world.scheduler.parking.stuck(START_MS)]
    assert stuck == ["topic-2", "topic-0", "topic-1"]


def jobs_of(world: World) -> int:
    """How many there are to do."""
    jobs = 0
    while world.housekeep():
        jobs += 1
    return jobs


def test_nothing_is_taken_to_be_parked_while_a_flush_runs() -> None:
    world = world_with(0, HOUR_MS)
    world.set_topics([])
    world.tick()
    flush = world.scheduler.tiers.begin_flush(START_MS)
    [target] = world.scheduler.dispatcher.due.turns()
    with pytest.raises(InvariantError, match="a flush is running"):
        world.scheduler.parking.begin([target], START_MS)

    assert world.scheduler.dispatcher.due.waiting == 1
    flush.run()
    world.scheduler.tiers.end_flush(flush)
    world.set_topics(["any"])
    assert fire(world) == [0]


def test_parked_timers_come_back_although_memory_is_full_of_what_is_due_later() -> None:
    """As after a clock that was set back: what was near is not any more, and lies there still."""
    world = World()
    world.set_topics(["any"])
    for _ in range(10):
        world.broker.accept([START_MS - 2 * HOUR_MS] * 20, 100, "keyed")
        world.ingest(1)
        world.tick()
        world.sync()
        while world.housekeep():
            pass
    assert world.scheduler.segments.parked()
    for _ in range(LIMITS.near_rows_max):
        world.broker.accept([START_MS + 500], 10, "any")
        world.ingest(1)
    world.sync()
    world.now_ms -= HOUR_MS
    world.set_topics(["any", "keyed"])
    for _ in range(10):
        world.housekeep()
    assert sorted(fire(world)) == list(range(200))
    world.scheduler.check()
