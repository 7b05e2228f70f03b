"""Frames of the shard's own timers, as a broker would have made them: under keys, or brought anew.

Run by the thread that owns the scheduler.  Nothing here changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from duemq.protocol.names import TIMER_TOPIC
from duemq_server.storage import frame, record
from duemq_server.storage.disk import Buffer, nbytes
from duemq_server.timer_service.timers.rows import Index

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


class New(NamedTuple):
    """A timer that comes."""

    body: bytes | memoryview
    due_ms: int
    tag_hash: int
    key_hash: int
    timer_key: int


class NewColumns(NamedTuple):
    """Timers that come, with the same target; `bodies` one after the other."""

    size: Index
    tag_hash: Index
    key_hash: Index
    due_ms: Index
    bodies: bytes


def next_offset(scheduler: Scheduler) -> int:
    """Of the next timer of the shard's own."""
    source = scheduler.numbers.source(scheduler.keyed.source)
    return 0 if source is None else source.next_offset


def frames_of(scheduler: Scheduler, come: dict[int, list[New]], now_ms: int) -> bytes:
    """One a target, joined."""
    offset, frames = next_offset(scheduler), []
    for number, group in come.items():
        columns = NewColumns(
            np.array([len(each.body) for each in group]),
            np.array([each.tag_hash for each in group]),
            np.array([each.key_hash for each in group]),
            np.array([each.due_ms for each in group]),
            b"".join(each.body for each in group),
        )
        frames += frame_of(scheduler, number, columns, offset, now_ms)
        offset += len(group)
    return b"".join(frames)


def frame_of(
    scheduler: Scheduler, number: int, come: NewColumns, offset: int, now_ms: int
) -> list[Buffer]:
    """Buffers of one frame: timers of the target with this number, from `offset` on."""
    target = scheduler.numbers.targets[number]
    parts = frame.encode_parts(
        topic=TIMER_TOPIC,
        queue_id=scheduler.keyed.source.queue_id,
        base_offset=offset,
        store_ms=now_ms,
        sizes=come.size.astype("<u4").tobytes(),
        tag_hashes=come.tag_hash.astype("<u4").tobytes(),
        key_hashes=come.key_hash.astype("<u4").tobytes(),
        payload=come.bodies,
        target_topic=target.topic,
        target_queue_id=target.queue_id,
        due_ms=come.due_ms.astype("<i8").tobytes(),
    )
    return record.encode(frame.KIND, parts, sum(map(nbytes, parts)), 0, 0)
