import numpy as np
import pytest

from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq_server.timer_service.scheduling.fire_lane import (
    EARLY_MS_MAX,
    EPOCH_FROM_CLOCK_MAX,
    RETRY_MS_MAX,
    UNACKED_MAX,
    WIRE_MAX,
    FireBatch,
    FireLane,
    FireOutcome,
)
from duemq_server.timer_service.timers.log_entries import LaneId

NOW = 1_000_000


def lane_with(count: int, *, proven: bool = False) -> tuple[FireLane, list[FireBatch]]:
    """A lane with durable batches; `proven`: the broker has stored one before them."""
    lane = FireLane(LaneId("b", "t", 0))
    if proven:
        add(lane)
        [batch] = put_on_wire(lane)
        lane.answered(batch, FireOutcome.STORED, NOW, 0)
    return lane, [add(lane) for _ in range(count)]


def add(lane: FireLane, *, durable: bool = True) -> FireBatch:
    due_ms = np.array([NOW])
    batch = FireBatch(lane, lane.next_sequence, 0, 8, b"records", b"", b"", b"", due_ms, durable)
    lane.push(batch)
    return batch


def batch_of(lane: FireLane, *due_ms: int) -> FireBatch:
    due = np.array(due_ms)
    return FireBatch(lane, lane.next_sequence, 0, 8, b"records", b"", b"", b"", due)


def put_on_wire(lane: FireLane, now_ms: int = NOW) -> list[FireBatch]:
    batches = []
    while (batch := lane.next_to_send(now_ms)) is not None:
        lane.sent(batch)
        batches.append(batch)
    return batches


def test_batches_are_numbered_without_a_gap() -> None:
    lane, batches = lane_with(3)

    assert [batch.sequence for batch in batches] == [0, 1, 2]
    assert lane.next_sequence == 3


def test_a_batch_waits_until_its_entry_is_durable() -> None:
    lane, _ = lane_with(0, proven=True)
    batch = add(lane, durable=False)

    assert put_on_wire(lane) == []
    batch.durable = True
    assert put_on_wire(lane) == [batch]


def test_only_one_batch_is_on_the_wire_until_the_broker_has_stored_one() -> None:
    lane, batches = lane_with(6)

    assert put_on_wire(lane) == batches[:1]
    assert lane.answered(batches[0], FireOutcome.STORED, NOW, 0)
    assert put_on_wire(lane) == batches[1 : 1 + WIRE_MAX]


def test_after_a_refusal_the_lane_drains_and_begins_anew_in_order() -> None:
    lane, batches = lane_with(3, proven=True)
    assert put_on_wire(lane) == batches

    lane.answered(batches[0], FireOutcome.REFUSED, NOW, 1.0)
    assert put_on_wire(lane, NOW + RETRY_MS_MAX) == []
    lane.answered(batches[1], FireOutcome.OUT_OF_SEQUENCE, NOW, 1.0)
    lane.answered(batches[2], FireOutcome.OUT_OF_SEQUENCE, NOW, 1.0)

    assert not lane.must_restart()
    assert put_on_wire(lane, lane.retry_at_ms - 1) == []
    assert put_on_wire(lane, lane.retry_at_ms) == batches[:1]
    assert [batch.sequence for batch in lane.unacked] == [1, 2, 3]


def test_waits_between_attempts_grow_up_to_a_bound() -> None:
    lane, [batch] = lane_with(1)
    waits = []
    now = NOW
    for _ in range(20):
        assert put_on_wire(lane, now) == [batch]
        lane.answered(batch, FireOutcome.REFUSED, now, 1.0)
        waits.append(lane.retry_at_ms - now)
        now = lane.retry_at_ms

    assert waits == sorted(waits)
    assert waits[0] < 100
    assert waits[-1] == RETRY_MS_MAX


def test_a_lost_connection_sends_everything_unanswered_again() -> None:
    lane, batches = lane_with(3, proven=True)
    put_on_wire(lane)

    lane.disconnected()

    assert not lane.answered(batches[0], FireOutcome.STORED, NOW, 0)
    assert put_on_wire(lane) == batches[:1]
    assert lane.answered(batches[0], FireOutcome.STORED, NOW, 0)
    assert put_on_wire(lane) == batches[1:]


def test_a_broker_that_forgot_the_lane_gets_a_new_epoch_with_the_same_batches() -> None:
    lane, batches = lane_with(2, proven=True)
    put_on_wire(lane)

    lane.answered(batches[0], FireOutcome.OUT_OF_SEQUENCE, NOW, 0)
    assert not lane.must_restart()
    lane.answered(batches[1], FireOutcome.OUT_OF_SEQUENCE, NOW, 0)
    assert lane.must_restart()
    lane.restart(1)

    assert (lane.epoch, lane.next_sequence) == (1, 2)
    assert [batch.sequence for batch in lane.unacked] == [0, 1]
    assert not lane.must_restart()


def test_a_lane_takes_a_bounded_number_of_batches() -> None:
    lane, _ = lane_with(UNACKED_MAX)

    assert lane.full()


def test_a_batch_is_kept_back_until_its_last_timer_is_due() -> None:
    lane, _ = lane_with(0, proven=True)
    lane.push(batch := batch_of(lane, NOW, NOW + 3, NOW + 1))

    assert (put_on_wire(lane, NOW + 3), lane.held_until_ms()) == ([], 0)  # not yet durable
    batch.durable = True
    assert (put_on_wire(lane, NOW + 2), lane.held_until_ms()) == ([], NOW + 3)
    assert put_on_wire(lane, NOW + 3) == [batch]
    lane.disconnected()
    assert put_on_wire(lane, NOW + 2) == []  # the clock went back
    assert put_on_wire(lane, NOW + 3) == [batch]


@pytest.mark.parametrize(
    ("span_ms", "goes_ms"), [(0, NOW - 3), (2, NOW - 3), (5, NOW), (1 << 40, NOW + (1 << 40) - 5)]
)
def test_a_batch_goes_ahead_of_its_first_timer_as_far_as_a_broker_takes_its_last_one(
    span_ms: int, goes_ms: int
) -> None:
    lane, _ = lane_with(0, proven=True)
    lane.push(batch := batch_of(lane, NOW, NOW + span_ms))
    batch.durable = True

    assert lane.held_until_ms(3) == goes_ms
    assert lane.next_to_send(goes_ms - 1, 3) is None
    assert lane.next_to_send(goes_ms, 3) is batch
    assert lane.held_until_ms() == NOW + span_ms
    assert goes_ms >= NOW + span_ms - FIRE_AHEAD_MS_MAX


@pytest.mark.parametrize(
    ("waits", "early_ms"),
    [
        ((0, 0), []),
        ((0, 1, 3), [3, 2, 0]),
        ((0, 3, 1), [3, 0, 0]),
        ((-(1 << 40), 1), [EARLY_MS_MAX, 0]),
    ],
)
def test_a_broker_is_told_when_each_timer_of_a_batch_may_be_seen(
    waits: tuple[int, ...], early_ms: list[int]
) -> None:
    batch = batch_of(FireLane(LaneId("b", "t", 0)), *(NOW + wait for wait in waits))
    assert np.frombuffer(batch.early_ms(NOW - 1), dtype="<u4").tolist() == early_ms
    assert batch.early_ms(batch.last_due_ms) == b""


def test_the_reason_of_the_last_refusal_is_told_until_a_batch_is_stored() -> None:
    lane, batches = lane_with(1)
    assert lane.next_to_send(NOW) is batches[0]
    lane.sent(batches[0])
    lane.answered(batches[0], FireOutcome.REFUSED, NOW, 0, "no space")
    assert lane.reason == "no space"
    lane.sent(batches[0])
    lane.answered(batches[0], FireOutcome.STORED, NOW, 0)
    assert lane.reason == ""


@pytest.mark.parametrize(
    ("epoch", "now_ms", "following"),
    [
        (0, 1_700_000_000_999, 1_700_000_000),
        (1_700_000_000, 1_700_000_000_000, 1_700_000_001),  # two starts within a second
        (1_700_000_000, 0, 1_700_000_001),  # a clock that was set back
        (7, 1 << 60, EPOCH_FROM_CLOCK_MAX),
        (EPOCH_FROM_CLOCK_MAX, 1 << 60, EPOCH_FROM_CLOCK_MAX + 1),
    ],
)
def test_each_start_has_an_epoch_of_its_own(epoch: int, now_ms: int, following: int) -> None:
    assert FireLane(LaneId("b", "t", 0), epoch).next_epoch(now_ms) == following
