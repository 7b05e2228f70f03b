"""Bytes of a group's record, pinned: what a release wrote, every later one must read."""

from __future__ import annotations

from pathlib import Path

from duemq_server.replication.protocol.record import Record, ReplicaId, decode, encode

GOLDEN = Path(__file__).parent / "v1" / "group_record.json"
A, B = ReplicaId("a", "0123456789abcdef" * 2), ReplicaId("b", "fedcba9876543210" * 2)
RECORD = Record(
    group="broker-0",
    store_id=0x0123456789ABCDEF,
    members=frozenset("abc"),
    in_sync=frozenset({B, A}),
    epoch=7,
    leader=B,
    address="10.0.0.2:7001",
    registered_ms=1_700_000_000_123,
    log_version=1,
    revision=19,
)


def test_the_bytes_written_are_those_of_format_1() -> None:
    assert encode(RECORD) == GOLDEN.read_bytes()


def test_a_record_of_format_1_is_read() -> None:
    assert decode(GOLDEN.read_bytes()) == RECORD
