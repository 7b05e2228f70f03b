"""Checkpoint of a shard: everything in memory, small.  Little-endian.

The payload of a storage/checkpoint.py file:

off  size  field        meaning
 0    4    magic        "DMQT"
 4    2    version      1
 6    2    reserved     zeros
 8    8    json_length
16    n    json         UTF-8; zero-padded to a multiple of 8
 .    .    arrays       one after the other, each zero-padded to a multiple of 8

The JSON object has the scalars, the name tables, and in `arrays` the (name, dtype, count) of each
array in order.  Timers in memory are noted with the place on disk where their bodies lie (in the
timer log or a period file), so that a checkpoint costs 50 bytes a near timer whatever the bodies'
size; only batches on their way to a broker are written whole.

What later releases added is left out while it is empty, and need not be there: `forgotten_ms` and
`fired_until_ms` of the object, `dropped`, of which sources pages of `replaced_pages` gave way to
others, with `expired_ms`, which is `forgotten_ms` without them; the arrays `late_pages` and
`late_bits` (fire_memory.py); of timers under keys `rows_timer_key`, `blocks_keyed` and those of
keyed_arrays.py; `replaced_pages` and `replaced_bits`, of timers that are gone (tombstones.py), and
of those that still lie on disk `unmet_pages`, u64, and `unmet_bits`, 128 bytes a page
(offset_bits.py); `schedules`, u8 (schedule_entry.py); and where there are replicas `epochs`,
(epoch, start) of each leader whose entries the log still has, `store_id` where it is not the
producer id, and `installed`; `topics`, the ledger by topic, and `topics_forgotten`; `bulk`, jobs on
what is pending (timer_service/scheduling/bulk/jobs.py); `holds`, those in force
(hold_entry.Hold), and `next_hold`, if there ever was one; `left`, once a LEFT entry said it;
`epoch_forgotten`, once a lane was.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq_recurring.schedule import ScheduleChange
from duemq_server.storage import record
from duemq_server.storage.errors import UnknownVersion
from duemq_server.timer_service.disk import keyed_arrays
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.far.offset_bits import PAGE_BYTES as UNMET_PAGE_BYTES
from duemq_server.timer_service.far.offset_bits import Bits, Keys
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireLane
from duemq_server.timer_service.scheduling.keyed.ended_keys import SavedKey
from duemq_server.timer_service.scheduling.keyed.request_memory import SavedRequests
from duemq_server.timer_service.scheduling.ledger import Ledger
from duemq_server.timer_service.timers.hold_entry import Hold
from duemq_server.timer_service.timers.log_entries import LaneId, SourceId, TargetId
from duemq_server.timer_service.timers.offset_pages import PAGE_BYTES, SavedPage
from duemq_server.timer_service.timers.rows import NARROW, WIDE, Home, Rows, concatenate
from duemq_server.timer_service.timers.schedule_entry import decode_changes, encode_changes

MAGIC = b"DMQT"
VERSION = 1
_HEADER = struct.Struct("<4sHHQ")
_NONE = np.empty(0, dtype=np.int64)
Arrays = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Held:
    """Timers in memory whose bodies lie at `home`, from `start` for `length` bytes."""

    home: Home
    start: int
    length: int
    rows: Rows
    crc32c: int = 0  # of the bytes, once decoded
    data: memoryview = dataclasses.field(default=memoryview(b""), repr=False, compare=False)


class SavedLane(NamedTuple):
    """A lane: there may be some hundred thousand, most of them idle."""

    id: LaneId
    epoch: int
    next_sequence: int
    unacked: Sequence[FireBatch] = ()


@dataclasses.dataclass
class CheckpointState:
    """What a checkpoint says."""

    position: int  # of the timer log; entries before it are contained
    recovery_start: int  # for SegmentedLog.open(start_at=…)
    producer_id: int
    ledger: Ledger
    sources: list[Source]
    targets: list[TargetId]
    lanes: Sequence[SavedLane]
    tombstones: list[tuple[int, int, int, int]]
    lengths: dict[str, int]
    blocks: list[Block]
    held: list[Held]
    log_needed_from: int  # the log before it is not needed any more
    # What a cancel must know of timers that are gone; older checkpoints have none of it.
    forgotten_ms: int = 0
    expired_ms: int = 0
    dropped: Sequence[tuple[int, int, int]] = ()
    """Of the sources of these numbers, as offset_pages.Dropped."""
    fired_until_ms: int = 0
    fired_late: list[SavedPage] = dataclasses.field(default_factory=list)
    replaced: list[SavedPage] = dataclasses.field(default_factory=list)
    """Timers that are gone, cancelled ones too."""
    unmet: tuple[Keys, Bits] | None = None
    """Those of them that still lie on disk."""
    # Of timers under keys; none where there never were any.
    requests: list[SavedRequests] = dataclasses.field(default_factory=list)
    ended_keys: list[SavedKey] = dataclasses.field(default_factory=list)
    schedules: list[ScheduleChange] = dataclasses.field(default_factory=list)
    bulk: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Jobs, as the timer shard writes them."""
    epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, start) of EPOCH entries before `position`; none without replicas."""
    installed: bool = False
    """Another replica's, whose log this one does not have up to `position` yet."""
    store_id: int = 0
    """The group's; 0: the producer id."""
    topics: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Columns of scheduling/topic_counts.TopicLedger, by topic; older checkpoints have none."""
    topics_forgotten: Sequence[int] = ()
    """The same columns, of topics that were forgotten."""
    holds: list[Hold] = dataclasses.field(default_factory=list)
    next_hold: int = 1
    left: bool | None = None
    epoch_forgotten: int = 0
    """As of the dispatcher."""

    def files(self) -> set[str]:
        """Period files that must stay."""
        return set(self.lengths)


def empty(producer_id: int) -> CheckpointState:
    """Of a shard that never had a timer."""
    return CheckpointState(0, 0, producer_id, Ledger(), [], [], [], [], {}, [], [], 0)


def encode(state: CheckpointState) -> bytes:
    """The payload."""
    batches = [batch for lane in state.lanes for batch in lane.unacked]
    files = sorted(state.lengths)
    targets = {target: n for n, target in enumerate(state.targets)}
    number = {name: n for n, name in enumerate(files)}
    number[""] = -1
    arrays = {
        "blocks": _table(
            (
                number[b.file],
                b.position,
                b.index_length,
                b.count,
                b.cursor,
                b.next_due_ms,
                b.last_due_ms,
                -1 if b.parked is None else targets[b.parked],
            )
            for b in state.blocks
        ),
        "tombstones": _table(state.tombstones),
        "held": _table(
            (
                number[h.home.file],
                h.home.position,
                h.start,
                h.length,
                len(h.rows),
                record.crc32c(0, h.data) if len(h.data) else h.crc32c,
            )
            for h in state.held
        ),
        "batches": _table(
            (b.sequence, b.position, b.end, b.count, len(b.records)) for b in batches
        ),
        "batch_due_ms": _joined([b.due_ms for b in batches], np.int64),
        "batch_columns": _bytes([b.sizes + b.tag_hashes + b.key_hashes for b in batches]),
        "batch_records": _bytes([b.records for b in batches]),
    }
    rows = concatenate([h.rows for h in state.held])
    arrays |= {"rows_wide": rows.wide, "rows_narrow": rows.narrow}
    added: dict[str, Any] = {}
    if state.forgotten_ms or state.fired_until_ms:
        added = {"forgotten_ms": state.forgotten_ms, "fired_until_ms": state.fired_until_ms}
    if state.dropped:
        added |= {"expired_ms": state.expired_ms, "dropped": state.dropped}
    if state.epochs:
        added["epochs"] = state.epochs
    if state.installed:
        added["installed"] = True
    if state.store_id:
        added["store_id"] = state.store_id
    if state.bulk:
        added["bulk"] = state.bulk
    if state.topics:
        added["topics"] = state.topics
    if any(state.topics_forgotten):
        added["topics_forgotten"] = state.topics_forgotten
    if state.next_hold > 1:
        added |= {"holds": state.holds, "next_hold": state.next_hold}
    if state.left is not None:
        added["left"] = state.left
    if state.epoch_forgotten:
        added["epoch_forgotten"] = state.epoch_forgotten
    arrays |= _pages("late", state.fired_late) | _pages("replaced", state.replaced)
    if state.unmet is not None:
        pages, bits = state.unmet
        arrays |= {"unmet_pages": pages, "unmet_bits": bits.reshape(-1)}
    if any(each.keyed for each in state.blocks):
        arrays["blocks_keyed"] = np.array([each.keyed for each in state.blocks], dtype=np.int64)
    if rows.timer_key is not None and rows.timer_key.any():
        arrays["rows_timer_key"] = rows.timer_key
    arrays |= keyed_arrays.encode(state.requests, state.ended_keys)
    if state.schedules:
        arrays["schedules"] = _bytes([encode_changes(state.schedules)])
    header = {
        "position": state.position,
        "recovery_start": state.recovery_start,
        "log_needed_from": state.log_needed_from,
        "producer_id": state.producer_id,
        "ledger": _without_zeros(dataclasses.astuple(state.ledger), 4),
        "sources": [
            (s.id.store_id, s.id.queue_id, s.broker, s.next_offset, s.first_offset)
            + ((s.skipped,) if s.skipped else ())
            for s in state.sources
        ],
        "targets": state.targets,
        "lanes": [(*x.id, x.epoch, x.next_sequence, len(x.unacked)) for x in state.lanes],
        "files": [(name, state.lengths[name]) for name in files],
        "arrays": [(name, array.dtype.str, array.size) for name, array in arrays.items()],
        **added,
    }
    text = json.dumps(header).encode()
    parts = [_HEADER.pack(MAGIC, VERSION, 0, len(text)), text, bytes(-len(text) % 8)]
    for array in arrays.values():
        parts += (array.tobytes(), bytes(-array.nbytes % 8))
    return b"".join(parts)


def decode(payload: bytes, path: str = "checkpoint") -> CheckpointState:
    """Reads a payload.  Raises Corrupt if it is none of ours, UnknownVersion; both name `path`."""
    magic, version, _, length = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise Corrupt(f"{path} has magic {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise UnknownVersion(f"{path} has version {version}, this release reads {VERSION}")
    header = json.loads(payload[_HEADER.size : _HEADER.size + length])
    arrays = _read_arrays(payload, _HEADER.size + length + -length % 8, header["arrays"])
    files = [name for name, _ in header["files"]]
    targets = [TargetId(*target) for target in header["targets"]]
    return CheckpointState(
        position=header["position"],
        recovery_start=header["recovery_start"],
        producer_id=header["producer_id"],
        ledger=Ledger(*header["ledger"]),
        sources=[
            Source(SourceId(store, queue), broker, offset, first, offset, _skipped(skipped))
            for store, queue, broker, offset, first, *skipped in header["sources"]
        ],
        targets=targets,
        lanes=_decode_lanes(header["lanes"], arrays),
        tombstones=[
            (source, offset, due_ms, state)
            for source, offset, due_ms, state in arrays["tombstones"].reshape(-1, 4).tolist()
        ],
        lengths=dict(header["files"]),
        blocks=_decode_blocks(arrays, files, targets),
        held=_decode_held(files, arrays),
        log_needed_from=header["log_needed_from"],
        forgotten_ms=header.get("forgotten_ms", 0),
        expired_ms=header.get("expired_ms", header.get("forgotten_ms", 0)),
        dropped=[(number, end, at_ms) for number, end, at_ms in header.get("dropped", ())],
        fired_until_ms=header.get("fired_until_ms", 0),
        fired_late=_decode_pages("late", arrays),
        replaced=_decode_pages("replaced", arrays),
        unmet=_decode_unmet(arrays),
        requests=keyed_arrays.decode_requests(arrays),
        ended_keys=keyed_arrays.decode_ended(arrays),
        schedules=decode_changes(arrays["schedules"].tobytes()) if "schedules" in arrays else [],
        epochs=tuple((epoch, start) for epoch, start in header.get("epochs", ())),
        installed=header.get("installed", False),
        store_id=header.get("store_id", 0),
        bulk=header.get("bulk", []),
        topics=header.get("topics", {}),
        topics_forgotten=header.get("topics_forgotten", ()),
        holds=[Hold(*each) for each in header.get("holds", ())],
        next_hold=header.get("next_hold", 1),
        left=header.get("left"),
        epoch_forgotten=header.get("epoch_forgotten", 0),
    )


def _read_arrays(payload: bytes, at: int, names: list[tuple[str, str, int]]) -> Arrays:
    arrays: Arrays = {}
    for name, kind, size in names:
        arrays[name] = np.frombuffer(payload, dtype=kind, count=size, offset=at)
        at += (arrays[name].nbytes + 7) & ~7
    return arrays


def _decode_blocks(arrays: Arrays, files: list[str], targets: list[TargetId]) -> list[Block]:
    blocks = []
    for row in arrays["blocks"].reshape(-1, 8).tolist():
        file, position, length, count, cursor, first, last, parked = row
        target = None if parked < 0 else targets[parked]
        blocks.append(Block(files[file], position, length, count, cursor, first, last, target))
    for each, keyed in zip(blocks, arrays.get("blocks_keyed", _NONE).tolist(), strict=False):
        each.keyed = keyed
    return blocks


def _skipped(saved: list[list[list[int]]]) -> tuple[tuple[int, int], ...]:
    """Of a source; not there of one that skipped nothing."""
    return tuple((start, end) for each in saved for start, end in each)


def _decode_lanes(table: list[list[Any]], arrays: Arrays) -> list[SavedLane]:
    batches = iter(arrays["batches"].reshape(-1, 5).tolist())
    due_ms, columns = arrays["batch_due_ms"], arrays["batch_columns"].tobytes()
    records = arrays["batch_records"].tobytes()
    rows = at = 0
    lanes = []
    for broker, topic, queue_id, epoch, next_sequence, unacked in table:
        lane = FireLane(LaneId(broker, topic, queue_id), epoch)
        batches_of: list[FireBatch] = []
        for _ in range(unacked):
            sequence, position, end, count, length = next(batches)
            sizes, tags, keys = (
                columns[12 * rows + 4 * count * n :][: 4 * count] for n in range(3)
            )
            dues = due_ms[rows : rows + count]
            body = records[at : at + length]
            batches_of.append(
                FireBatch(lane, sequence, position, end, body, sizes, tags, keys, dues, True)
            )
            rows += count
            at += length
        lanes.append(SavedLane(lane.id, epoch, next_sequence, batches_of))
    return lanes


def _pages(name: str, pages: list[SavedPage]) -> Arrays:
    if not pages:
        return {}
    return {
        f"{name}_pages": _table((page.key, page.marked_ms) for page in pages),
        f"{name}_bits": _bytes([page.bits for page in pages]),
    }


def _decode_pages(name: str, arrays: Arrays) -> list[SavedPage]:
    if f"{name}_pages" not in arrays:
        return []
    bits = arrays[f"{name}_bits"].reshape(-1, PAGE_BYTES)
    table = arrays[f"{name}_pages"].reshape(-1, 2).tolist()
    return [
        SavedPage(key, marked_ms, each.tobytes())
        for (key, marked_ms), each in zip(table, bits, strict=True)
    ]


def _decode_unmet(arrays: Arrays) -> tuple[Keys, Bits] | None:
    if "unmet_pages" not in arrays:
        return None
    return arrays["unmet_pages"], arrays["unmet_bits"].reshape(-1, UNMET_PAGE_BYTES)


def _decode_held(files: list[str], arrays: Arrays) -> list[Held]:
    wide, narrow = arrays["rows_wide"], arrays["rows_narrow"]
    hashes = arrays.get("rows_timer_key")
    rows = Rows(wide.reshape(WIDE, -1), narrow.reshape(NARROW, -1), hashes)
    held, at = [], 0
    for file, position, start, length, count, crc in arrays["held"].reshape(-1, 6).tolist():
        home = Home(files[file] if file >= 0 else "", position)
        held.append(Held(home, start, length, rows.slice(at, at + count), crc))
        at += count
    return held


def _without_zeros(values: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """Without those at the end, from `kept` on: releases before wrote fewer."""
    while len(values) > kept and not values[-1]:
        values = values[:-1]
    return values


def _table(rows: Any) -> npt.NDArray[np.int64]:
    return np.array(list(rows), dtype=np.int64).reshape(-1)


def _joined(arrays: list[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=kind)


def _bytes(parts: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8)
