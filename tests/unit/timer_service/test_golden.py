"""Bytes on disk stay what they were: tests/golden/v1/README.md."""

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest

from duemq_recurring.occurrences import CatchUp, Recurrence
from duemq_recurring.schedule import (
    DELETED,
    MADE,
    MOVED,
    PendingMessage,
    Plan,
    ScheduleChange,
    ScheduleState,
)
from duemq_recurring.schedules import Schedules
from duemq_recurring.wall_clock import Dst
from duemq_server.storage import record
from duemq_server.timer_service.disk import checkpoint_state as state
from duemq_server.timer_service.far import far_block
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.far.tombstones import UNMET_REPLACED
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireLane
from duemq_server.timer_service.scheduling.keyed.ended_keys import SavedKey
from duemq_server.timer_service.scheduling.keyed.request_memory import SavedRequests
from duemq_server.timer_service.scheduling.ledger import Ledger
from duemq_server.timer_service.timers import keyed, keyed_entry
from duemq_server.timer_service.timers import log_entries as entries
from duemq_server.timer_service.timers import schedule_entry as recur
from duemq_server.timer_service.timers.log_entries import (
    Cancelled,
    Dispatched,
    LaneId,
    Restarted,
    SourceId,
    TargetId,
)
from duemq_server.timer_service.timers.offset_pages import SavedPage
from duemq_server.timer_service.timers.rows import Home, Rows, new_rows

GOLDEN = Path(__file__).parents[2] / "golden" / "v1"
V5 = GOLDEN.parent / "v5"
SOURCES = [SourceId(0x0123456789ABCDEF, 0), SourceId(0xFEDCBA9876543210, 3)]
TARGETS = [TargetId("broker-0", "orders", -1), TargetId("broker-1", "gates-ä", 2)]
LANE = LaneId("broker-1", "gates-ä", 2)
BODIES = [b"\x0a\x04\x12\x02m0", b"\x0a\x05\x12\x03m10", b"\x0a\x04\x12\x02m2"]
DUE_MS = [1_373_414_400_000, 1_373_414_400_001, 1_373_500_000_000]


def rows() -> Rows:
    made = new_rows(3)
    made.wide[0], made.wide[1] = DUE_MS, [7, 8, 1 << 40]
    made.narrow[0], made.narrow[1] = [0, 0, 1], [1, 0, 1]
    made.narrow[2] = [0, 6, 13]
    made.narrow[3] = [len(body) for body in BODIES]
    made.narrow[4], made.narrow[5] = [0, 0xAABBCCDD, 1], [1, 2, 0xFFFFFFFF]
    return made


def log_entries() -> bytes:
    dispatched = Dispatched(
        LANE,
        1,
        42,
        SOURCES,
        np.array([7, 1 << 40], dtype=np.int64),
        np.array([0, 1], dtype=np.uint16),
    )
    one, offset, due_ms = np.zeros(1, dtype=np.uint32), np.array([8]), np.array([DUE_MS[1]])
    cancelled = entries.cancelled_table(SOURCES, one, offset, due_ms, 0)
    bodies = [
        (entries.ADD, entries.encode_add(SOURCES[1], "broker-1", b"frames!!")),
        (entries.CANCEL, [cancelled.tobytes()]),
        (entries.DISPATCH, [entries.encode_dispatch(dispatched)]),
        (entries.ACK, [entries.encode_ack([144, 1 << 50])]),
        (entries.EPOCH, [entries.encode_epoch(Restarted(LANE, 2))]),
    ]
    return _entries(bodies)


def block_entries() -> bytes:
    index = far_block.encode_index(rows(), far_block.crcs(list(BODIES)), SOURCES, TARGETS)
    return _entries([(far_block.INDEX, [index]), (far_block.BODIES, [b"".join(BODIES)])])


def _entries(bodies: list[tuple[int, list[bytes | memoryview]]]) -> bytes:
    out = b""
    for kind, parts in bodies:
        length = sum(map(len, parts))
        out += b"".join(bytes(part) for part in record.encode(kind, parts, length, len(out), 0))
    return out


def checkpoint_state() -> state.CheckpointState:
    lane = FireLane(LANE, epoch=1)
    hashes = np.array([1, 2], dtype="<u4").tobytes()
    due_ms = np.array(DUE_MS[:2], dtype=np.int64)
    records = BODIES[0] + BODIES[1]
    sizes = np.array([6, 7], dtype="<u4").tobytes()
    batch = FireBatch(lane, 41, 144, 280, records, sizes, hashes, hashes, due_ms, True)
    body = b"".join(BODIES)
    return state.CheckpointState(
        position=4_096,
        recovery_start=0,
        producer_id=(1 << 63) | 5,
        ledger=Ledger(accepted=10, fired=3, cancelled=2, in_flight=2),
        sources=[Source(SOURCES[0], "broker-0", 9, 7, 9), Source(SOURCES[1], "broker-1", 4, 0, 4)],
        targets=TARGETS,
        lanes=[state.SavedLane(LANE, 1, 42, [batch])],
        tombstones=[(0, 8, DUE_MS[1], True), (1, 2, DUE_MS[0], False)],
        lengths={"0000381504-00001.due": 512},
        blocks=[
            Block("0000381504-00001.due", 0, 200, 3, 1, DUE_MS[1], DUE_MS[2]),
            Block("0000381504-00001.due", 256, 200, 2, 0, DUE_MS[0], DUE_MS[0], TARGETS[0]),
        ],
        held=[
            state.Held(
                Home("", 1_024), 0, len(body), rows(), record.crc32c(0, body), memoryview(body)
            )
        ],
        log_needed_from=1_024,
    )


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("timer_log.bin", log_entries()),
        ("timer_block.bin", block_entries()),
        ("timer_checkpoint.bin", state.encode(checkpoint_state())),
    ],
)
def test_the_bytes_are_those_of_the_first_release(name: str, made: bytes) -> None:
    assert made == (GOLDEN / name).read_bytes()


def test_the_first_release_s_block_is_read() -> None:
    index, bodies = record.split((GOLDEN / "timer_block.bin").read_bytes())
    found = far_block.decode_index(index.body)

    assert (found.sources, found.targets) == (SOURCES, TARGETS)
    assert found.rows["due_ms"].tolist() == DUE_MS
    assert found.starts().tolist() == [0, 6, 13, 19]
    assert bytes(bodies.body) == b"".join(BODIES)


def test_the_first_release_s_checkpoint_is_read() -> None:
    expected = checkpoint_state()
    found = state.decode((GOLDEN / "timer_checkpoint.bin").read_bytes())

    for name in (
        "position",
        "recovery_start",
        "producer_id",
        "ledger",
        "targets",
        "tombstones",
        "lengths",
        "blocks",
        "log_needed_from",
    ):
        assert getattr(found, name) == getattr(expected, name), name
    assert [source.id for source in found.sources] == SOURCES
    [lane], [saved] = found.lanes, expected.lanes
    assert (lane.id, lane.epoch, lane.next_sequence) == (LANE, 1, 42)
    [batch], [sent] = lane.unacked, saved.unacked
    assert (batch.sequence, batch.records, batch.sizes) == (41, sent.records, sent.sizes)
    assert batch.key_hashes == sent.key_hashes
    assert batch.due_ms.tolist() == sent.due_ms.tolist()
    [held] = found.held
    assert held.rows.wide.tolist() == rows().wide.tolist()
    assert held.rows.narrow.tolist() == rows().narrow.tolist()
    assert held.crc32c == expected.held[0].crc32c


# -- timers under keys, added later ----------------------------------------

OWN = SourceId((1 << 63) | 5, 0)
HASHES = np.array([0, 0x0123456789ABCDEF, 1], dtype=np.uint64)


def keyed_rows() -> Rows:
    return dataclasses.replace(rows(), timer_key=HASHES)


def schedule_entry() -> bytes:
    handles = [Cancelled(SOURCES[0], 7, DUE_MS[0]), Cancelled(OWN, 3, DUE_MS[1])]
    changed = keyed_entry.Changed(
        keyed_entry.RequestKey(bytes(range(16)), 1),
        DUE_MS[0],
        handles[:1],
        HASHES[1:2],
        handles[1:],
        OWN,
        ["", "broker-1"],
        HASHES[1:],
        b"frames!!",
        keyed_entry.encode_answer(
            [
                keyed_entry.Result(keyed.REPLACED, (Cancelled(OWN, 4, DUE_MS[2]), handles[1])),
                keyed_entry.Result(keyed_entry.CANCELLED),
            ]
        ),
    )
    return _entries([(entries.SCHEDULE, keyed_entry.encode(changed))])


def keyed_block() -> bytes:
    index = far_block.encode_index(keyed_rows(), far_block.crcs(list(BODIES)), SOURCES, TARGETS)
    return _entries([(far_block.INDEX, [index]), (far_block.BODIES, [b"".join(BODIES)])])


def keyed_checkpoint() -> state.CheckpointState:
    saved = checkpoint_state()
    saved.ledger.replaced = 3
    saved.blocks[0].keyed = 2
    saved.held[0] = dataclasses.replace(saved.held[0], rows=keyed_rows())
    saved.tombstones.append((1, 5, DUE_MS[2], UNMET_REPLACED))
    saved.replaced = [SavedPage(1 << 32, DUE_MS[0], bytes(range(256)) * 32)]
    saved.requests = [
        SavedRequests(137_341_440, {bytes(range(16)): b"\0\1", bytes(range(20)): b"\0"}),
        SavedRequests(137_341_441, {bytes(16): b"\0\2\3"}),
    ]
    saved.ended_keys = [SavedKey(int(HASHES[1]), DUE_MS[0], True), SavedKey(1, DUE_MS[1], False)]
    return saved


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("timer_schedule.bin", schedule_entry()),
        ("timer_block_keys.bin", keyed_block()),
        ("timer_checkpoint_keys.bin", state.encode(keyed_checkpoint())),
    ],
)
def test_the_bytes_of_timers_under_keys_stay_what_they_are(name: str, made: bytes) -> None:
    assert made == (GOLDEN / name).read_bytes()


def test_a_block_with_keys_is_read() -> None:
    index, _ = record.split((GOLDEN / "timer_block_keys.bin").read_bytes())
    found = far_block.decode_index(index.body)

    assert found.timer_key is not None
    assert found.timer_key.tolist() == HASHES.tolist()
    assert found.rows["due_ms"].tolist() == DUE_MS


def test_a_block_with_columns_of_a_later_release_is_refused() -> None:
    [index, _] = record.split((GOLDEN / "timer_block_keys.bin").read_bytes())
    body = bytearray(index.body)
    body[24] = 3

    with pytest.raises(ValueError, match="columns 0x3"):
        far_block.decode_index(memoryview(body))


def test_a_checkpoint_with_keys_is_read() -> None:
    expected = keyed_checkpoint()
    found = state.decode((GOLDEN / "timer_checkpoint_keys.bin").read_bytes())

    for name in ("ledger", "tombstones", "blocks", "replaced", "requests", "ended_keys"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.held[0].rows.timer_keys().tolist() == HASHES.tolist()


# -- schedules, added later ------------------------------------------------

CRON = Recurrence(cron="0 9 * * MON-FRI", zone="Europe/Berlin", dst=Dst.SHIFT, count=3)
EVERY = Recurrence(every_ms=1_500, catch_up=CatchUp.ALL, from_ms=DUE_MS[0], jitter_ms=20)
PLANS = [
    Plan("orders", CRON, b"\x0a\x01a", 1, 2),
    Plan("gates-ä", EVERY, b"\x0a\x02bb", from_given=False),
]


def schedules() -> list[ScheduleChange]:
    pending = (
        PendingMessage(OWN, 4, DUE_MS[0], DUE_MS[1]),
        PendingMessage(OWN, 5, DUE_MS[1], DUE_MS[1]),
    )
    return [
        ScheduleChange(
            "report", MADE, ScheduleState(False, DUE_MS[0], 2, DUE_MS[0] - 7), pending, PLANS[0]
        ),
        ScheduleChange("beat", MADE, ScheduleState(True, DUE_MS[0], 0), (), PLANS[1]),
    ]


def recur_entry() -> bytes:
    changed = keyed_entry.Changed(
        keyed_entry.RequestKey(keyed_entry.NO_REQUEST),
        DUE_MS[0],
        [Cancelled(OWN, 3, DUE_MS[1])],
        HASHES[:1],
        [],
        OWN,
        [""],
        HASHES[:1],
        b"frames!!",
        b"",
    )
    moved = ScheduleChange(
        "moved", MOVED, ScheduleState(False, DUE_MS[2], 9, 8), schedules()[0].came
    )
    changes = [*schedules(), moved, ScheduleChange("gone", DELETED)]
    return _entries([(entries.RECUR, recur.encode(changes, keyed_entry.encode(changed)))])


def schedules_checkpoint() -> state.CheckpointState:
    saved = checkpoint_state()
    saved.schedules = schedules()
    return saved


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("timer_recur.bin", recur_entry()),
        ("timer_checkpoint_schedules.bin", state.encode(schedules_checkpoint())),
    ],
)
def test_the_bytes_of_schedules_stay_what_they_are(name: str, made: bytes) -> None:
    assert made == (GOLDEN / name).read_bytes()


def test_an_entry_of_schedules_is_read() -> None:
    [entry] = record.split((GOLDEN / "timer_recur.bin").read_bytes())
    changes, timers_at = recur.decode(entry.body)
    changed = keyed_entry.decode(entry.body[timers_at:])

    assert changes[:2] == schedules()
    assert [(each.name, each.what) for each in changes[2:]] == [("moved", MOVED), ("gone", DELETED)]
    assert changes[2].came == schedules()[0].came
    assert changed.cancelled == [Cancelled(OWN, 3, DUE_MS[1])]
    assert bytes(changed.frames) == b"frames!!"


def test_a_checkpoint_with_schedules_is_read() -> None:
    found = state.decode((GOLDEN / "timer_checkpoint_schedules.bin").read_bytes())
    assert found.schedules == schedules()


def as_read_before(data: bytes) -> list[tuple[str, int, int]]:
    """Names, what, paused: as releases do that know of nothing left out."""
    at, found = 0, []
    while at < len(data):
        fields = struct.unpack_from("<BBHIIIqqq", data, at)
        what, paused, name, plan, body, came = fields[:6]
        name_at = at + 40 + 40 * came
        found.append((data[name_at : name_at + name].decode(), what, paused))
        at = name_at + name + plan + body
        at += -at % 8
    return found


def test_occurrences_that_are_left_out_are_read_again_and_no_matter_to_older_releases() -> None:
    left_out = ScheduleState(False, DUE_MS[0], 2, DUE_MS[2], (DUE_MS[1], DUE_MS[2]))
    made = Schedules()
    made.apply([*schedules(), ScheduleChange("report", MOVED, left_out)])

    data = recur.encode_changes(made.saved())
    again = Schedules()
    again.apply(recur.decode_changes(data))

    assert list(again) == list(made)
    assert again.known("report").state == left_out
    assert as_read_before(data) == [("report", MADE, 0), ("report", MOVED, 0), ("beat", MADE, 1)]


# -- queues that change hands, added later ---------------------------------


def skipped_checkpoint() -> state.CheckpointState:
    saved = checkpoint_state()
    saved.sources[0].skipped = ((2, 4), (5, 6))
    return saved


def test_the_bytes_of_what_another_shard_took_over_stay_what_they_are() -> None:
    golden = (V5 / "timer_checkpoint.bin").read_bytes()
    assert state.encode(skipped_checkpoint()) == golden
    assert [source.skipped for source in state.decode(golden).sources] == [((2, 4), (5, 6)), ()]
