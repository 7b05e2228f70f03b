from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.record_bytes import read_entry, read_varint, text_hash, varint
from duemq.v1 import message_pb2


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_a_varint_is_read_as_it_was_written(value: int, behind: bytes) -> None:
    written = varint(value)
    assert read_varint(written + behind, 0, len(written + behind)) == (value, len(written))


@given(st.integers(0, 2**63 - 1))
def test_a_varint_is_that_of_protobuf(value: int) -> None:
    field = b"\x38" + varint(value) if value else b""
    assert message_pb2.Record(born_ms=value).SerializeToString() == field


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10, b"\xff" * 11])
def test_what_does_not_end_is_no_varint(data: bytes) -> None:
    assert read_varint(data, 0, len(data)) == (0, -1)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_entries_are_found_one_after_the_other(bodies: list[bytes]) -> None:
    records = [message_pb2.Record(body=body) for body in bodies]
    data, at = message_pb2.RecordBatch(records=records).SerializeToString(), 0
    for record in records:
        start, end = read_entry(data, at, len(data))
        assert data[start:end] == record.SerializeToString()
        at = end
    assert at == len(data)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x0a\x02a", b"\x12\x01a", b"\x0a\x80"])
def test_what_is_cut_off_or_another_field_is_no_entry(data: bytes) -> None:
    assert read_entry(data, 0, len(data)) == (-1, -1)


def test_no_hash_stands_for_no_text_alone() -> None:
    assert text_hash(b"") == 0
    assert text_hash(b"a") == crc32(b"a")
    assert crc32(b"\x9d\x0a\xd9\x6d") == 0
    assert text_hash(b"\x9d\x0a\xd9\x6d") == 1
