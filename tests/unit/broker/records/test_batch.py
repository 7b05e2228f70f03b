import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument, TooLarge
from duemq.protocol.record_bytes import text_hash
from duemq.v1 import message_pb2
from duemq_server.broker.records.batch import BATCH_RECORDS_MAX, BatchLimits, check, seen_later
from duemq_server.broker.records.columns import derive_columns
from tests.unit.broker.batches import FakeBatch, batch, entry, record

LIMITS = BatchLimits(message_bytes_max=10_000, batch_bytes_max=200_000, properties_bytes_max=500)


def checked(given: FakeBatch, message_bytes_max: int = 10_000):
    return check(given, LIMITS, message_bytes_max)


@pytest.mark.parametrize("count", [1, 3, 31, 32, 200])
@pytest.mark.parametrize("body_bytes", [0, 100, 126, 127, 128, 400])
def test_a_good_batch_passes_unchanged(count: int, body_bytes: int) -> None:
    given = batch([bytes(body_bytes)] * count)
    columns = checked(given)
    assert columns.count == count
    assert columns.records is given.records
    assert columns.sizes is given.sizes


def test_records_of_every_size_class_pass_in_one_batch() -> None:
    bodies = [bytes(n) for n in (0, 1, 100, 120, 121, 122, 200, 9_000)] * 5
    assert checked(batch(bodies)).count == 40


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=60), st.data())
def test_a_size_that_is_not_the_records_is_refused(
    bodies: list[bytes], data: st.DataObject
) -> None:
    given = batch(bodies)
    sizes = list(struct.unpack(f"<{len(bodies)}I", given.sizes))
    first = data.draw(st.integers(0, len(sizes) - 1))
    second = data.draw(st.integers(0, len(sizes) - 1))
    shift = data.draw(st.integers(1, 5))
    sizes[first] += shift
    sizes[second] -= shift
    if min(sizes) < 0 or first == second:
        return
    given.sizes = struct.pack(f"<{len(sizes)}I", *sizes)
    with pytest.raises(InvalidArgument) as caught:
        checked(given)
    assert caught.value.field == "sizes"


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=60))
def test_columns_that_are_left_out_are_derived(bodies: list[bytes]) -> None:
    given = batch(bodies, tags=[f"t{n % 3}" for n in range(len(bodies))])
    bare = FakeBatch(records=given.records)
    columns = checked(bare)
    assert (columns.sizes, columns.tag_hashes, columns.key_hashes) == (
        given.sizes,
        given.tag_hashes,
        given.key_hashes,
    )


def test_what_protobuf_encodes_is_derived_the_same() -> None:
    message = message_pb2.Record(
        body=b"x" * 300,
        message_id="m",
        key="k",
        tag="t",
        properties={"a": "b"},
        born_ms=5,
        due_ms=9,
    )
    records = message_pb2.RecordBatch(records=[message, message_pb2.Record()]).SerializeToString()
    sizes, tags, keys = derive_columns(records, 100)
    assert struct.unpack("<2I", tags) == (zlib.crc32(b"t"), 0)
    assert struct.unpack("<2I", keys) == (zlib.crc32(b"k"), 0)
    assert struct.unpack("<2I", sizes) == (len(records) - 2, 2)


@pytest.mark.parametrize("message_id", ["", "m" * 65])
def test_a_message_id_is_the_producers_affair(message_id: str) -> None:
    """As message.proto says: clients that send none, or a long one, are served."""
    message = message_pb2.Record(body=b"b", message_id=message_id)
    records = message_pb2.RecordBatch(records=[message]).SerializeToString()
    sizes, tags, keys = derive_columns(records, 1)
    for sent in (
        FakeBatch(records=records),
        FakeBatch(records=records, sizes=sizes, tag_hashes=tags, key_hashes=keys),
    ):
        assert checked(sent).records == records


@given(st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_batch_are_refused_or_understood_and_nothing_else(data: bytes) -> None:
    try:
        sizes, _, _ = derive_columns(data, 100)
    except InvalidArgument:
        return
    assert sum(struct.unpack(f"<{len(sizes) // 4}I", sizes)) == len(data)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"records": b""}, "records"),
        ({"sizes": b""}, "tag_hashes"),
        ({"tag_hashes": b""}, "tag_hashes"),
        ({"key_hashes": b"\0" * 4}, "key_hashes"),
        ({"sizes": b"\0" * 3, "tag_hashes": b"\0" * 3, "key_hashes": b"\0" * 3}, "sizes"),
    ],
)
def test_mismatched_arrays_are_refused_by_name(changes: dict[str, bytes], field: str) -> None:
    given = batch([b"a", b"b"])
    for name, value in changes.items():
        setattr(given, name, value)
    with pytest.raises(InvalidArgument) as caught:
        checked(given)
    assert caught.value.field in (field, "sizes")


@pytest.mark.parametrize(
    ("early_ms", "value"), [([3], 4), ([3, 2, 1], 12), ([1, 3], 3), ([0, 0xFFFFFFFF], 0xFFFFFFFF)]
)
def test_times_that_are_not_one_a_record_or_rise_are_refused(
    early_ms: list[int], value: int
) -> None:
    given = batch(
        [b"a", b"b"], not_before_ms=9, early_ms=struct.pack(f"<{len(early_ms)}I", *early_ms)
    )
    with pytest.raises(InvalidArgument) as caught:
        checked(given)
    assert (caught.value.field, str(caught.value.value)) == ("early_ms", str(value))


@pytest.mark.parametrize("odd", [b"a", b"abcde"])
def test_times_that_are_no_numbers_are_refused(odd: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked(batch([b"a"], not_before_ms=9, early_ms=odd))
    assert caught.value.field == "early_ms"


@pytest.mark.parametrize(
    ("now_ms", "seen"),
    [(10, [(0, 11), (2, 14), (3, 20)]), (11, [(2, 14), (3, 20)]), (14, [(3, 20)]), (20, [])],
)
def test_when_each_record_is_seen(now_ms: int, seen: list[tuple[int, int]]) -> None:
    early_ms = struct.pack("<4I", 9, 9, 6, 0)
    given = batch([b"a", b"b", b"c", b"d"], not_before_ms=20, early_ms=early_ms)
    assert seen_later(given, now_ms) == seen
    assert seen_later(batch([b"a"], not_before_ms=20), 19) == [(0, 20)]


def test_too_many_records_are_refused() -> None:
    one = entry(b"")
    count = BATCH_RECORDS_MAX + 1
    given = FakeBatch(
        records=one * count,
        sizes=struct.pack("<I", 2) * count,
        tag_hashes=bytes(4 * count),
        key_hashes=bytes(4 * count),
    )
    with pytest.raises(InvalidArgument, match=str(BATCH_RECORDS_MAX)):
        checked(given)


def test_body_limit_is_exact_and_the_topics() -> None:
    assert checked(batch([bytes(1_000)]), message_bytes_max=1_000).count == 1
    with pytest.raises(TooLarge) as caught:
        checked(batch([b"", bytes(1_001)]), message_bytes_max=1_000)
    error = caught.value
    assert (error.field, error.value, error.limit) == ("body", "1001", "1000")


def test_properties_limit_is_exact() -> None:
    inside = entry(record(properties=bytes(490)))
    assert checked(FakeBatch(records=inside)).count == 1
    beyond = entry(record(properties=bytes(520)))
    with pytest.raises(TooLarge) as caught:
        checked(FakeBatch(records=beyond))
    assert (caught.value.field, caught.value.limit) == ("properties", "500")


def test_large_body_with_small_properties_passes() -> None:
    assert checked(FakeBatch(records=entry(record(bytes(9_000), properties=b"x")))).count == 1


def test_batch_limit() -> None:
    with pytest.raises(TooLarge) as caught:
        checked(batch([bytes(1_000)] * 300))
    assert (caught.value.field, caught.value.limit) == ("records", "200000")


def test_a_hash_is_zero_only_for_no_text() -> None:
    assert text_hash(b"") == 0
    assert text_hash(b"a") == zlib.crc32(b"a")
