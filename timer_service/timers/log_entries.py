"""Entries of the timer log: what happened to timers, in order.  Little-endian.

The log is the truth; everything in memory follows from the last checkpoint and the entries after
it.  Framing and CRC are those of storage/record.py; the bodies are:

ADD (kind 16): frames fetched from a broker, as they lie in its log.
off  size  field       meaning
 0    8    store_id    the broker's store
 8    4    queue_id    of %TIMER%
12    4    name_length
16    8    frames      length of the frames
24    n    broker      UTF-8, zero-padded to a multiple of 8
 .    n    frames      log entries of kind 1 (storage/frame.py), whole

CANCEL (kind 17): any number of
 0    8    store_id
 8    4    queue_id
12    4    topic       CRC-32 of its name, for counts by topic; 0: not said, by an older release
16    8    offset
24    8    due_ms

DISPATCH (kind 18): a batch, written before it is sent for the first time.
 0    8    sequence    of the batch in its lane
 8    4    epoch       of the lane
12    4    queue_id    of the target
16    4    count       timers
20    4    sources     distinct (store, queue) pairs
24    2    broker_length
26    2    topic_length
28    4    reserved    zeros
32    n    broker, topic: UTF-8, together zero-padded to a multiple of 8
 .   16*s  sources: store_id u64, queue_id u32, zeros u32
 .    8*c  offsets i64, in the order of the batch
 .    2*c  index into sources u16, zero-padded to a multiple of 8

ACK (kind 19): log positions (u64) of DISPATCH entries that a broker answered as stored.

EPOCH (kind 20): a lane starts over, under a new epoch (the broker forgot its sequence).
 0    4    epoch
 4    4    queue_id
 8    2    broker_length
10    2    topic_length
12    4    reserved    zeros
16    n    broker, topic: as in DISPATCH.  Batches of the lane that are not answered
           keep their order and are renumbered from sequence 0.  Epoch 0: all is answered, its
           broker has deleted the topic, and it is forgotten; older releases begin it anew with 0.

SCHEDULE (kind 21): timers under keys of their owner; keyed_entry.py.

RECUR (kind 22): schedules, and their timers; schedule_entry.py.

BULK (kind 26): a job that cancels or shifts what is pending of a topic; its table:
timer_service/scheduling/bulk/entry.py.

HOLD (kind 28): timers that are kept back; hold_entry.py.

DROP (kind 29): as CANCEL; they count as dropped, for their hold was resumed without them.

LEFT (kind 33, which older releases pass over): u64, 1: this shard leaves, and does not learn any
more what the others hold; 0: it is back, and has learnt it.

A lane is (broker, topic, queue); its batches are one idempotent producer's at that broker.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORGOTTEN = 0  # of EPOCH
ADD, CANCEL, DISPATCH, ACK, EPOCH, SCHEDULE, RECUR = 16, 17, 18, 19, 20, 21, 22
BULK = 26  # 24 and 25 are a block's
HOLD, DROP = 28, 29
LEFT = 33

_ADD = struct.Struct("<QIIQ")
_CANCEL = struct.Struct("<QIIqq")
CANCELLED = np.dtype(
    [
        ("store_id", "<u8"),
        ("queue_id", "<u4"),
        ("topic", "<u4"),
        ("offset", "<i8"),
        ("due_ms", "<i8"),
    ]
)
CancelledTable = npt.NDArray[np.void]
assert CANCELLED.itemsize == _CANCEL.size
_DISPATCH = struct.Struct("<QIiIIHHI")
_SOURCE = struct.Struct("<QII")
_EPOCH = struct.Struct("<IiHHI")
assert (_ADD.size, _CANCEL.size, _DISPATCH.size, _SOURCE.size, _EPOCH.size) == (24, 32, 32, 16, 16)


class SourceId(NamedTuple):
    """A %TIMER% queue of a broker's store."""

    store_id: int
    queue_id: int


class TargetId(NamedTuple):
    """Where a timer's message goes: a queue of a topic (-1: any), and the broker it came from.

    The broker is empty where the message came from none, and any will do.
    """

    broker: str
    topic: str
    queue_id: int


class LaneId(NamedTuple):
    """A queue that fired messages go to; the unit of order and of sequence numbers."""

    broker: str
    topic: str
    queue_id: int


class Added(NamedTuple):
    """Frames fetched from a source."""

    source: SourceId
    broker: str
    frames: memoryview
    frames_at: int  # of the body


class Cancelled(NamedTuple):
    """A timer that will never fire."""

    source: SourceId
    offset: int
    due_ms: int


class Dispatched(NamedTuple):
    """A batch on its way: which timers, in which order, under which number."""

    lane: LaneId
    epoch: int
    sequence: int
    sources: list[SourceId]
    offsets: npt.NDArray[np.int64]
    source_index: npt.NDArray[np.uint16]


class Restarted(NamedTuple):
    """A lane's new epoch."""

    lane: LaneId
    epoch: int


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def encode_add(
    source: SourceId, broker: str, frames: bytes | memoryview
) -> list[bytes | memoryview]:
    """Parts of an ADD body; the frames are not copied."""
    name = broker.encode()
    header = _ADD.pack(source.store_id, source.queue_id, len(name), len(frames))
    return [header + _padded(name), frames]


def decode_add(body: memoryview) -> Added:
    """Reads an ADD body."""
    store_id, queue_id, name_length, frames_length = _ADD.unpack_from(body)
    name = bytes(body[_ADD.size : _ADD.size + name_length]).decode()
    start = _ADD.size + name_length + -name_length % 8
    frames = body[start : start + frames_length]
    return Added(SourceId(store_id, queue_id), name, frames, start)


def cancelled_table(
    sources: Sequence[SourceId],
    source: npt.NDArray[np.uint32],
    offset: npt.NDArray[np.int64],
    due_ms: npt.NDArray[np.int64],
    mark: int | npt.NDArray[np.uint32],
) -> CancelledTable:
    """What a CANCEL body is; `source` indexes `sources`; `mark`: of the topic of all, or each."""
    table = np.empty(len(offset), dtype=CANCELLED)
    table["store_id"] = np.array([each.store_id for each in sources], dtype=np.uint64)[source]
    table["queue_id"] = np.array([each.queue_id for each in sources], dtype=np.uint32)[source]
    table["topic"], table["offset"], table["due_ms"] = mark, offset, due_ms
    return table


def decode_cancelled(body: memoryview) -> CancelledTable:
    """A CANCEL body as a table of `CANCELLED`."""
    return np.frombuffer(body, dtype=CANCELLED)


def decode_cancel_topics(body: memoryview) -> list[int]:
    """The marks of the topics of a CANCEL body; 0: not said."""
    return [mark for _, _, mark, _, _ in _CANCEL.iter_unpack(body)]


def encode_dispatch(batch: Dispatched) -> bytes:
    """A DISPATCH body."""
    lane = batch.lane
    broker, topic = lane.broker.encode(), lane.topic.encode()
    header = _DISPATCH.pack(
        batch.sequence,
        batch.epoch,
        lane.queue_id,
        len(batch.offsets),
        len(batch.sources),
        len(broker),
        len(topic),
        0,
    )
    sources = b"".join(_SOURCE.pack(s.store_id, s.queue_id, 0) for s in batch.sources)
    index = _padded(batch.source_index.astype("<u2").tobytes())
    offsets = batch.offsets.astype("<i8").tobytes()
    return b"".join((header, _padded(broker + topic), sources, offsets, index))


def decode_dispatch(body: memoryview) -> Dispatched:
    """Reads a DISPATCH body."""
    fields = _DISPATCH.unpack_from(body)
    sequence, epoch, queue_id, count, sources, broker_length, topic_length, _ = fields
    at = _DISPATCH.size
    lane = _decode_lane(body, at, broker_length, topic_length, queue_id)
    at += (broker_length + topic_length + 7) & ~7
    pairs = _SOURCE.iter_unpack(body[at : at + _SOURCE.size * sources])
    names = [SourceId(store_id, queue) for store_id, queue, _ in pairs]
    at += _SOURCE.size * sources
    offsets = np.frombuffer(body, dtype="<i8", count=count, offset=at).astype(np.int64)
    index = np.frombuffer(body, dtype="<u2", count=count, offset=at + 8 * count).astype(np.uint16)
    return Dispatched(lane, epoch, sequence, names, offsets, index)


def encode_left(left: bool) -> bytes:
    """A LEFT body."""
    return struct.pack("<Q", left)


def decode_left(body: memoryview) -> bool:
    """Reads a LEFT body."""
    (left,) = struct.unpack_from("<Q", body)
    return bool(left)


def encode_ack(positions: Sequence[int]) -> bytes:
    """An ACK body."""
    return struct.pack(f"<{len(positions)}Q", *positions)


def decode_ack(body: memoryview) -> list[int]:
    """Reads an ACK body."""
    return [position for (position,) in struct.iter_unpack("<Q", body)]


def encode_epoch(restarted: Restarted) -> bytes:
    """An EPOCH body."""
    lane = restarted.lane
    broker, topic = lane.broker.encode(), lane.topic.encode()
    header = _EPOCH.pack(restarted.epoch, lane.queue_id, len(broker), len(topic), 0)
    return header + _padded(broker + topic)


def decode_epoch(body: memoryview) -> Restarted:
    """Reads an EPOCH body."""
    epoch, queue_id, broker_length, topic_length, _ = _EPOCH.unpack_from(body)
    lane = _decode_lane(body, _EPOCH.size, broker_length, topic_length, queue_id)
    return Restarted(lane, epoch)


def _decode_lane(body: memoryview, at: int, broker: int, topic: int, queue_id: int) -> LaneId:
    names = bytes(body[at : at + broker + topic])
    return LaneId(names[:broker].decode(), names[broker:].decode(), queue_id)
