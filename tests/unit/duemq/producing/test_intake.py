"""What is given to `send`, and how what is given to `send_many` is cut."""

import pytest

from duemq.errors import InvalidArgument
from duemq.message import Outgoing
from duemq.producing.intake import FIRST_CHUNK_MESSAGES, LOOK_MESSAGES, Intake
from duemq.producing.outbox import Outbox, Target
from duemq.protocol.limits import BATCH_BYTES_DEFAULT
from duemq.testing import MemoryCluster

FRAME_BYTES = 100_000


@pytest.fixture
def intake():
    return Intake(Outbox(1 << 30, FRAME_BYTES, lambda: None))


def chunks(intake, messages):
    return [chunk for chunk, _ in intake.chunks(messages, Outgoing(b""))]


@pytest.mark.parametrize("long", [bytes(5_000), Outgoing(bytes(5_000))])
def test_long_messages_behind_short_ones_are_not_read_by_the_thousand(intake, long):
    """A chunk is in memory before the first of it is sent."""
    given = [b""] * (FIRST_CHUNK_MESSAGES + 1) + [long] * 1_000
    got = chunks(intake, iter(given))
    assert [each for chunk in got for each in chunk] == given
    assert max(chunk.count(long) for chunk in got) <= LOOK_MESSAGES


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_messages_of_one_length_fill_frames(intake, kind):
    got = chunks(intake, kind([bytes(36)] * 5_000))
    full = FRAME_BYTES // 100
    assert sum(map(len, got)) == 5_000
    assert {len(chunk) for chunk in got[1:-1]} == {full}


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", 0), ("tag", b""), ("ordering_key", 0), ("properties", []), ("properties", False)],
)
def test_what_counts_as_nothing_is_not_taken_for_nothing(field, value):
    wrong, producer = {field: value}, MemoryCluster().producer()
    calls = [
        lambda: producer.send("orders", b"", **wrong),
        lambda: producer.send("orders", b"", delay="1h", timer_key="k", **wrong),
        lambda: producer.send_many("orders", [b""], **wrong),
        lambda: producer.send_many("orders", [Outgoing(b"", **wrong)]),
        lambda: producer.send_many("orders", iter([Outgoing(b"", **wrong)])),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument) as raised:
            call()
        assert raised.value.field.split(".")[-1] == field
        assert raised.value.value == str(value)


def test_empty_labels_are_none():
    cluster = MemoryCluster()
    cluster.producer().send("orders", b"", key="", tag="", ordering_key="", properties={})
    (message,) = cluster.messages("orders")
    assert (message.key, message.tag, message.ordering_key) == (None, None, None)


def test_a_list_goes_in_batches_that_brokers_take_however_large_a_frame_may_be():
    """It may overshoot the frame, and its spans come on top."""
    intake = Intake(Outbox(1 << 30, BATCH_BYTES_DEFAULT, lambda: None))
    pieces = []
    given = [bytes(90_000)] * 100
    intake.offer_chunk(Target("t", (), traced=False), (given, True), Outgoing(b""), pieces)
    assert sum(count for _, _, count in pieces) == len(given)
    assert max(batch.size for batch, _, _ in pieces) < BATCH_BYTES_DEFAULT
