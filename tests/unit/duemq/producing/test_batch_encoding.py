"""The hand-made bytes of a batch against protobuf's own."""

from itertools import accumulate
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument, TooLarge
from duemq.producing import batch_encoding
from duemq.producing.batch import Batch
from duemq.producing.batch_encoding import Numbers, extras_of
from duemq.protocol.due import DELAY_LEVELS, DELAYS_MS, DUE_MS
from duemq.protocol.limits import PROPERTIES_BYTES_DEFAULT
from duemq.v1 import broker_pb2, view_pb2
from duemq.v1.message_pb2 import Record, RecordBatch

BORN_MS = 1_790_000_000_000
ID_HEAD = b"019a5e2b7c1" + b"0123456789abcdef0123"[:14]
NUMBERS = Numbers(producer_id=2**62 + 1, epoch=2, sequence=300)

text = st.text(max_size=20)
optional = st.none() | text
messages = st.lists(
    st.tuples(
        st.binary(max_size=300),
        optional,
        optional,
        optional,
        st.none() | st.dictionaries(text, text, max_size=3),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


def batch(due_field=0):
    return Batch("a topic", (None, due_field), {}, 77, ID_HEAD, BORN_MS)


def expected(index, body, key, tag, ordering_key, properties, born_ms):
    return Record(
        body=body,
        message_id=f"{ID_HEAD.decode()}{index:03x}",
        key=key or "",
        tag=tag or "",
        ordering_key=ordering_key or "",
        properties=properties or {},
        born_ms=born_ms,
    )


@given(messages)
def test_a_batch_is_what_protobuf_would_have_written(given_messages):
    growing, records, born_ms = batch(), [], BORN_MS
    for index, (body, key, tag, ordering_key, properties, later_ms) in enumerate(given_messages):
        extras = None
        if key or tag or ordering_key or properties:
            extras = extras_of(key, tag, ordering_key, properties)
        if extras is not None or growing.extras is not None:
            growing.add_extras(extras or batch_encoding.NO_EXTRAS)
        growing.bodies.append(body)
        if later_ms:
            born_ms += later_ms
            growing.born_at(index, born_ms)
        records.append(expected(index, body, key, tag, ordering_key, properties, born_ms))
    request = broker_pb2.SendRequest.FromString(growing.encode(3, NUMBERS))
    assert request.request_id == 77
    (sent,) = request.batches
    assert (sent.topic, sent.queue_id) == ("a topic", 3)
    assert (sent.producer_id, sent.producer_epoch, sent.sequence) == NUMBERS
    assert list(sent.records.records) == records
    assert cut(growing.encoded, sent.sizes) == records
    assert list(sent.tag_hashes) == [crc(record.tag) for record in records]
    assert list(sent.key_hashes) == [crc(record.key) for record in records]
    assert [*sent.delays_ms, *sent.due_ms, *sent.delay_levels] == []


def cut(encoded, sizes):
    """The records, each from the bytes that its size says it has."""
    packed = view_pb2.SendRequestView.FromString(encoded).batches[0].records
    ends = list(accumulate(sizes))
    assert ends[-1] == len(packed)
    pieces = [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [record for piece in pieces for record in RecordBatch.FromString(piece).records]


def crc(value):
    return (crc32(value.encode()) or 1) if value else 0


def test_the_bytes_of_a_record_with_all_fields_are_protobufs_own():
    growing = batch()
    growing.add_extras(extras_of("k" * 200, "t", "o", {"name": "value"}))
    growing.bodies.append(b"x" * 200)
    (sent,) = broker_pb2.SendRequest.FromString(growing.encode(0, NUMBERS)).batches
    (record,) = sent.records.records
    assert sent.records.SerializeToString(deterministic=True) in growing.encoded
    assert record == expected(0, b"x" * 200, "k" * 200, "t", "o", {"name": "value"}, BORN_MS)


def test_a_list_of_bodies_shares_its_options():
    growing = batch(DELAYS_MS)
    growing.bodies = [b"a", b"bb"]
    growing.fill(growing.bodies, extras_of("k", "t", None, None), 5_000)
    (sent,) = broker_pb2.SendRequest.FromString(growing.encode(-1, NUMBERS)).batches
    assert [record.key for record in sent.records.records] == ["k", "k"]
    assert list(sent.tag_hashes) == [crc32(b"t")] * 2
    assert list(sent.delays_ms) == [5_000]
    assert sent.queue_id == -1
    assert growing.count == 2


@pytest.mark.parametrize(
    ("field", "name", "values"),
    [
        (DELAYS_MS, "delays_ms", [1, 2**40]),
        (DUE_MS, "due_ms", [0, 2**41]),
        (DELAY_LEVELS, "delay_levels", [1, 18]),
    ],
)
def test_due_times_go_to_their_array(field, name, values):
    growing = batch(field)
    for value in values:
        growing.bodies.append(b"x")
        growing.due_values.append(value)
    (sent,) = broker_pb2.SendRequest.FromString(growing.encode(-1, NUMBERS)).batches
    assert list(getattr(sent, name)) == values


def test_a_renumbered_batch_differs_in_its_numbers_only():
    growing = batch()
    growing.bodies.append(b"body")
    first = broker_pb2.SendRequest.FromString(growing.encode(0, NUMBERS))
    again = broker_pb2.SendRequest.FromString(growing.encode(2, Numbers(2**62 + 1, 3, 0)))
    assert (again.batches[0].producer_epoch, again.batches[0].sequence) == (3, 0)
    assert again.batches[0].queue_id == 2
    again.batches[0].queue_id = 0
    again.batches[0].producer_epoch, again.batches[0].sequence = 2, 300
    assert again == first


def test_equal_numbers_of_another_queue_are_another_batch():
    growing = batch()
    growing.bodies.append(b"body")
    growing.encode(0, NUMBERS)
    (moved,) = broker_pb2.SendRequest.FromString(growing.encode(1, NUMBERS)).batches
    assert moved.queue_id == 1


def test_joined_requests_are_one_request_with_all_batches():
    one, two = batch(), batch()
    two.number = 78
    one.bodies.append(b"1")
    two.bodies.append(b"2")
    joined = broker_pb2.SendRequest.FromString(one.encode(0, NUMBERS) + two.encode(1, NUMBERS))
    assert joined.request_id == 78
    assert [each.queue_id for each in joined.batches] == [0, 1]


def test_extras_are_checked():
    with pytest.raises(InvalidArgument, match="tag: 5 is not allowed: text") as raised:
        extras_of(None, 5, None, None)  # type: ignore[arg-type]
    assert raised.value.field == "tag"
    with pytest.raises(InvalidArgument, match=r"key: '\\ud800' is not allowed: valid Unicode"):
        extras_of("\ud800", None, None, None)
    with pytest.raises(TooLarge) as too_large:
        extras_of(None, None, None, {"p": "x" * PROPERTIES_BYTES_DEFAULT})
    assert too_large.value.limit == str(PROPERTIES_BYTES_DEFAULT)


@given(st.integers(0, 2**64 - 1))
def test_varint(number):
    assert Record(attempt=0, born_ms=number - 2**64 if number >= 2**63 else number) == (
        Record.FromString(b"\x38" + batch_encoding.varint(number))
    )
