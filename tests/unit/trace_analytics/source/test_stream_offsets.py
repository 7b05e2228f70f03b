"""How far a micro-batch goes, without Spark."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument, OffsetOutOfRange, TopicReplaced
from duemq_analytics.options import Options
from duemq_analytics.source import stream_offsets
from duemq_analytics.source.plan import QueueBounds

TOPIC = Options("t")
QUEUES = [
    QueueBounds("b1", "h:2", 0, 0, 50, topic_id=8),
    QueueBounds("b0", "h:1", 10, 5, 5, topic_id=7),
    QueueBounds("b0", "h:1", 2, 10, 30, topic_id=7),
]


def offsets(**queues):
    """b0_2=12 is queue 2 of broker b0."""
    ends = {(name[:2], int(name[3:])): offset for name, offset in queues.items()}
    return stream_offsets.canonical(ends, {"b0": 7, "b1": 8})


def test_offsets_have_one_form_whatever_the_order():
    forms = {json.dumps(stream_offsets.initial(q, TOPIC)) for q in (QUEUES, QUEUES[::-1])}
    assert forms == {
        '{"b0": {"topic_id": 7, "queues": {"2": 10, "10": 5}},'
        ' "b1": {"topic_id": 8, "queues": {"0": 0}}}'
    }


def test_a_limit_is_shared_fairly():
    start = stream_offsets.initial(QUEUES, TOPIC)
    assert stream_offsets.latest(start, QUEUES, 30, TOPIC) == offsets(b0_2=25, b0_10=5, b1_0=15)
    assert stream_offsets.latest(start, QUEUES, 50, TOPIC) == offsets(b0_2=30, b0_10=5, b1_0=30)
    assert stream_offsets.latest(start, QUEUES, None, TOPIC) == offsets(b0_2=30, b0_10=5, b1_0=50)


@given(
    st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), st.integers(0, 99)),
    st.integers(1, 500),
)
def test_shares_keep_to_the_limit_and_starve_nobody(waiting, limit):
    shares = stream_offsets.fair_shares(waiting, limit)
    assert sum(shares.values()) == min(limit, sum(waiting.values()))
    assert all(0 <= shares[key] <= waiting[key] for key in waiting)
    cut = [shares[key] for key in waiting if shares[key] < waiting[key]]
    assert not cut or max(shares.values()) <= min(cut) + 1


def test_a_limit_below_the_number_of_queues_leaves_none_behind_for_ever():
    waiting = {("a", 0): 20, ("a", 1): 0, ("a", 2): 0}
    for _ in range(100):  # two queues get a message between micro-batches, the third has a backlog
        waiting = {key: count + (key != ("a", 0)) for key, count in waiting.items()}
        shares = stream_offsets.fair_shares(waiting, 2)
        waiting = {key: waiting[key] - shares[key] for key in waiting}
    assert waiting["a", 0] < 20
    assert max(waiting.values()) < 100


def test_nothing_new_is_the_same_offsets():
    start = offsets(b0_2=30, b0_10=5, b1_0=50)
    assert json.dumps(stream_offsets.latest(start, QUEUES, 9, TOPIC)) == json.dumps(start)
    assert stream_offsets.between(start, start, QUEUES, TOPIC) == []


def test_a_new_queue_begins_at_its_first_offset():
    start = offsets(b1_0=50)
    end = stream_offsets.latest(start, QUEUES, None, TOPIC)
    (piece,) = stream_offsets.between(start, end, QUEUES, TOPIC)
    assert (piece.broker, piece.queue, piece.start, piece.end) == ("b0", 2, 10, 30)


def test_a_broker_that_is_away_keeps_its_place():
    start = offsets(b0_2=12, b1_0=7)
    assert stream_offsets.latest(start, QUEUES[:1], None, TOPIC) == offsets(b0_2=12, b1_0=50)
    with pytest.raises(OffsetOutOfRange, match="t/2 on broker 'b0' is not there: 12 to 30"):
        stream_offsets.between(start, offsets(b0_2=30, b1_0=7), QUEUES[:1], TOPIC)


def test_a_query_that_begins_while_a_broker_is_away_has_it_from_its_place_on():
    named = {"b0": {2: 12, 10: 5}, "b1": {0: 7, 1: "latest"}}
    lenient = replace(TOPIC, fail_on_data_loss=False, starting=named)
    start = stream_offsets.initial(QUEUES[1:], lenient)
    assert start["b1"] == {"topic_id": 0, "queues": {"0": 7}}
    end = stream_offsets.latest(start, QUEUES[1:], None, lenient)
    following = stream_offsets.latest(end, QUEUES, None, lenient)
    (piece,) = stream_offsets.between(end, following, QUEUES, lenient)
    assert (piece.broker, piece.queue, piece.start, piece.end) == ("b1", 0, 7, 50)
    with pytest.raises(InvalidArgument, match=r"no queue 0 on broker 'b1' .*failOnDataLoss=false"):
        stream_offsets.initial(QUEUES[1:], replace(TOPIC, starting=named))


def test_a_new_queue_whose_broker_goes_away_is_not_passed_over(caplog):
    start = offsets(b1_0=7)
    end = stream_offsets.latest(start, QUEUES, None, TOPIC)
    with pytest.raises(OffsetOutOfRange, match="t/2 on broker 'b0' is not there: 0 to 30"):
        stream_offsets.between(start, end, QUEUES[:1], TOPIC)
    lenient = replace(TOPIC, fail_on_data_loss=False)
    (piece,) = stream_offsets.between(start, end, QUEUES[:1], lenient)
    assert (piece.broker, piece.start, piece.end) == ("b1", 7, 50)
    assert "t/2 on broker 'b0' is not there: 0 to 30 are passed over" in caplog.text


@pytest.mark.parametrize("offset", [9, 31])
def test_offsets_that_are_gone_end_the_stream_unless_they_may_be_passed(offset, caplog):
    start = offsets(b0_2=offset, b0_10=5, b1_0=0)
    with pytest.raises(OffsetOutOfRange, match=f"offset {offset} does not exist"):
        stream_offsets.latest(start, QUEUES, None, TOPIC)
    lenient = replace(TOPIC, fail_on_data_loss=False)
    assert stream_offsets.latest(start, QUEUES, None, lenient) == offsets(b0_2=30, b0_10=5, b1_0=50)
    assert f"offset {offset} does not exist" in caplog.text


def test_a_topic_made_anew_is_not_taken_for_the_old_one():
    start = offsets(b0_2=12, b0_10=5, b1_0=0)
    anew = [replace(queue, topic_id=99) for queue in QUEUES]
    with pytest.raises(TopicReplaced, match="made anew since offset"):
        stream_offsets.latest(start, anew, None, TOPIC)
    lenient = replace(TOPIC, fail_on_data_loss=False)
    end = stream_offsets.latest(start, anew, None, lenient)
    assert end["b0"] == {"topic_id": 99, "queues": {"2": 30, "10": 5}}
    pieces = stream_offsets.between(start, end, anew, lenient)
    assert [(p.broker, p.queue, p.start, p.end) for p in pieces] == [
        ("b0", 2, 10, 30),
        ("b1", 0, 0, 50),
    ]


def test_a_topic_made_anew_with_fewer_queues_keeps_no_place_in_the_others():
    start = offsets(b0_2=12, b0_10=5, b0_11=120, b1_0=0, b1_1=9)
    anew = [replace(queue, topic_id=99) if queue.broker == "b0" else queue for queue in QUEUES]
    lenient = replace(TOPIC, fail_on_data_loss=False)
    end = stream_offsets.latest(start, anew, None, lenient)
    assert end["b0"] == {"topic_id": 99, "queues": {"2": 30, "10": 5}}
    assert end["b1"]["queues"] == {"0": 50, "1": 9}
    # It has more of them later: nothing of those was read.
    more = [*anew, QueueBounds("b0", "h:1", 11, 0, 200, topic_id=99)]
    following = stream_offsets.latest(end, more, None, lenient)
    (piece,) = stream_offsets.between(end, following, more, lenient)
    assert (piece.broker, piece.queue, piece.start, piece.end) == ("b0", 11, 0, 200)


def test_what_was_planned_of_a_topic_that_was_made_anew_since_is_not_read_of_the_new_one(caplog):
    start, end = offsets(b0_2=12, b0_10=5, b1_0=0), offsets(b0_2=25, b0_10=5, b1_0=50)
    anew = [replace(queue, topic_id=99) if queue.broker == "b0" else queue for queue in QUEUES]
    with pytest.raises(TopicReplaced, match="made anew since offset"):
        stream_offsets.between(start, end, anew, TOPIC)
    lenient = replace(TOPIC, fail_on_data_loss=False)
    pieces = stream_offsets.between(start, end, anew, lenient)
    assert [(p.broker, p.queue, p.start, p.end) for p in pieces] == [("b1", 0, 0, 50)]
    assert "t/2 on broker 'b0': the topic was deleted and made anew" in caplog.text
    # The next micro-batch has all of the new one.
    following = stream_offsets.latest(end, anew, None, lenient)
    (piece,) = stream_offsets.between(end, following, anew, lenient)
    assert (piece.broker, piece.queue, piece.start, piece.end) == ("b0", 2, 10, 30)
