from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument, MissingBroker, OffsetOutOfRange, PartialAnswer
from duemq_analytics.options import Options
from duemq_analytics.source.plan import (
    PARTITIONS_MAX,
    QueueBounds,
    QueueRange,
    first_since,
    partitions,
    ranges,
    require_whole,
)

QUEUES = [
    QueueBounds("b1", "h:2", 0, 0, 50),
    QueueBounds("b0", "h:1", 1, 5, 5),
    QueueBounds("b0", "h:1", 0, 10, 30),
]


def spans_of(found):
    return [(piece.broker, piece.queue, piece.start, piece.end) for piece in found]


def test_everything_there_is_is_read_and_empty_queues_are_left_out():
    assert spans_of(ranges(QUEUES, Options("t"))) == [("b0", 0, 10, 30), ("b1", 0, 0, 50)]


def test_offsets_are_per_broker_and_queue():
    options = Options("t", starting={"b0": {0: 12}}, ending={"b1": {0: 7}, "b0": {0: "latest"}})
    assert spans_of(ranges(QUEUES, options)) == [("b0", 0, 12, 30), ("b1", 0, 0, 7)]


@pytest.mark.parametrize(("name", "offset"), [("starting", 9), ("ending", 31)])
def test_offsets_that_are_gone_or_not_there_yet_fail_the_read(name, offset):
    with pytest.raises(OffsetOutOfRange, match=f"offset {offset} of queue 0 on broker 'b0'"):
        ranges(QUEUES, Options("t", **{name: {"b0": {0: offset}}}))


def test_on_request_lost_offsets_are_left_out_with_a_warning(caplog):
    options = Options("t", starting={"b0": {0: 3}}, fail_on_data_loss=False)
    assert spans_of(ranges(QUEUES, options))[0] == ("b0", 0, 10, 30)
    assert "offset 3 of queue 0" in caplog.text


@pytest.mark.parametrize("broker", ["b0", "b9"])
def test_offsets_of_an_unknown_queue_are_refused(broker):
    with pytest.raises(InvalidArgument, match=f"no queue 7 on broker '{broker}'"):
        ranges(QUEUES, Options("t", starting={broker: {7: 3}}))


def test_offsets_of_a_broker_that_may_be_lost_are_left_out_with_a_warning(caplog):
    lenient = Options("t", starting={"b9": {7: 3}}, ending={"b9": {7: 9}}, fail_on_data_loss=False)
    assert ranges(QUEUES, lenient) == ranges(QUEUES, Options("t"))
    for name in ("startingOffsets", "endingOffsets"):
        assert f"option {name}: broker 'b9' is not there" in caplog.text
    with pytest.raises(InvalidArgument, match="no queue 7 on broker 'b0'"):
        ranges(QUEUES, replace(lenient, starting={"b0": {7: 3}}))


def test_a_lost_broker_fails_the_read_and_is_named():
    lost = [MissingBroker("b2", "it fell silent")]
    require_whole([], Options("t"), served=True)
    with pytest.raises(
        PartialAnswer, match=r"'t'.*\(b2: it fell silent\).*failOnDataLoss"
    ) as caught:
        require_whole(lost, Options("t"), served=True)
    assert (list(caught.value.missing), caught.value.value) == (lost, "b2")


def test_on_request_a_lost_broker_is_left_out_with_a_warning(caplog):
    lenient = Options("t", fail_on_data_loss=False)
    require_whole([MissingBroker("b2", "it fell silent")], lenient, served=True)
    assert "b2: it fell silent" in caplog.text


def test_a_topic_that_nobody_serves_is_not_gone_while_a_broker_is_lost():
    lenient = Options("t", fail_on_data_loss=False)
    with pytest.raises(PartialAnswer, match=r"b2: it fell silent\); wait until.*forget\)$"):
        require_whole([MissingBroker("b2", "it fell silent")], lenient, served=False)
    require_whole([], lenient, served=False)


def test_a_lost_broker_is_not_left_out_of_what_was_planned_of_it():
    lost, lenient = [MissingBroker("b2", "it fell silent")], Options("t", fail_on_data_loss=False)
    require_whole(lost, lenient, served=True, planned={"b1"})
    with pytest.raises(PartialAnswer, match=r"b2: it fell silent\); wait until.*forget\)$"):
        require_whole(lost, lenient, served=True, planned={"b1", "b2"})


@given(
    st.lists(st.tuples(st.integers(0, 1_000), st.integers(1, 1_000)), max_size=5),
    st.integers(1, 300),
)
def test_pieces_cover_each_range_once_and_keep_to_the_bound(bounds, records_max):
    whole = [QueueRange("b", "h:1", i, start, start + n) for i, (start, n) in enumerate(bounds)]
    pieces = partitions(whole, records_max)
    assert all(0 < piece.end - piece.start <= records_max for piece in pieces)
    covered = [(p.queue, offset) for p in pieces for offset in range(p.start, p.end)]
    assert covered == [(p.queue, offset) for p in whole for offset in range(p.start, p.end)]


def test_the_number_of_partitions_is_bounded():
    with pytest.raises(InvalidArgument, match="maxRecordsPerPartition"):
        partitions([QueueRange("b", "h:1", 0, 0, PARTITIONS_MAX + 1)], 1)


@pytest.mark.parametrize(
    ("since_ms", "offset"), [(0, 7), (100, 7), (101, 8), (110, 8), (111, 10), (130, 11), (131, 12)]
)
def test_what_was_stored_since_begins_at_an_offset(since_ms, offset):
    stored = {7: 100, 8: 110, 9: 110, 10: 120, 11: 130}
    queue = QueueBounds("b0", "h:1", 0, 7, 12)
    asked = []

    def store_ms_of(at):
        asked.append(at)
        return stored[at]

    assert first_since(queue, since_ms, store_ms_of) == offset
    assert len(asked) <= 3
    assert first_since(QueueBounds("b0", "h:1", 0, 7, 7), 1, store_ms_of) == 7
