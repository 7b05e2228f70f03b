"""The broker's own formats of version 1, pinned: checkpoint payload, lanes, journal entries."""

from __future__ import annotations

from pathlib import Path

from broker import journal, state
from broker.offsets import GroupQueue, Progress
from broker.producers import LaneKey, Producers, Stored
from broker.state import State
from broker.topics import Topic

V1 = Path(__file__).parent / "v1"
LANES = (
    (LaneKey(0x0123456789ABCDEF, "orders", 2, False), 7, 40),
    (LaneKey((1 << 63) | 5, "größe", -1, True), 0, 0),
)
TOPIC = Topic("orders", 3, 4, 1_000)
CHANGES = [
    (GroupQueue("billing", "orders", 0), Progress(41, 1_700_000_000_123)),
    (GroupQueue("billing", "orders", 1), Progress(0, 5)),
]


def producers() -> Producers:
    made = Producers(idle_ms=1_000)
    for key, epoch, first in LANES:
        for number in range(3):
            stored = Stored(96 * number, 10 * number, 1_700_000_000_123 + number, 2, 10)
            made.record(key, epoch, first + number, stored)
    return made


def checkpoint() -> State:
    return State(
        position=16_777_312,
        verify_from=96,
        store_ms=1_700_000_000_125,
        topics={
            "next_id": 4,
            "topics": [{"name": "orders", "id": 3, "queues": 2, "message_bytes_max": 0}],
        },
        offsets=[["billing", "orders", 0, 41, 1_700_000_000_123]],
        queues={"orders": [30, 0]},
        lanes=producers().encode(),
    )


def test_the_checkpoint_is_written_and_read_as_ever() -> None:
    golden = (V1 / "broker_checkpoint.bin").read_bytes()
    assert state.encode(checkpoint()) == golden
    assert state.decode(golden) == checkpoint()


def test_lanes_are_read_as_ever() -> None:
    lanes = state.decode((V1 / "broker_checkpoint.bin").read_bytes()).lanes
    again = Producers(idle_ms=1_000)
    again.load(lanes)
    assert again.encode() == producers().encode()
    key, epoch, first = LANES[0]
    assert again.check(key, epoch, first + 1, 0) == Stored(96, 10, 1_700_000_000_124, 2, 10)


def test_journal_entries_are_written_and_read_as_ever() -> None:
    made, deleted, offsets = (V1 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.topic_created(TOPIC) == made
    assert journal.read_topic_created(memoryview(made)) == TOPIC
    assert journal.topic_deleted("orders") == deleted
    assert journal.read_topic_deleted(memoryview(deleted)) == "orders"
    assert journal.offsets("billing", CHANGES) == offsets
    assert journal.read_offsets(memoryview(offsets)) == CHANGES
