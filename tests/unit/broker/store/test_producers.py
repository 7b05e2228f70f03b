from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import FencedProducer, InvalidArgument, OutOfSequence, Overloaded
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.broker.store.producers import (
    EVICT_IDLE_MS,
    SERVICE_WINDOW_BATCHES,
    WINDOW_BATCHES,
    LaneKey,
    Producers,
    StoredPlace,
    check_identity,
)

KEY = LaneKey(7, "orders", 0, False)
IDLE_MS = 1_000


def stored(number: int, store_ms: int = 0) -> StoredPlace:
    return StoredPlace(
        position=100 * number, base_offset=number, store_ms=store_ms, queue_id=0, records=1
    )


def with_batches(count: int, key: LaneKey = KEY, epoch: int = 0) -> Producers:
    producers = Producers(IDLE_MS)
    for sequence in range(count):
        assert producers.find(key, epoch, sequence) is None
        producers.check_next(key, epoch, sequence)
        producers.record(key, epoch, sequence, stored(sequence))
    return producers


def test_a_repeat_gets_the_first_answer() -> None:
    producers = with_batches(3)
    assert producers.find(KEY, 0, 1) == stored(1)
    assert producers.find(KEY, 0, 3) is None


def test_any_sequence_begins_an_unknown_lane() -> None:
    producers = Producers(IDLE_MS)
    assert producers.find(KEY, 4, 17) is None
    producers.check_next(KEY, 4, 17)


def test_a_gap_is_refused_and_changes_nothing() -> None:
    producers = with_batches(2)
    assert producers.find(KEY, 0, 3) is None
    with pytest.raises(OutOfSequence) as caught:
        producers.check_next(KEY, 0, 3)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("sequence", "3", "2")
    producers.check_next(KEY, 0, 2)


def test_a_repeat_older_than_the_window_is_refused_as_stored() -> None:
    producers = with_batches(WINDOW_BATCHES + 5)
    assert producers.find(KEY, 0, 5) == stored(5)
    with pytest.raises(OutOfSequence, match="was stored"):
        producers.find(KEY, 0, 4)


def test_an_older_epoch_is_fenced() -> None:
    producers = with_batches(2, epoch=3)
    with pytest.raises(FencedProducer) as caught:
        producers.find(KEY, 2, 2)
    assert (caught.value.value, caught.value.limit) == ("2", "3")


def test_a_newer_epoch_starts_again_at_any_sequence() -> None:
    producers = with_batches(5)
    assert producers.find(KEY, 1, 2) is None
    producers.check_next(KEY, 1, 2)
    producers.record(KEY, 1, 2, stored(9))
    assert producers.find(KEY, 1, 2) == stored(9)
    with pytest.raises(OutOfSequence):
        producers.find(KEY, 1, 1)


def test_lanes_do_not_meet() -> None:
    producers = with_batches(2)
    for key in (
        KEY._replace(queue_id=1),
        KEY._replace(timed=True),
        KEY._replace(topic="other"),
        KEY._replace(producer_id=8),
    ):
        assert producers.find(key, 0, 0) is None


def test_idle_lanes_are_forgotten_but_not_those_of_services() -> None:
    producers = with_batches(1)
    service = KEY._replace(producer_id=SERVICE_IDS_FROM)
    producers.trust_service(SERVICE_IDS_FROM)
    producers.record(service, 0, 0, stored(1))
    assert producers.age(IDLE_MS) == 0
    fresh = KEY._replace(producer_id=9)
    producers.record(fresh, 0, 0, stored(2))
    assert producers.age(1) == 1
    assert producers.find(service, 0, 0) == stored(1)
    assert producers.find(fresh, 0, 0) == stored(2)
    assert producers.find(KEY, 0, 0) is None


def test_what_the_clock_said_when_a_batch_was_stored_keeps_no_lane_and_expires_none() -> None:
    producers = Producers(IDLE_MS, lanes_max=2)
    producers.record(KEY, 0, 0, stored(0, store_ms=365 * 86_400_000))
    producers.record(KEY._replace(queue_id=1), 0, 0, stored(0, store_ms=0))
    assert producers.age(IDLE_MS) == 0
    assert producers.age(1) == 2


def test_a_full_table_gives_up_the_longest_idle_lane_only() -> None:
    producers = Producers(EVICT_IDLE_MS * 2, lanes_max=2)
    producers.record(KEY, 0, 0, stored(0))
    producers.age(EVICT_IDLE_MS)
    producers.record(KEY._replace(queue_id=1), 0, 0, stored(0))
    new = KEY._replace(queue_id=2)
    producers.check_next(new, 0, 0)
    assert producers.find(KEY, 0, 0) == stored(0)  # nothing was stored yet
    producers.record(new, 0, 0, stored(0))
    assert producers.find(KEY, 0, 0) is None
    with pytest.raises(Overloaded):
        producers.check_next(KEY, 0, 0)


def test_after_a_start_a_full_table_still_has_room_for_new_producers() -> None:
    producers = Producers(EVICT_IDLE_MS * 2, lanes_max=2)
    producers.load(with_batches(1).freeze()())
    replayed, new = KEY._replace(queue_id=1), KEY._replace(queue_id=2)
    producers.record(replayed, 0, 0, stored(0))
    producers.check_next(new, 0, 0)
    producers.record(new, 0, 0, stored(0))
    assert producers.find(KEY, 0, 0) is None
    assert producers.find(replayed, 0, 0) == stored(0)
    assert producers.age(EVICT_IDLE_MS * 2) == 0


class Lives(NamedTuple):
    """What one batch, or the time, does: a producer's number, or ms that pass."""

    producer: int
    ms: int


@given(
    st.lists(
        st.builds(Lives, st.integers(0, 5), st.sampled_from([0, 500, EVICT_IDLE_MS, 10**9])),
        max_size=60,
    )
)
def test_who_follows_keeps_every_lane_that_the_leader_has(lives: list[Lives]) -> None:
    leader = Producers(2 * EVICT_IDLE_MS, lanes_max=3)
    follower = Producers(2 * EVICT_IDLE_MS, lanes_max=3)
    for number, (producer, ms) in enumerate(lives):
        leader.age(ms)
        key = KEY._replace(producer_id=producer + 1)
        try:
            leader.check_next(key, number, 0)
        except Overloaded:
            continue
        for each in (leader, follower):
            each.record(key, number, 0, stored(number))
        mine, theirs = lanes_of(leader), lanes_of(follower)
        assert theirs[len(theirs) - len(mine) :] == mine
        assert len(theirs) <= 3


def lanes_of(producers: Producers) -> list[tuple[LaneKey, int, bytes]]:
    return [(key, lane.epoch, lane.window) for key, lane in producers._lanes.items()]


def test_batches_that_the_log_has_lost_were_never_stored() -> None:
    producers = with_batches(5)
    producers.forget_beyond(300)
    assert producers.find(KEY, 0, 2) == stored(2)
    assert producers.find(KEY, 0, 3) is None
    producers.check_next(KEY, 0, 3)
    with pytest.raises(OutOfSequence):
        producers.check_next(KEY, 0, 4)
    producers.forget_beyond(0)
    assert len(producers) == 0


def test_who_begins_to_lead_tells_idle_lanes_by_the_log_and_forgets_none() -> None:
    producers = Producers(2 * EVICT_IDLE_MS, lanes_max=2)
    now_ms = 10 * EVICT_IDLE_MS
    for queue_id, store_ms in enumerate((now_ms - EVICT_IDLE_MS, now_ms + 5)):
        producers.record(KEY._replace(queue_id=queue_id), 0, 0, stored(0, store_ms))
    new = KEY._replace(queue_id=2)
    with pytest.raises(Overloaded):
        producers.check_next(new, 0, 0)
    producers.idle_as_logged(now_ms)
    producers.check_next(new, 0, 0)
    producers.record(new, 0, 0, stored(0))
    with pytest.raises(Overloaded):  # the others were not idle for so long
        producers.check_next(KEY._replace(queue_id=3), 0, 0)
    producers.idle_as_logged(1 << 60)
    assert producers.age(0) == 0


def with_service_lanes(count: int) -> Producers:
    producers = Producers(IDLE_MS, lanes_max=2)
    producers.trust_service(SERVICE_IDS_FROM)
    for queue_id in range(count):
        key = KEY._replace(producer_id=SERVICE_IDS_FROM, queue_id=queue_id)
        producers.record(key, 0, 0, stored(queue_id))
    return producers


def test_lanes_of_timer_services_never_make_a_producer_wait() -> None:
    producers = with_service_lanes(100)
    assert len(producers) == 100
    for queue_id in range(2):
        key = KEY._replace(queue_id=queue_id)
        producers.check_next(key, 0, 0)
        producers.record(key, 0, 0, stored(0))


def test_lanes_of_timer_services_end_with_their_topic_and_with_the_service() -> None:
    producers = with_service_lanes(3)
    producers.record(KEY._replace(producer_id=SERVICE_IDS_FROM, topic="other"), 0, 0, stored(9))
    producers.forget_topic("orders")
    assert len(producers) == 1
    producers.forget_service(SERVICE_IDS_FROM)
    assert len(producers) == 0


def test_a_timer_service_has_a_short_window_and_one_that_is_unknown_is_a_producer() -> None:
    key = KEY._replace(producer_id=SERVICE_IDS_FROM)
    producers = with_service_lanes(0)
    for number in range(20):
        producers.record(key, 0, number, stored(number))
    assert producers.find(key, 0, 20 - SERVICE_WINDOW_BATCHES) is not None
    with pytest.raises(OutOfSequence):
        producers.find(key, 0, 19 - SERVICE_WINDOW_BATCHES)

    unknown = Producers(IDLE_MS)
    unknown.load(producers.freeze()())
    trusted = Producers(IDLE_MS)
    trusted.trust_service(SERVICE_IDS_FROM)
    trusted.load(producers.freeze()())
    assert trusted.age(10**9) == 0
    late = Producers(IDLE_MS)
    late.load(producers.freeze()())
    late.trust_service(SERVICE_IDS_FROM)
    assert late.age(10**9) == 0
    assert unknown.age(10**9) == 1


def test_deleting_a_topic_forgets_its_lanes() -> None:
    producers = with_batches(2)
    timed = KEY._replace(timed=True)
    producers.record(timed, 0, 0, stored(0))
    producers.forget_topic("orders")
    assert producers.find(KEY, 0, 0) is None
    assert producers.find(timed, 0, 0) == stored(0)  # it lies in %TIMER%


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2**64 - 1),
            st.text(min_size=1, max_size=8),
            st.integers(-1, 1023),
            st.booleans(),
            st.integers(0, 2**32 - 1),
            st.integers(1, 70),
        ),
        max_size=5,
    )
)
def test_the_checkpoint_encoding_round_trips(lanes: list[tuple]) -> None:
    producers = Producers(IDLE_MS)
    for producer_id, topic, queue_id, timed, epoch, count in lanes:
        for sequence in range(count):
            key = LaneKey(producer_id, topic, queue_id, timed)
            producers.record(key, epoch, sequence, stored(sequence))
    again = Producers(IDLE_MS)
    again.load(producers.freeze()())
    assert again.freeze()() == producers.freeze()()
    for producer_id, topic, queue_id, timed, *_ in lanes:
        key = LaneKey(producer_id, topic, queue_id, timed)
        assert again._lanes[key].window == producers._lanes[key].window
        assert again._lanes[key].next_sequence == producers._lanes[key].next_sequence


def test_an_epoch_without_a_producer_is_refused() -> None:
    check_identity(0, 0, 0)
    check_identity(1, 2, 3)
    with pytest.raises(InvalidArgument):
        check_identity(0, 0, 1)
