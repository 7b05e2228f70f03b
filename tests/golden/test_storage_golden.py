"""Bytes of version 1, pinned: what a release wrote, every later one must read.

The files are never written again.  A change of format gets a new version and a folder of its own
beside v1 (README.md).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from duemq_server.storage import checkpoint, durable_mark, frame, record, starts
from duemq_server.storage.disk import write_all
from duemq_server.storage.indexes import consume_queue, key_run
from duemq_server.storage.indexes.key_run import KeyRun
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from tests.crash.faulty_disk import FaultyDisk

V1 = Path(__file__).parent / "v1"
SIZES = struct.pack("<3I", 5, 4, 6)
TAGS = struct.pack("<3I", 0x11111111, 0, 0x33333333)
KEYS = struct.pack("<3I", 0, 0xAAAAAAAA, 0xBBBBBBBB)
DUE = struct.pack("<3q", 1_700_000_005_000, 1_700_000_060_000, 253_402_300_799_999)
PAYLOAD = b"firstnextlast.."
KEY_ENTRIES = key_run.entries_of(np.frombuffer(struct.pack("<3I", 0xBBBBBBBB, 0, 7), "<u4"), 0)
STORE_MS = 1_700_000_000_123


def plain_frame() -> bytes:
    return b"".join(
        frame.encode_parts(
            topic="orders",
            queue_id=2,
            base_offset=41,
            store_ms=STORE_MS,
            sizes=SIZES,
            tag_hashes=TAGS,
            key_hashes=KEYS,
            payload=PAYLOAD,
            producer_id=0x0123456789ABCDEF,
            producer_epoch=7,
            sequence=99,
        )
    )


def timed_frame() -> bytes:
    return b"".join(
        frame.encode_parts(
            topic="%TIMER%",
            queue_id=1,
            base_offset=1 << 40,
            store_ms=STORE_MS,
            sizes=SIZES,
            tag_hashes=TAGS,
            key_hashes=KEYS,
            payload=PAYLOAD,
            producer_id=(1 << 63) + 3,
            producer_epoch=0,
            sequence=0,
            target_topic="reminders",
            target_queue_id=-1,
            due_ms=DUE,
        )
    )


def log_entry() -> bytes:
    return b"".join(record.encode(9, [b"opaque body"], 11, 0x1000, 0x0F00))


def epoch_entry() -> bytes:
    body = epoch.encode(7, bytes(range(16)), STORE_MS)
    return b"".join(record.encode(epoch.KIND, [body], len(body), 0x1000, 0x0F00))


def segment() -> bytes:
    """Two groups: the plain frame, then the timed one and an entry of another kind."""
    disk = FaultyDisk()
    log = SegmentedLog.open("/log", disk)
    assert list(log.recover()) == []
    log.append(frame.KIND, [plain_frame()])
    log.write_pending()
    log.append(frame.KIND, [timed_frame()])
    log.append(200, [])
    log.write_pending()
    return disk.content(f"/log/{0:020d}")[: log.end_position]


def started() -> bytes:
    disk = FaultyDisk()
    disk.makedirs("/data")
    starts.begin("/data", disk, STORE_MS)
    return disk.content("/data/started")


ENCODED = {
    "log_entry": log_entry,
    "frame": plain_frame,
    "frame_timed": timed_frame,
    "segment": segment,
    "consume_queue": lambda: consume_queue.encode(4096, 112, SIZES, TAGS, KEYS, STORE_MS),
    "checkpoint": lambda: b"".join(checkpoint.encode([b"the owner's state"])),
    "key_run": lambda: b"".join(key_run.encode(41, 3, [KEY_ENTRIES])),
    "durable_mark": lambda: durable_mark.encode(123_456_789),
    "epoch_entry": epoch_entry,
    "started": started,
}


def golden(name: str) -> bytes:
    return (V1 / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", ENCODED)
def test_the_bytes_written_are_those_of_version_1(name: str) -> None:
    assert ENCODED[name]().hex(" ", 4) == golden(name).hex(" ", 4)


def test_every_golden_file_has_a_test() -> None:
    storage_files = {p.stem for p in V1.glob("*.bin")} & set(ENCODED)
    assert storage_files == set(ENCODED)


def test_an_entry_of_version_1_is_read() -> None:
    assert record.decode(memoryview(golden("log_entry"))) == Entry(
        0x1000, 9, memoryview(b"opaque body"), 0x1030, 0x0F00
    )


def test_a_frame_of_version_1_is_read() -> None:
    got = frame.decode(golden("frame"))
    assert (got.topic, got.queue_id, got.base_offset, got.store_ms) == ("orders", 2, 41, STORE_MS)
    assert (got.producer_id, got.producer_epoch, got.sequence) == (0x0123456789ABCDEF, 7, 99)
    assert got.sizes.tolist() == [5, 4, 6]
    assert got.tag_hashes.tolist() == [0x11111111, 0, 0x33333333]
    assert got.key_hashes.tolist() == [0, 0xAAAAAAAA, 0xBBBBBBBB]
    assert (bytes(got.payload), got.timed) == (PAYLOAD, False)


def test_a_timed_frame_of_version_1_is_read() -> None:
    got = frame.decode(golden("frame_timed"))
    assert (got.topic, got.target_topic, got.target_queue_id) == ("%TIMER%", "reminders", -1)
    assert got.due_ms.tolist() == [1_700_000_005_000, 1_700_000_060_000, 253_402_300_799_999]
    assert (got.producer_id, bytes(got.payload)) == ((1 << 63) + 3, PAYLOAD)


def test_an_epoch_entry_of_version_1_is_read() -> None:
    entry = record.decode(memoryview(golden("epoch_entry")))
    assert (entry.kind, entry.end - entry.position) == (32, epoch.ENTRY_BYTES)
    assert epoch.decode(entry.body) == (7, bytes(range(16)), STORE_MS)
    assert epoch.decode(bytes(entry.body) + b"more of a newer release") == (
        7,
        *epoch.decode(entry.body)[1:],
    )


def test_a_segment_of_version_1_is_recovered() -> None:
    disk = FaultyDisk()
    disk.makedirs("/log")
    disk.open(f"/log/{0:020d}", create=True).pwritev([golden("segment")], 0)
    entries = list(SegmentedLog.open("/log", disk).recover())
    assert [(e.kind, bytes(e.body)) for e in entries] == [
        (1, golden("frame")),
        (1, golden("frame_timed")),
        (200, b""),
    ]
    assert [e.synced_position for e in entries] == [0, entries[1].position, entries[1].position]


def test_small_files_of_version_1_are_read() -> None:
    assert checkpoint.decode(golden("checkpoint"), "checkpoint") == b"the owner's state"
    assert durable_mark.decode(golden("durable_mark")) == 123_456_789
    assert consume_queue.decode(golden("consume_queue")).tolist() == [
        (4240, 5, 144, 0x11111111, 0, STORE_MS),
        (4245, 4, 149, 0, 0xAAAAAAAA, STORE_MS),
        (4249, 6, 153, 0x33333333, 0xBBBBBBBB, STORE_MS),
    ]


def test_when_the_process_before_began_is_read() -> None:
    disk = FaultyDisk()
    disk.makedirs("/data")
    write_all(disk.open("/data/started", create=True), [golden("started")], 0)
    assert starts.begin("/data", disk, 0) == STORE_MS + 1


def test_a_key_run_of_version_1_is_read() -> None:
    disk = FaultyDisk()
    write_all(disk.open("/run", create=True), [golden("key_run")], 0)
    run = KeyRun(disk.open("/run"), "/run")
    assert (run.base, run.span, run.count) == (41, 3, 2)
    assert run.find(7, 41, 44, 10) == [43]
    assert run.find(0xBBBBBBBB, 41, 44, 10) == [41]
