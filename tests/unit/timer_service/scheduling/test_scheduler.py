import dataclasses

import pytest

from duemq.errors import Corrupt, OffsetOutOfRange
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, FIRED, NOT_YET, UNKNOWN
from duemq_server.timer_service.scheduling.dispatch import FAILOVER_AFTER_MS
from duemq_server.timer_service.scheduling.fire_lane import FireOutcome
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.property.timer_world import (
    BROKER,
    LIMITS,
    OTHER,
    SOURCE,
    START_MS,
    World,
    timer_frame,
)

HOUR_MS = 3_600_000


def world_with(*waits: int, topic: str = "any", body_bytes: int = 10) -> World:
    """A shard that has taken over timers that are due after `waits` milliseconds."""
    world = World()
    world.broker.accept([START_MS + wait for wait in waits], body_bytes, topic)
    world.ingest(1)
    return world


def fire(world: World) -> list[int]:
    """Offsets delivered by one round."""
    before = set(world.broker.delivered)
    world.tick()
    world.sync()
    world.send()
    return sorted(set(world.broker.delivered) - before)


def test_a_timer_is_delivered_when_it_is_due() -> None:
    world = world_with(100, 5)

    assert fire(world) == []
    world.now_ms += 5
    assert fire(world) == [1]
    world.now_ms += 95
    assert fire(world) == [0]
    assert world.scheduler.ledger.pending == 0


def test_timers_that_were_due_when_they_were_accepted_are_told_from_late_ones() -> None:
    world = world_with(-100, 0, 1)
    world.now_ms += 50
    for _ in range(3):
        world.tick()

    batches = [each for lane in world.scheduler.dispatcher.lanes() for each in lane.unacked]
    past_due = [each.past_due.tolist() for each in batches if each.past_due is not None]
    assert sorted(flag for flags in past_due for flag in flags) == [False, False, True]


def test_what_comes_late_goes_in_front_of_what_is_due_later_and_waits() -> None:
    world = world_with(300, 200)
    world.set_away({BROKER})
    world.now_ms += 400
    world.tick()
    world.broker.accept([START_MS + 250, START_MS + 100], 10, "any")
    world.ingest(1)
    world.tick()
    scheduler = world.scheduler

    world.set_away(set())
    assert scheduler.parking.backlog(START_MS + 250, world.now_ms) == 3
    assert scheduler.parking.backlog(START_MS + 300, world.now_ms) == 4
    world.tick()
    batches = [each for lane in scheduler.dispatcher.lanes() for each in lane.unacked]
    due_ms = [due for each in batches for due in (each.due_ms - START_MS).tolist()]
    assert due_ms == [100, 200, 250, 300]


def test_tick_says_when_to_come_again() -> None:
    world = world_with(100, 5)

    world.tick()

    assert world.scheduler.next_tick_ms() == START_MS + 5


def test_a_shard_that_was_idle_for_long_is_as_quick_as_ever() -> None:
    world = world_with(0)
    fire(world)
    world.now_ms += HOUR_MS
    world.broker.accept([world.now_ms + 20], 10, "any")
    world.ingest(1)

    world.tick()
    assert world.scheduler.next_tick_ms() == world.now_ms + 20
    world.now_ms += 20
    assert fire(world) == [1]


def test_nothing_is_sent_before_its_dispatch_is_durable() -> None:
    world = world_with(0)
    world.tick()

    world.send()
    assert not world.broker.delivered
    world.sync()
    world.send()
    assert world.broker.delivered[0] == 1


def test_frames_that_come_again_are_ignored() -> None:
    world = world_with(10, 20)

    again = world.scheduler.ingest(SOURCE, BROKER, world.broker.frames_from(0, 1), START_MS)

    assert again.timers == 0
    assert world.scheduler.ledger.accepted == 2


def test_of_frames_that_overlap_only_the_new_ones_are_taken() -> None:
    world = world_with(10)
    world.broker.accept([START_MS + 30], 10, "any")

    ingested = world.scheduler.ingest(SOURCE, BROKER, world.broker.frames_from(0, 2), START_MS)

    assert ingested == (1, START_MS + 30)
    world.kill()
    world.drain()


def test_a_gap_in_the_frames_is_refused() -> None:
    world = world_with(10)
    world.broker.accept([START_MS], 10, "any")
    world.broker.accept([START_MS], 10, "any")

    with pytest.raises(OffsetOutOfRange, match="offset 2 came where 1 was expected"):
        world.scheduler.ingest(SOURCE, BROKER, world.broker.frames_from(2, 1), START_MS)


def test_what_a_broker_has_lost_is_stepped_over() -> None:
    world = world_with(10)
    world.broker.accept([START_MS], 10, "any")
    world.broker.accept([START_MS], 10, "any")
    frames = world.broker.frames_from(2, 1)

    ingested = world.scheduler.ingest(SOURCE, BROKER, frames, START_MS, fetched_from=1)
    assert ingested.timers == 1
    source = world.scheduler.numbers.source(SOURCE)
    assert source is not None
    assert source.next_offset == 3
    again = world.scheduler.ingest(SOURCE, BROKER, frames, START_MS, fetched_from=2)
    assert again.timers == 0


def test_damaged_frames_are_refused() -> None:
    world = World()
    world.broker.accept([START_MS], 10, "any")
    data = bytearray(world.broker.frames_from(0, 1))
    data[-1] ^= 1

    with pytest.raises(Corrupt, match="CRC"):
        world.scheduler.ingest(SOURCE, BROKER, bytes(data), START_MS)
    assert world.scheduler.ledger.accepted == 0


@pytest.mark.parametrize("wait", [100, HOUR_MS, 400 * 24 * HOUR_MS])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_pending_timer_is_cancelled_wherever_it_lies(wait: int, flushed: bool) -> None:
    world = world_with(wait)
    if flushed and wait > 100:
        flush = world.scheduler.tiers.begin_flush(START_MS)
        flush.run()
        world.scheduler.tiers.end_flush(flush)

    assert world.cancel(0) == CANCELLED
    assert world.cancel(0) == CANCELLED
    world.sync()
    world.drain()
    assert not world.broker.delivered


def test_a_due_timer_that_cannot_be_sent_yet_can_be_cancelled() -> None:
    world = world_with(0, 0)
    world.set_topics([])
    world.tick()

    assert world.cancel(0) == CANCELLED
    world.drain()
    assert sorted(world.broker.delivered) == [1]


def test_a_dispatched_timer_has_fired() -> None:
    world = world_with(0)
    world.tick()

    assert world.cancel(0) == FIRED


def test_a_timer_that_has_not_arrived_is_waited_for() -> None:
    world = world_with(10)
    handle = Cancelled(SOURCE, 1, START_MS)

    assert world.cancel_handles([handle]) == [NOT_YET]


@pytest.mark.parametrize(
    "handle",
    [
        Cancelled(SOURCE, 0, START_MS + 11),
        Cancelled(SOURCE, 1, START_MS + HOUR_MS + 1),
        Cancelled(SOURCE, 2, START_MS + 2 * HOUR_MS + 1),
    ],
)
def test_a_handle_that_names_no_timer_is_unknown(handle: Cancelled) -> None:
    world = world_with(10, HOUR_MS)
    world.broker.accept([START_MS + 2 * HOUR_MS], 10, "any")
    world.ingest(1)
    flush = world.scheduler.tiers.begin_flush(START_MS)
    flush.run()
    world.scheduler.tiers.end_flush(flush)

    assert world.cancel_handles([handle]) == [UNKNOWN]
    assert world.scheduler.ledger.cancelled == 0


def test_an_outcome_that_is_no_longer_kept_is_unknown() -> None:
    world = world_with(0)
    fire(world)

    world.now_ms += LIMITS.tombstone_keep_ms - AHEAD_MS
    assert world.cancel(0) == FIRED
    world.now_ms += 1
    assert world.cancel(0) == UNKNOWN


def test_a_batch_that_a_dead_process_left_behind_is_sent_again_unchanged() -> None:
    world = world_with(*[0] * 5, body_bytes=100)
    world.tick()
    world.sync()
    [before] = world.scheduler.dispatcher.sendable(BROKER, START_MS, 1 << 20)

    world.kill()
    [after] = world.scheduler.dispatcher.sendable(BROKER, START_MS, 1 << 20)

    assert after is not before
    assert (after.sequence, after.records, after.sizes) == (
        before.sequence,
        before.records,
        before.sizes,
    )
    assert (after.tag_hashes, after.key_hashes) == (before.tag_hashes, before.key_hashes)
    assert world.scheduler.ledger.in_flight == 5


def test_a_batch_on_its_way_survives_in_the_checkpoint() -> None:
    world = world_with(0)
    world.tick()
    world.sync()
    world.checkpoint()

    world.kill()
    assert world.directory.replayed == 0
    world.drain()


def test_an_acknowledged_batch_is_not_sent_again() -> None:
    world = world_with(0)
    fire(world)
    world.scheduler.flush_acks()
    world.sync()

    world.kill()

    assert world.scheduler.dispatcher.sendable(BROKER, START_MS, 1 << 20) == []
    assert world.scheduler.ledger.in_flight == 0


def test_a_lane_that_the_broker_forgot_goes_on_under_a_new_epoch_across_restarts() -> None:
    world = world_with(0, topic="keyed")
    fire(world)
    world.broker.lanes = dict.fromkeys(world.broker.lanes, 0)
    for _ in range(2):
        world.broker.accept([START_MS] * 3, 10, "keyed")
        world.ingest(1)
        world.now_ms += 10_000
        fire(world)
        world.sync()
        world.kill()

    world.drain()
    start_s = START_MS // 1_000
    # The next start has one of its own, whatever the broker knows.
    assert {epoch for _, epoch in world.broker.lanes} == {start_s, start_s + 10, start_s + 20}


def test_the_log_does_not_grow_with_what_is_done() -> None:
    world = World()
    for _ in range(3):
        world.broker.accept([world.now_ms] * 10, 100, "any")
        world.ingest(1)
        fire(world)
        world.now_ms += LIMITS.checkpoint_interval_ms
        world.checkpoint()

    state = world.directory.housekeeper.save(world.now_ms).state
    assert state.log_needed_from == state.position
    assert state.held == []


def test_timers_that_stay_in_memory_do_not_keep_the_log() -> None:
    world = World()
    world.scheduler.limits = dataclasses.replace(LIMITS, log_held_max=4_000)
    world.set_topics(["any"])
    world.broker.accept([START_MS], 10, "keyed")
    world.broker.accept([START_MS + HOUR_MS], 10, "any")
    world.ingest(2)
    for _ in range(40):
        world.broker.accept([world.now_ms], 200, "any")
        world.ingest(1)
        fire(world)
        world.housekeep()
    world.checkpoint()

    state = world.directory.housekeeper.save(world.now_ms).state
    assert state.position - state.log_needed_from < 4_000
    world.kill()
    world.drain()


def test_a_frame_that_is_not_timed_is_refused() -> None:
    world = World()
    data = timer_frame(0, [], [])

    assert world.scheduler.ingest(SOURCE, BROKER, b"", START_MS).timers == 0
    with pytest.raises(Corrupt):
        world.scheduler.ingest(SOURCE, BROKER, data[:-8], START_MS)


def test_a_full_disk_leaves_due_timers_where_they_fire_when_it_has_room() -> None:
    world = world_with(0, 20, 30)
    fire(world)  # its acknowledgement is held back for the next entry of the log
    world.directory.log.disk_full = True
    for wait in (20, 30):
        world.now_ms = START_MS + wait
        with pytest.raises(DiskFull):
            world.scheduler.tick(world.now_ms)
        world.scheduler.check()
    assert world.scheduler.tiers.overdue(world.now_ms) == 2

    world.directory.log.disk_full = False
    assert fire(world) == [1, 2]


def test_a_checkpoint_that_a_full_disk_stops_changes_nothing() -> None:
    world = world_with(0, HOUR_MS)
    fire(world)
    world.now_ms += LIMITS.checkpoint_interval_ms
    world.directory.log.disk_full = True
    with pytest.raises(DiskFull):
        world.directory.housekeeper.next_job(world.now_ms)

    world.directory.log.disk_full = False
    assert world.housekeep()
    world.kill()
    world.drain()


def test_what_a_clock_ahead_handed_out_waits_again_when_it_goes_back() -> None:
    world = world_with(5_000, 6_000)
    world.set_topics([])
    world.now_ms += HOUR_MS
    world.tick()
    assert world.scheduler.dispatcher.due.waiting == 2

    world.now_ms -= HOUR_MS
    world.set_topics(["any"])
    assert fire(world) == []
    assert world.scheduler.next_tick_ms() == START_MS + 5_000
    world.now_ms += 5_000
    assert fire(world) == [0]


def test_a_batch_held_back_when_the_clock_goes_back_holds_up_nothing() -> None:
    world = world_with(AHEAD_MS, topic="keyed")
    world.tick(AHEAD_MS)
    world.sync()
    world.now_ms -= HOUR_MS
    world.broker.accept([world.now_ms + 10], 10, "keyed")
    world.ingest(1)
    world.now_ms += 10

    assert fire(world) == [0]
    assert fire(world) == [1]


def test_a_batch_held_back_when_the_process_dies_and_the_clock_goes_back() -> None:
    world = world_with(AHEAD_MS, topic="keyed")
    world.tick(AHEAD_MS)
    world.sync()
    world.now_ms -= HOUR_MS
    world.kill()
    world.now_ms += AHEAD_MS

    assert fire(world) == [0]


@pytest.mark.parametrize("passed_ms", range(AHEAD_MS + 2))
def test_a_start_in_the_head_start_sends_nothing_early(passed_ms: int) -> None:
    world = world_with(1, AHEAD_MS, topic="keyed")
    world.tick(AHEAD_MS)
    world.sync()
    world.now_ms += passed_ms
    world.kill()
    world.tick(AHEAD_MS)
    world.sync()

    [lane] = world.scheduler.dispatcher.lanes()
    assert [batch.ready_ms for batch in lane.unacked] == [START_MS + AHEAD_MS]
    world.send()
    assert len(world.broker.delivered) == (2 if passed_ms >= AHEAD_MS else 0)


def test_a_refused_batch_is_tried_again_later() -> None:
    world = world_with(0)
    world.tick()
    world.sync()
    [batch] = world.scheduler.dispatcher.sendable(BROKER, START_MS, 1 << 20)

    assert not world.scheduler.answered(batch, FireOutcome.REFUSED, START_MS)
    world.drain()
    assert world.broker.delivered[0] == 1


def test_a_broker_that_goes_away_with_batches_holds_up_nothing_that_others_take() -> None:
    world = world_with(0)
    world.tick()
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.tick()  # two are on their way
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    dispatcher = world.scheduler.dispatcher
    dispatcher.connected(OTHER)
    dispatcher.disconnected(BROKER, world.now_ms)
    world.now_ms += FAILOVER_AFTER_MS

    world.tick()

    sent_to = [lane.id.broker for lane in dispatcher.lanes() for _ in lane.unacked]
    assert sorted(sent_to) == [BROKER, BROKER, OTHER]


def test_what_waits_for_an_answer_is_looked_at_when_that_is_a_refusal() -> None:
    world = world_with(0)
    world.tick()
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.tick()
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.tick()
    world.sync()
    called: list[int] = []
    world.scheduler.on_sooner(called.append)
    batch, *_ = world.scheduler.dispatcher.sendable(BROKER, START_MS, 1 << 20)

    world.scheduler.answered(batch, FireOutcome.REFUSED, START_MS)

    assert called == [0]


def test_a_lane_whose_queue_is_gone_is_forgotten_and_begins_anew_behind_it() -> None:
    """One of each topic that ever was stayed in memory, and in each checkpoint."""
    world = World()
    for made_anew in range(4):
        world.set_topics(["any", "keyed"])
        world.broker.accept([START_MS] * 2, 10, "keyed")
        world.broker.accept([START_MS], 10, "any")
        world.ingest(2)
        fire(world)
        [lane] = [x for x in world.scheduler.dispatcher.lanes() if x.id.topic == "keyed"]
        assert lane.epoch == START_MS // 1000 + made_anew  # though the clock went back
        world.set_topics(["any"])
        if made_anew % 2:  # a start finds that in the log, or else in the checkpoint
            world.scheduler.forget_gone()
            world.sync()
        else:
            world.now_ms += LIMITS.checkpoint_interval_ms
            while world.housekeep():
                pass
            world.now_ms = START_MS
        assert {each.id.topic for each in world.scheduler.dispatcher.lanes()} == {"any"}
        world.kill()
        assert {each.id.topic for each in world.scheduler.dispatcher.lanes()} == {"any"}

    world.drain()


def test_a_lane_is_kept_while_something_is_on_its_way() -> None:
    world = World()
    world.broker.accept([START_MS], 10, "keyed")
    world.ingest(1)
    world.tick()
    world.set_topics(["any"])
    world.now_ms += LIMITS.checkpoint_interval_ms
    while world.housekeep():
        pass
    world.kill()

    assert [each.id.topic for each in world.scheduler.dispatcher.lanes()] == ["keyed"]
    world.drain()
