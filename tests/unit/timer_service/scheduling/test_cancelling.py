"""Cancels: what moves while the disk is looked at, what is remembered of timers that are gone."""

import dataclasses
from collections.abc import Callable

import pytest

from duemq.errors import Corrupt
from duemq_server.storage.errors import LogFull
from duemq_server.timer_service.far import tombstones
from duemq_server.timer_service.scheduling.cancelling import (
    CANCELLED,
    FIRED,
    NOT_YET,
    UNKNOWN,
    Cancelling,
)
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from tests.property.timer_world import LIMITS, SOURCE, START_MS, World

HOUR_MS = 3_600_000
FAR_MS = 20_000  # behind the near window


def flush(world: World) -> None:
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))


def far_world(*waits: int) -> World:
    """A shard with timers in blocks."""
    world = World()
    world.broker.accept([START_MS + wait for wait in waits], 10, "any")
    world.ingest(1)
    flush(world)
    return world


def handle(world: World, offset: int) -> Cancelled:
    return Cancelled(SOURCE, offset, world.broker.due_ms[offset])


def asked(world: World, *offsets: int) -> Cancelling:
    """Cancels whose look-up is done, and not yet taken over."""
    cancelling = Cancelling(world.scheduler, [handle(world, offset) for offset in offsets])
    assert not cancelling.advance(world.now_ms)
    query = cancelling.query()
    look_up = world.look_up([query])
    look_up.run()
    world.scheduler.segments.looked_up(look_up)
    cancelling.answered(query)
    return cancelling


def load(world: World) -> None:
    """The clock moves on until the first timer comes into memory."""
    world.now_ms += FAR_MS - LIMITS.near_window_ms + 5_000
    while world.housekeep():
        pass
    assert world.scheduler.near.pending


def nothing_comes(world: World) -> None:
    nothing_comes_but(world)


def nothing_comes_but(world: World, *messages: int) -> None:
    world.sync()
    world.drain()
    assert set(world.broker.delivered) == set(messages)


def test_a_timer_that_is_loaded_during_the_look_up_is_cancelled_in_memory() -> None:
    world = far_world(FAR_MS)
    cancelling = asked(world, 0)
    load(world)

    assert cancelling.advance(world.now_ms)
    assert world.cancelled(cancelling, [handle(world, 0)]) == [CANCELLED]
    assert world.scheduler.tombstones.unmet == 0
    nothing_comes(world)


def test_a_timer_that_is_loaded_and_flushed_again_during_the_look_up_is_looked_for_again() -> None:
    world = far_world(FAR_MS)
    cancelling = asked(world, 0)
    load(world)
    world.scheduler.tiers.evict(world.now_ms + 1)
    flush(world)

    assert not cancelling.advance(world.now_ms)
    query = cancelling.query()
    look_up = world.look_up([query])
    look_up.run()
    cancelling.answered(query)
    assert cancelling.advance(world.now_ms)
    assert world.cancelled(cancelling, [handle(world, 0)]) == [CANCELLED]
    nothing_comes(world)


def test_a_timer_that_left_a_block_and_lies_in_a_younger_one_is_cancelled_there() -> None:
    world = far_world(FAR_MS, FAR_MS + 10_000)  # the second one keeps the block
    load(world)
    world.scheduler.tiers.evict(world.now_ms + 1)
    flush(world)
    assert len(world.scheduler.segments.blocks()) == 2

    assert world.cancel_handles([handle(world, 0)]) == [CANCELLED]
    assert world.scheduler.tombstones.unmet == 1
    nothing_comes_but(world, 1)


def test_a_timer_that_fires_during_the_look_up_has_fired() -> None:
    world = far_world(FAR_MS)
    cancelling = asked(world, 0)
    load(world)
    world.now_ms += FAR_MS
    world.tick()

    assert cancelling.advance(world.now_ms)
    assert world.cancelled(cancelling, [handle(world, 0)]) == [FIRED]


def test_a_timer_in_a_block_that_is_being_loaded_is_cancelled() -> None:
    world = far_world(FAR_MS)
    cancelling = asked(world, 0)
    world.now_ms += FAR_MS - LIMITS.near_window_ms + 5_000
    job = world.directory.housekeeper.next_job(world.now_ms)
    assert job is not None
    job.run()

    assert cancelling.advance(world.now_ms)
    assert world.cancelled(cancelling, [handle(world, 0)]) == [CANCELLED]
    world.directory.housekeeper.finish(job, world.now_ms)
    nothing_comes(world)


def test_two_cancels_of_one_timer_at_once_cancel_it_once() -> None:
    world = far_world(FAR_MS)
    first = asked(world, 0, 0)
    second = asked(world, 0)

    for cancelling in (first, second):
        assert cancelling.advance(world.now_ms)
        assert set(cancelling.outcomes() or ()) == {CANCELLED}
    assert world.scheduler.ledger.cancelled == 1
    nothing_comes(world)


def test_cancels_that_wait_for_the_same_look_up_become_one() -> None:
    world = far_world(FAR_MS, FAR_MS)
    first = Cancelling(world.scheduler, [handle(world, 0), handle(world, 1)])
    second = Cancelling(world.scheduler, [handle(world, 1)])
    assert not first.advance(world.now_ms)
    assert not second.advance(world.now_ms)

    first.join(second)
    query = first.query()
    world.look_up([query]).run()
    first.answered(query)

    assert first.advance(world.now_ms)
    assert first.outcomes() == [CANCELLED] * 3
    assert world.scheduler.ledger.cancelled == 2
    nothing_comes(world)


def test_a_list_is_one_entry_of_the_log_and_one_look_at_each_block() -> None:
    world = far_world(*[FAR_MS + n for n in range(20)])
    cancelling = asked(world, *range(20))
    before = world.directory.log.end_position

    assert cancelling.advance(world.now_ms)
    assert cancelling.end - before < 20 * 32 + 64
    assert cancelling.outcomes() == [CANCELLED] * 20
    nothing_comes(world)


def test_a_log_that_is_full_cancels_nothing_and_the_call_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = far_world(FAR_MS)
    cancelling = asked(world, 0)

    def full(*_: object) -> None:
        raise LogFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(world.directory.log, "append", full)
        with pytest.raises(LogFull):
            cancelling.advance(world.now_ms)
    assert world.scheduler.ledger.cancelled == 0
    assert cancelling.advance(world.now_ms)
    assert cancelling.outcomes() == [CANCELLED]


def test_after_a_restart_blocks_are_learnt_by_the_first_look_up_and_then_not_read_in_vain() -> None:
    world = far_world(FAR_MS)
    world.broker.accept([START_MS + FAR_MS], 10, "any")
    world.ingest(2)
    flush(world)
    world.checkpoint()
    world.kill()

    assert world.cancel(0) == CANCELLED
    catalog = world.scheduler.segments.catalog
    [table] = catalog.view().tables
    entries = table.entries
    assert sorted(entries["first"].tolist()) == [0, 1]
    assert entries["last"].tolist() == entries["first"].tolist()
    assert world.cancel(1) == CANCELLED
    nothing_comes(world)


def test_a_block_that_cannot_be_read_is_an_error_for_the_timers_that_may_be_in_it() -> None:
    world = far_world(FAR_MS)
    world.broker.accept([START_MS + 2 * HOUR_MS], 10, "any")
    world.ingest(2)
    flush(world)
    segments = world.scheduler.segments
    [damaged] = [each for each in segments.blocks() if each.next_due_ms == START_MS + FAR_MS]
    world.disk.flip(segments.path(damaged.file), damaged.position + 40)

    first, second = world.cancel_handles([handle(world, 0), handle(world, 1)])

    assert isinstance(first, Corrupt)
    assert damaged.file in str(first)
    assert second == CANCELLED


def test_after_a_restart_a_block_that_cannot_be_read_is_an_error_for_what_may_be_in_it() -> None:
    world = far_world(FAR_MS)
    world.broker.accept([START_MS + 2 * HOUR_MS], 10, "any")
    world.ingest(2)
    flush(world)
    world.checkpoint()
    world.kill()
    segments = world.scheduler.segments
    [damaged] = [each for each in segments.blocks() if each.next_due_ms == START_MS + FAR_MS]
    world.disk.flip(segments.path(damaged.file), damaged.position + 40)

    for _ in range(2):  # it is not learnt, and stays one to be looked at
        first, second = world.cancel_handles([handle(world, 0), handle(world, 1)])
        assert isinstance(first, Corrupt)
        assert second == CANCELLED


def test_of_cancels_that_become_one_each_may_know_something_of_the_same_timer() -> None:
    world = far_world(FAR_MS, FAR_MS + 1)
    handles = [handle(world, 0), handle(world, 1)]
    first = Cancelling(world.scheduler, handles[:1])
    second = Cancelling(world.scheduler, [handles[1], handles[0], handles[1]])
    third = Cancelling(world.scheduler, [Cancelled(SourceId(1, 1), 0, START_MS), handles[0]])
    for each in (first, second, third):
        assert not each.advance(world.now_ms)

    assert (first.join(second), first.join(third)) == (1, 4)
    assert first.outcomes(4, 5) == [NOT_YET]
    assert first.outcomes(3, 5) is None
    query = first.query()
    world.look_up([query]).run()
    first.answered(query)

    assert first.advance(world.now_ms)
    assert first.outcomes() == [CANCELLED] * 4 + [NOT_YET, CANCELLED]
    assert world.scheduler.ledger.cancelled == 2
    nothing_comes(world)


def test_a_source_that_nothing_came_from_yet_is_waited_for() -> None:
    world = World()

    assert world.cancel_handles([Cancelled(SOURCE, 0, START_MS)]) == [NOT_YET]
    assert world.cancel_handles([Cancelled(SourceId(1, 1), 0, START_MS)]) == [NOT_YET]


def fired_world(*due_ms: int, now_ms: int) -> World:
    """A shard that has just fired timers."""
    world = World()
    world.broker.accept(list(due_ms), 10, "any")
    world.ingest(1)
    world.now_ms = now_ms
    world.tick()
    world.sync()
    world.send()
    assert len(world.broker.delivered) == len(due_ms)
    return world


def same(world: World) -> None:
    """Nothing happens to it."""


def saved(world: World) -> None:
    world.checkpoint()
    world.kill()


@pytest.mark.parametrize("then", [same, World.kill, saved])
def test_what_fired_very_late_is_remembered_from_then_on(then: Callable[[World], None]) -> None:
    late_ms = LIMITS.tombstone_keep_ms + HOUR_MS
    world = fired_world(START_MS, now_ms=START_MS + late_ms)
    then(world)

    assert world.cancel(0) == FIRED
    world.now_ms += LIMITS.tombstone_keep_ms - 1
    world.housekeep()
    assert world.cancel(0) == FIRED
    world.now_ms += HOUR_MS
    while world.housekeep():
        pass
    assert world.cancel_handles([handle(world, 0)]) == [UNKNOWN]


@pytest.mark.parametrize("then", [same, World.kill, saved])
def test_what_fired_has_fired_though_the_clock_went_back(then: Callable[[World], None]) -> None:
    world = fired_world(START_MS + 500, now_ms=START_MS + 500)
    world.now_ms -= 2 * HOUR_MS
    then(world)

    assert world.cancel_handles([handle(world, 0)]) == [FIRED]
    assert world.cancel_handles([Cancelled(SOURCE, 0, START_MS + 501)]) == [UNKNOWN]


def test_a_cancelled_timer_is_not_taken_for_fired_after_the_clock_was_ahead() -> None:
    world = World()
    world.broker.accept([START_MS + 10], 10, "any")
    world.ingest(1)
    assert world.cancel(0) == CANCELLED
    world.sync()
    world.now_ms += LIMITS.tombstone_keep_ms + HOUR_MS
    while world.housekeep():
        pass
    world.now_ms = START_MS + 20

    assert world.cancel_handles([handle(world, 0)]) == [UNKNOWN]


def test_a_timer_cancelled_long_after_it_was_due_is_known_to_be_for_as_long_as_any() -> None:
    world = World()
    world.set_topics([])
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.now_ms += LIMITS.tombstone_keep_ms + HOUR_MS
    world.tick()
    assert world.cancel(0) == CANCELLED
    world.tick()
    world.now_ms += LIMITS.tombstone_keep_ms
    world.housekeep()

    assert world.cancel(0) == CANCELLED


def test_what_gives_way_of_one_queue_s_cancels_takes_nothing_from_another_s_fires() -> None:
    """It may be due in months: until then nobody was told that his timer had fired."""
    world = World()
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.tick()
    world.sync()
    world.send()
    gone = world.scheduler.tombstones.gone
    gone.pages_max = 1
    for source in (1, 2):
        gone.mark_one(source, 5, START_MS + HOUR_MS)
    assert not gone.has(1, 5)
    for _ in range(2):
        assert world.cancel(0) == FIRED
        world.sync()
        world.checkpoint()
        world.kill()

    gone = world.scheduler.tombstones.gone
    gone.pages_max = 1
    for source in (0, 2):
        gone.mark_one(source, 5, START_MS + HOUR_MS)
    assert world.cancel(0) == UNKNOWN


def test_what_gives_way_while_a_checkpoint_is_taken_over_is_known_to_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start that has room for fewer cancels does not call one of them fired."""
    world = World()
    for source in (1, 2):
        world.scheduler.tombstones.add(source, 5, START_MS + HOUR_MS, unmet=False)
    world.checkpoint()

    world.limits = dataclasses.replace(LIMITS, tombstones_max=0)
    monkeypatch.setattr(tombstones, "GONE_PAGES_MAX", 1)
    world.kill()

    stones = world.scheduler.tombstones
    assert (stones.has(1, 5), stones.has(2, 5)) == (False, True)
    assert stones.forgotten_until_ms(1, 5) == START_MS + HOUR_MS
