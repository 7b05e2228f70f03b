import pytest

from duemq.protocol.record_bytes import varint
from duemq.v1 import message_pb2
from duemq_server.timer_service.timers.fired_records import fired

DUE_MS = 1_700_000_000_123


def entry(**fields: object) -> bytes:
    record = message_pb2.Record(**fields)  # type: ignore[arg-type]
    return message_pb2.RecordBatch(records=[record]).SerializeToString()


def fire(*entries: bytes) -> tuple[bytes, list[int]]:
    joined = b"".join(entries)
    slices, at = [], 0
    for each in entries:
        slices.append((joined, at, len(each), DUE_MS))
        at += len(each)
    pieces, sizes = fired(slices)
    return b"".join(pieces), sizes.tolist()


@pytest.mark.parametrize("body_bytes", [0, 1, 100, 115, 116, 117, 120, 127, 128, 16_370, 16_384])
def test_a_fired_record_is_the_stored_one_with_its_due_time(body_bytes: int) -> None:
    stored = entry(body=b"b" * body_bytes, message_id="m1", properties={"a": "b"})

    records, sizes = fire(stored, entry(message_id="m2"))

    first, second = message_pb2.RecordBatch.FromString(records).records
    assert sum(sizes) == len(records)
    assert (first.body, first.message_id, first.due_ms) == (b"b" * body_bytes, "m1", DUE_MS)
    assert dict(first.properties) == {"a": "b"}
    assert (second.message_id, second.due_ms) == ("m2", DUE_MS)


def test_a_due_time_that_the_producer_wrote_is_replaced() -> None:
    records, _ = fire(entry(message_id="m", due_ms=1))

    assert message_pb2.RecordBatch.FromString(records).records[0].due_ms == DUE_MS


def test_a_length_that_is_not_encoded_in_the_shortest_way_is_understood() -> None:
    message = message_pb2.Record(message_id="m").SerializeToString()
    stored = b"\x0a" + bytes([len(message) | 0x80, 0]) + message

    records, _ = fire(stored)

    assert message_pb2.RecordBatch.FromString(records).records[0].due_ms == DUE_MS


def test_what_is_not_a_record_is_passed_on_as_it_is() -> None:
    assert fire(b"\x12\x01x") == (b"\x12\x01x", [3])


@pytest.mark.parametrize(("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01")])
def test_varints(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded
