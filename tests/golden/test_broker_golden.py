"""The broker's own formats, pinned: checkpoint payload, lanes, journal entries."""

from __future__ import annotations

import struct
from pathlib import Path

from duemq.protocol.retry_policy import ExponentialDelays, RetryPolicy
from duemq_server.broker.records import retry_record
from duemq_server.broker.records.retry_record import MessagePlace, Story
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.records.timer_owners import TimerOwners
from duemq_server.broker.store import checkpoint_state, group_configs, journal
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.producers import LaneKey, Producers, StoredPlace
from duemq_server.broker.store.topics import Topic
from duemq_server.storage import frame

V1 = Path(__file__).parent / "v1"
V2 = Path(__file__).parent / "v2"
V3 = Path(__file__).parent / "v3"
V4 = Path(__file__).parent / "v4"
V5 = Path(__file__).parent / "v5"
V6 = Path(__file__).parent / "v6"
LANES = (
    (LaneKey(0x0123456789ABCDEF, "orders", 2, False), 7, 40),
    (LaneKey((1 << 63) | 5, "größe", -1, True), 0, 0),
)
TIMERS = Service((1 << 63) | 5, "t1", 0, 2)
OLD = Service((1 << 63) | 4, "t0", 0, 2)
JOINED = Service((1 << 63) | 6, "t2", 2, 3, key_shards=2)
TOPIC = Topic("orders", 3, 4, 1_000)
CONFIG = GroupConfig("billing", RetryPolicy(3, (), ExponentialDelays(1_000, 2.5, 60_000)))
TABLE = GroupConfig("billing", RetryPolicy(None, (0, 10_000)))
KEPT = (
    '{"generation": 435200031520, "strategy": "sticky", "members": {"m1": 10000, "m\\u00e9": 3000},'
    ' "incarnations": {"m1": 2}, "shares": {"m1": [["orders", "b1", 0]]}}'
)
CHANGES = [
    (GroupQueue("billing", "orders", 0), GroupOffset(41, 1_700_000_000_123)),
    (GroupQueue("billing", "orders", 1), GroupOffset(0, 5)),
]


def producers() -> Producers:
    made = Producers(idle_ms=1_000)
    for key, epoch, first in LANES:
        for number in range(3):
            stored = StoredPlace(96 * number, 10 * number, 1_700_000_000_123 + number, 2, 10)
            made.record(key, epoch, first + number, stored)
    return made


def owners() -> TimerOwners:
    made = TimerOwners()
    made.put(OLD, [0, 2], 1_700_000_000_000)
    made.release(OLD.id)
    made.put(TIMERS, [0, 2], 1_700_000_000_123)
    return made


def checkpoint() -> CheckpointState:
    return CheckpointState(
        position=16_777_312,
        verify_from=96,
        store_ms=1_700_000_000_125,
        topics={
            "next_id": 4,
            "topics": [{"name": "orders", "id": 3, "queues": 2, "message_bytes_max": 0}],
        },
        offsets=[["billing", "orders", 0, 41, 1_700_000_000_123]],
        queues={"orders": [30, 0]},
        lanes=producers().freeze()(),
        settled=[["billing", "orders", 0, [42, 45]]],
        groups=[group_configs.encode(CONFIG)],
        retries={"billing": 2},
        timer_owners=owners().encode(),
    )


def test_the_checkpoint_is_written_and_read_as_ever() -> None:
    golden = (V3 / "broker_checkpoint.bin").read_bytes()
    assert b"".join(checkpoint_state.encode(checkpoint())) == golden
    assert checkpoint_state.decode(golden) == checkpoint()
    again = TimerOwners()
    again.load(checkpoint_state.decode(golden).timer_owners)
    assert again.encode() == owners().encode()


def test_the_checkpoint_of_a_log_with_replicas_is_written_and_read_as_ever() -> None:
    golden = (V4 / "broker_checkpoint.bin").read_bytes()
    epochs = ((7, 0), (8, 16_777_216))
    state = checkpoint()._replace(epochs=epochs, memberships={"billing": KEPT})
    assert b"".join(checkpoint_state.encode(state)) == golden
    assert checkpoint_state.decode(golden) == state


def test_what_coordinators_keep_is_written_and_read_as_ever() -> None:
    kept, gone = (V4 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.membership("billing", KEPT) == kept
    assert journal.read_membership(memoryview(kept)) == ("billing", KEPT)
    assert journal.membership("billing", None) == gone
    assert journal.read_membership(memoryview(gone)) == ("billing", None)


def test_the_checkpoint_of_version_2_is_read() -> None:
    golden = (V2 / "broker_checkpoint.bin").read_bytes()
    assert checkpoint_state.decode(golden) == checkpoint()._replace(timer_owners={})


def test_claims_of_timer_queues_are_written_and_read_as_ever() -> None:
    claimed, released = (V3 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.timer_claimed(TIMERS, [0, 2], 1_700_000_000_123) == claimed
    read = (TIMERS, [0, 2], 1_700_000_000_123, [], None)
    assert journal.read_timer_claimed(memoryview(claimed)) == read
    assert journal.timer_released(TIMERS.id) == released
    assert journal.read_timer_released(memoryview(released)) == TIMERS.id


def moved_owners() -> TimerOwners:
    made = owners()
    made.hand_over(TIMERS.id, [(2, 41)])
    made.put(JOINED, [2], 1_700_000_000_456)
    made.begin([(1, 7)])
    return made


def test_queues_that_change_hands_are_written_and_read_as_ever() -> None:
    claimed, given_up, handed_over = (V5 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.timer_claimed(JOINED, [2], 1_700_000_000_456) == claimed
    read = (JOINED, [2], 1_700_000_000_456, [], None)
    assert journal.read_timer_claimed(memoryview(claimed)) == read
    begins = [(2, 41), (5, 0)]
    assert journal.timer_claimed(JOINED, [2, 5], 1_700_000_000_456, begins) == given_up
    read = (JOINED, [2, 5], 1_700_000_000_456, begins, None)
    assert journal.read_timer_claimed(memoryview(given_up)) == read
    led = given_up.removesuffix(b"]}") + b",[-2,3]]}"
    assert journal.timer_claimed(JOINED, [2, 5], 1_700_000_000_456, begins, epoch=3) == led
    assert journal.read_timer_claimed(memoryview(led)) == (*read[:-1], 3)
    assert journal.timer_handed_over(TIMERS.id, [(2, 41)]) == handed_over
    assert journal.read_timer_handed_over(memoryview(handed_over)) == (TIMERS.id, [(2, 41)])


def test_the_checkpoint_after_a_hand_over_is_written_and_read_as_ever() -> None:
    golden = (V5 / "broker_checkpoint.bin").read_bytes()
    state = checkpoint()._replace(timer_owners=moved_owners().encode())
    assert b"".join(checkpoint_state.encode(state)) == golden
    assert checkpoint_state.decode(golden) == state
    again = TimerOwners()
    again.load(checkpoint_state.decode(golden).timer_owners)
    assert again.encode() == moved_owners().encode()


def test_the_checkpoint_after_an_entry_was_set_aside_is_written_and_read_as_ever() -> None:
    golden = (V6 / "broker_checkpoint.bin").read_bytes()
    epochs = ((7, 0), (8, 16_777_216))
    state = checkpoint()._replace(
        epochs=epochs, memberships={"billing": KEPT}, set_aside=((16_777_000, 216),)
    )
    assert b"".join(checkpoint_state.encode(state)) == golden
    assert checkpoint_state.decode(golden) == state


def test_the_checkpoint_of_version_1_is_read() -> None:
    golden = (V1 / "broker_checkpoint.bin").read_bytes()
    assert checkpoint_state.decode(golden) == checkpoint()._replace(
        settled=[], groups=[], retries={}, timer_owners={}
    )


def test_lanes_are_read_as_ever() -> None:
    lanes = checkpoint_state.decode((V1 / "broker_checkpoint.bin").read_bytes()).lanes
    again = Producers(idle_ms=1_000)
    again.load(lanes)
    assert again.freeze()() == producers().freeze()()
    key, epoch, first = LANES[0]
    assert again.find(key, epoch, first + 1) == StoredPlace(96, 10, 1_700_000_000_124, 2, 10)


def test_journal_entries_are_written_and_read_as_ever() -> None:
    made, deleted, offsets = (V1 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.topic_created(TOPIC) == made
    assert journal.read_topic_created(memoryview(made)) == TOPIC
    assert journal.topic_deleted("orders") == deleted
    assert journal.read_topic_deleted(memoryview(deleted)) == "orders"
    assert journal.offsets("billing", CHANGES) == offsets
    assert journal.read_offsets(memoryview(offsets)) == CHANGES


def test_journal_entries_of_groups_are_written_and_read_as_ever() -> None:
    put, table, deleted = (V2 / "broker_journal.bin").read_bytes().split(b"\n")
    assert journal.group_put(CONFIG) == put
    assert journal.read_group_put(memoryview(put)) == CONFIG
    assert journal.group_put(TABLE) == table
    assert journal.read_group_put(memoryview(table)) == TABLE
    assert journal.group_deleted("billing") == deleted
    assert journal.read_group_deleted(memoryview(deleted)) == "billing"


def send_back_frame() -> bytes:
    """One record that came from a queue, and one that had failed before."""
    origin = MessagePlace("größe", "b1", 3, 41)
    first = Story("billing", origin, 1_700_000_000_000, 1_700_000_000_000, "boom ✗", origin)
    source = MessagePlace("%RETRY%billing", "b1", 0, 1 << 40)
    second = first._replace(last_failed_ms=1_700_000_010_000, source=source)
    entries = [
        retry_record.rewritten(b"\x0a\x04body\x12\x02id", attempt, story)
        for attempt, story in ((1, first), (2, second))
    ]
    return b"".join(
        frame.encode_parts(
            topic="%TIMER%",
            queue_id=1,
            base_offset=7,
            store_ms=1_700_000_010_000,
            sizes=struct.pack("<2I", *map(len, entries)),
            tag_hashes=struct.pack("<2I", 0x11111111, 0),
            key_hashes=struct.pack("<2I", 0, 0xBBBBBBBB),
            payload=b"".join(entries),
            target_topic="%RETRY%billing",
            target_queue_id=0,
            due_ms=struct.pack("<2q", 1_700_000_020_000, 1_700_000_040_000),
            send_back=True,
        )
    )


def test_a_send_back_frame_is_written_and_read_as_ever() -> None:
    golden = (V2 / "frame_send_back.bin").read_bytes()
    assert send_back_frame() == golden
    found = frame.decode(golden)
    assert (found.send_back, found.timed, found.target_topic) == (True, True, "%RETRY%billing")
    assert list(retry_record.sources(found.payload, found.sizes)) == [
        ("größe", 3, 41),
        ("%RETRY%billing", 0, 1 << 40),
    ]
