import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.producers import (
    SERVICE_IDS_FROM,
    WINDOW_BATCHES,
    LaneKey,
    Producers,
    Stored,
    check_identity,
)
from duemq.errors import FencedProducer, InvalidArgument, OutOfSequence, Overloaded

KEY = LaneKey(7, "orders", 0, False)
IDLE_MS = 1_000


def stored(number: int, store_ms: int = 0) -> Stored:
    return Stored(
        position=100 * number, base_offset=number, store_ms=store_ms, queue_id=0, records=1
    )


def with_batches(count: int, key: LaneKey = KEY, epoch: int = 0) -> Producers:
    producers = Producers(IDLE_MS)
    for sequence in range(count):
        assert producers.check(key, epoch, sequence, 0) is None
        producers.record(key, epoch, sequence, stored(sequence))
    return producers


def test_a_repeat_gets_the_first_answer() -> None:
    producers = with_batches(3)
    assert producers.check(KEY, 0, 1, 0) == stored(1)
    assert producers.check(KEY, 0, 3, 0) is None


def test_any_sequence_begins_an_unknown_lane() -> None:
    assert Producers(IDLE_MS).check(KEY, 4, 17, 0) is None


def test_a_gap_is_refused_and_changes_nothing() -> None:
    producers = with_batches(2)
    with pytest.raises(OutOfSequence) as caught:
        producers.check(KEY, 0, 3, 0)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("sequence", "3", "2")
    assert producers.check(KEY, 0, 2, 0) is None


def test_a_repeat_older_than_the_window_is_refused_as_stored() -> None:
    producers = with_batches(WINDOW_BATCHES + 5)
    assert producers.check(KEY, 0, 5, 0) == stored(5)
    with pytest.raises(OutOfSequence, match="was stored"):
        producers.check(KEY, 0, 4, 0)


def test_an_older_epoch_is_fenced() -> None:
    producers = with_batches(2, epoch=3)
    with pytest.raises(FencedProducer) as caught:
        producers.check(KEY, 2, 2, 0)
    assert (caught.value.value, caught.value.limit) == ("2", "3")


def test_a_newer_epoch_starts_again_at_any_sequence() -> None:
    producers = with_batches(5)
    assert producers.check(KEY, 1, 2, 0) is None
    producers.record(KEY, 1, 2, stored(9))
    assert producers.check(KEY, 1, 2, 0) == stored(9)
    with pytest.raises(OutOfSequence):
        producers.check(KEY, 1, 1, 0)


def test_lanes_do_not_meet() -> None:
    producers = with_batches(2)
    for key in (
        KEY._replace(queue_id=1),
        KEY._replace(timed=True),
        KEY._replace(topic="other"),
        KEY._replace(producer_id=8),
    ):
        assert producers.check(key, 0, 0, 0) is None


def test_idle_lanes_are_forgotten_but_not_those_of_services() -> None:
    producers = with_batches(1)
    service = KEY._replace(producer_id=SERVICE_IDS_FROM)
    producers.record(service, 0, 0, stored(1))
    fresh = KEY._replace(producer_id=9)
    producers.record(fresh, 0, 0, stored(2, store_ms=IDLE_MS))
    assert producers.expire(IDLE_MS + 1) == 1
    assert producers.check(service, 0, 0, 0) == stored(1)
    assert producers.check(fresh, 0, 0, 0) is not None
    assert producers.check(KEY, 0, 0, 0) is None


def test_a_full_table_gives_up_the_longest_idle_lane_only() -> None:
    producers = Producers(IDLE_MS, lanes_max=2)
    producers.record(KEY, 0, 0, stored(0, store_ms=0))
    producers.record(KEY._replace(queue_id=1), 0, 0, stored(0, store_ms=100_000))
    new = KEY._replace(queue_id=2)
    assert producers.check(new, 0, 0, 100_000) is None
    producers.record(new, 0, 0, stored(0, store_ms=100_000))
    with pytest.raises(Overloaded):
        producers.check(KEY, 0, 0, 100_000)


def test_deleting_a_topic_forgets_its_lanes() -> None:
    producers = with_batches(2)
    producers.forget_topic("orders")
    assert len(producers) == 0


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
    again.load(producers.encode())
    assert again.encode() == producers.encode()
    for producer_id, topic, queue_id, timed, *_ in lanes:
        key = LaneKey(producer_id, topic, queue_id, timed)
        assert again._lanes[key].window == producers._lanes[key].window
        assert again._lanes[key].next_sequence == producers._lanes[key].next_sequence


def test_an_epoch_without_a_producer_is_refused() -> None:
    check_identity(0, 0, 0)
    check_identity(1, 2, 3)
    with pytest.raises(InvalidArgument):
        check_identity(0, 0, 1)
