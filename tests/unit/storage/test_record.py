from __future__ import annotations

import pytest

from duemq_server.storage import record
from duemq_server.storage.errors import UnknownVersion
from duemq_server.storage.record import InvalidEntryError


def encoded(body: bytes, position: int = 0, kind: int = 1, synced: int = 0) -> bytes:
    return b"".join(record.encode(kind, [body], len(body), position, synced))


def test_an_entry_is_aligned_and_carries_its_fields() -> None:
    data = encoded(b"hello", position=80, kind=7, synced=40)
    assert len(data) == record.entry_bytes(5) == 40
    entry = record.decode(memoryview(data), 0, 80)
    assert (entry.position, entry.kind, entry.end, entry.synced_position) == (80, 7, 120, 40)
    assert entry.body == b"hello"


def test_parts_of_every_type_give_the_same_bytes_as_one() -> None:
    parts = [b"ab", bytearray(b"cd"), memoryview(b"ef"), memoryview(bytearray()), b"", b"g"]
    assert b"".join(record.encode(1, parts, 7, 0, 0)) == encoded(b"abcdefg")


def test_an_entry_without_a_body_is_only_a_header() -> None:
    assert record.decode(memoryview(encoded(b""))).body == b""


def test_an_entry_at_another_position_is_refused() -> None:
    with pytest.raises(InvalidEntryError, match="belongs at position 8, found at 16"):
        record.decode(memoryview(encoded(b"x", position=8)), 0, 16)


def test_an_entry_says_which_check_failed() -> None:
    data = bytearray(encoded(b"hello"))
    with pytest.raises(InvalidEntryError, match="header is cut off"):
        record.decode(memoryview(data[:31]))
    with pytest.raises(InvalidEntryError, match="cut off: 32 bytes of 40"):
        record.decode(memoryview(data[:32]))
    data[33] ^= 1
    with pytest.raises(InvalidEntryError, match="CRC-32C"):
        record.decode(memoryview(data))
    with pytest.raises(InvalidEntryError, match="magic is 0x0000"):
        record.decode(memoryview(bytes(40)))


def test_a_length_that_is_damaged_is_never_trusted() -> None:
    data = bytearray(encoded(b"hello"))
    data[11] = 0xFF
    assert record.plausible_length(data) == 0
    with pytest.raises(InvalidEntryError, match="do not fit"):
        record.decode(memoryview(data))


def test_an_entry_of_a_newer_release_is_told_from_damage() -> None:
    data = bytearray(encoded(b"hello"))
    data[6] = 2
    data[:4] = record.crc32c(0, bytes(data[4:])).to_bytes(4, "little")
    with pytest.raises(UnknownVersion, match="version 2"):
        record.decode(memoryview(data))


def test_a_run_is_split_into_its_entries() -> None:
    run = encoded(b"a", 0) + encoded(b"bb", 40) + encoded(b"", 80)
    assert [bytes(entry.body) for entry in record.split(run)] == [b"a", b"bb", b""]
    with pytest.raises(InvalidEntryError):
        list(record.split(run[:-1]))
