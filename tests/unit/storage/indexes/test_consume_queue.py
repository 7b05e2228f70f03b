from __future__ import annotations

import struct

from duemq_server.storage import frame
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog
from tests.crash.faulty_disk import FaultyDisk


def u32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def test_entries_say_where_each_record_lies() -> None:
    data = consume_queue.encode(1000, 100, u32([7, 5]), u32([1, 2]), u32([3, 4]), 99)
    assert consume_queue.ENTRY.unpack_from(data, 0) == (1132, 7, 132, 1, 3, 99)
    assert consume_queue.ENTRY.unpack_from(data, 32) == (1139, 5, 139, 2, 4, 99)


def test_few_and_many_records_are_encoded_alike() -> None:
    few = consume_queue.VECTOR_COUNT_MIN - 1
    sizes = list(range(1, 2 * few + 1))
    tags = [2**32 - 1 - i for i in sizes]
    position = 2**40
    together = consume_queue.encode(position, 64, u32(sizes), u32(tags), u32(tags[::-1]), 2**41)
    head = consume_queue.encode(
        position, 64, u32(sizes[:few]), u32(tags[:few]), u32(tags[::-1][:few]), 2**41
    )
    assert together[: len(head)] == head
    fields = consume_queue.decode(together)
    assert fields["position"].tolist() == [
        position + 96 + sum(sizes[:i]) for i in range(len(sizes))
    ]
    assert (fields["position"] - fields["frame_back"] == position).all()


def test_an_entry_leads_to_its_record_in_the_log() -> None:
    log = SegmentedLog.open("/log", FaultyDisk())
    assert list(log.recover()) == []
    parts = frame.encode_parts(
        topic="t",
        queue_id=0,
        base_offset=0,
        store_ms=5,
        sizes=u32([3, 4]),
        tag_hashes=u32([0, 0]),
        key_hashes=u32([0, 0]),
        payload=b"onetwo!",
    )
    log.append(frame.KIND, [b"something else before"])
    position, _ = log.append(frame.KIND, parts)
    log.write_pending()
    stored = frame.decode(log.read_entry(position).body)
    entries = consume_queue.decode(consume_queue.encode_frame(position, stored))
    records = [bytes(log.read(int(e["position"]), int(e["size"]))) for e in entries]
    assert records == [b"one", b"two!"]
