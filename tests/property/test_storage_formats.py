"""Whatever is written comes back; whatever is damaged is noticed."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from duemq_server.storage import checkpoint, durable_mark, frame, record
from duemq_server.storage.errors import CorruptFile, CorruptLog
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog
from tests.crash.faulty_disk import FaultyDisk

DIRECTORY = "/log"
SEGMENT = f"{DIRECTORY}/{0:020d}"
MARK = f"{DIRECTORY}/durable"
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)


@dataclass(frozen=True)
class Records:
    sizes: list[int]
    tags: list[int]
    keys: list[int]
    due: list[int] | None


@st.composite
def record_arrays(draw: st.DrawFn, count_max: int = 100) -> Records:
    count = draw(st.integers(0, count_max))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=count, max_size=count))

    due = column(I64) if draw(st.booleans()) else None
    return Records(column(st.integers(0, 300)), column(U32), column(U32), due)


def u32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@given(record_arrays(), NAMES, NAMES, I64, I64, U64, U64, U32, I32, I32)
def test_a_frame_comes_back_as_it_was(
    records: Records,
    topic: str,
    target_topic: str,
    base_offset: int,
    store_ms: int,
    producer_id: int,
    sequence: int,
    epoch: int,
    queue_id: int,
    target_queue_id: int,
) -> None:
    payload = bytes(i & 255 for i in range(sum(records.sizes)))
    due = struct.pack(f"<{len(records.due)}q", *records.due) if records.due is not None else None
    parts = frame.encode_parts(
        topic=topic,
        queue_id=queue_id,
        base_offset=base_offset,
        store_ms=store_ms,
        sizes=u32(records.sizes),
        tag_hashes=u32(records.tags),
        key_hashes=u32(records.keys),
        payload=payload,
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=sequence,
        target_topic=target_topic,
        target_queue_id=target_queue_id,
        due_ms=due,
    )
    got = frame.decode(b"".join(parts))
    assert (got.topic, got.target_topic) == (topic, target_topic)
    assert (got.queue_id, got.target_queue_id) == (queue_id, target_queue_id)
    assert (got.base_offset, got.store_ms) == (base_offset, store_ms)
    assert (got.producer_id, got.producer_epoch, got.sequence) == (producer_id, epoch, sequence)
    assert got.sizes.tolist() == records.sizes
    assert got.tag_hashes.tolist() == records.tags
    assert got.key_hashes.tolist() == records.keys
    assert got.timed == (records.due is not None)
    assert got.due_ms.tolist() == (records.due or [])
    assert got.payload == payload


@given(record_arrays(), st.integers(0, 2**40), st.integers(64, 2000), st.integers(0, 2**50))
def test_consume_queue_entries_point_at_every_record(
    records: Records, position: int, payload_at: int, store_ms: int
) -> None:
    data = consume_queue.encode(
        position, payload_at, u32(records.sizes), u32(records.tags), u32(records.keys), store_ms
    )
    back = record.HEADER_BYTES + payload_at
    expected = []
    for size, tag, key in zip(records.sizes, records.tags, records.keys, strict=True):
        expected.append((position + back, size, back, tag, key, store_ms))
        back += size
    assert list(consume_queue.ENTRY.iter_unpack(data)) == expected
    assert consume_queue.decode(data).tolist() == expected


@given(st.binary(max_size=300), st.data())
def test_a_checkpoint_notices_every_damage(payload: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(payload)))
    encoded = b"".join(checkpoint.encode([payload[:cut], payload[cut:]]))
    assert checkpoint.decode(encoded, "state") == payload
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(damaged), encoded[:at], encoded + b"x"):
        with pytest.raises(CorruptFile):
            checkpoint.decode(wrong, "state")


@given(U64, st.data())
def test_a_damaged_mark_counts_as_none(position: int, data: st.DataObject) -> None:
    encoded = durable_mark.encode(position)
    assert durable_mark.decode(encoded) == position
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    assert durable_mark.decode(bytes(damaged)) == 0
    assert durable_mark.decode(encoded[:at]) == 0


GROUPS = st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=4), min_size=1, max_size=5)


@dataclass(frozen=True)
class Written:
    disk: FaultyDisk
    bodies: list[bytes]
    starts: list[int]
    group_starts: list[int]
    end: int


def written(groups: list[list[bytes]]) -> Written:
    """A log of one segment with the groups committed."""
    disk = FaultyDisk()
    log = SegmentedLog.open(DIRECTORY, disk)
    assert list(log.recover()) == []
    starts: list[int] = []
    group_starts: list[int] = []
    for group in groups:
        group_starts += [log.end_position] * len(group)
        starts += [log.append(3, [body])[0] for body in group]
        log.write_pending()
    log.close()
    disk.chop(SEGMENT, log.end_position)
    return Written(
        disk, [b for group in groups for b in group], starts, group_starts, log.end_position
    )


def recovered(disk: FaultyDisk) -> list[bytes]:
    return [bytes(entry.body) for entry in SegmentedLog.open(DIRECTORY, disk).recover()]


@given(GROUPS, st.data())
def test_a_truncated_log_yields_the_whole_entries_before_the_cut(
    groups: list[list[bytes]], data: st.DataObject
) -> None:
    log = written(groups)
    size = data.draw(st.integers(0, log.end))
    log.disk.chop(SEGMENT, size)
    ends = [*log.starts[1:], log.end]
    assert recovered(log.disk) == [
        b for b, end in zip(log.bodies, ends, strict=True) if end <= size
    ]


@given(GROUPS, st.data(), st.booleans())
def test_a_flipped_bit_is_cut_at_the_end_and_refused_before_it(
    groups: list[list[bytes]], data: st.DataObject, mark_is_there: bool
) -> None:
    log = written(groups)
    at = data.draw(st.integers(0, log.end - 1))
    log.disk.flip(SEGMENT, at, data.draw(st.integers(0, 7)))
    if not mark_is_there:
        log.disk.overwrite(MARK, 0, bytes(16))
    damaged = max(i for i, start in enumerate(log.starts) if start <= at)
    last = damaged == len(log.starts) - 1
    in_last_group = log.group_starts[damaged] == log.group_starts[-1]
    if last or (in_last_group and not mark_is_there):
        assert recovered(log.disk) == log.bodies[:damaged]
        return
    with pytest.raises(CorruptLog) as caught:
        recovered(log.disk)
    assert (caught.value.path, caught.value.offset) == (SEGMENT, log.starts[damaged])


@given(GROUPS, st.binary(min_size=1, max_size=600))
def test_garbage_after_the_end_is_cut(groups: list[list[bytes]], garbage: bytes) -> None:
    assume(garbage.strip(b"\0"))
    log = written(groups)
    log.disk.overwrite(SEGMENT, log.end, garbage)
    assert recovered(log.disk) == log.bodies
    assert log.disk.content(f"{SEGMENT}.broken-{log.end}") == garbage.rstrip(b"\0")
    assert recovered(log.disk) == log.bodies
