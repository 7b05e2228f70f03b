"""A slice of a job: timers that go, or that go and come, in one entry of the log.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from duemq.protocol.due import DUE_MS_MAX
from duemq_server.storage import record
from duemq_server.timer_service.far.bodies import Joined
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.scheduling.bulk import entry
from duemq_server.timer_service.scheduling.bulk.jobs import Job
from duemq_server.timer_service.scheduling.keyed import keyed_state
from duemq_server.timer_service.scheduling.keyed.own_frames import NewColumns, frame_of, next_offset
from duemq_server.timer_service.scheduling.topic_counts import mark_of
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, Changed, RequestKey
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import CancelledTable, SourceId, TargetId
from duemq_server.timer_service.timers.rows import Rows, Wide, keys_of, runs
from duemq_server.timer_service.timers.wheel import Ids

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


class Slice(NamedTuple):
    """Pending timers, where they lie at this moment."""

    rows: Rows  # in the shard's numbers
    near: Ids  # of the near table, NOWHERE for those that lie far
    bodies: Joined | None  # where they are needed
    block: Block | None = None  # that all of them lie in


def cancel(scheduler: Scheduler, job: Job, found: Slice, now_ms: int) -> int:
    """They are cancelled; where the entry ends.  Raises LogFull, DiskFull: nothing was done."""
    rows = found.rows
    head = entry.slice_of(job, entry.CANCELLED, len(rows), now_ms)
    body = _table(scheduler, job, rows).tobytes()
    _, end = scheduler.log.append(log_entries.BULK, [head, body])
    _uncount(scheduler, found)
    near = found.near != NOWHERE
    scheduler.near.drop(found.near[near])
    keys = keys_of(rows.source, rows.offset)
    scheduler.tombstones.add_keys(keys[near], np.maximum(rows.due_ms[near], now_ms))
    scheduler.tombstones.left.add(keys[~near])
    for unmet in (True, False):
        scheduler.topics.cancelled(rows.target[near != unmet], unmet=unmet)
    if scheduler.schedules:
        for number in np.unique(rows.source).tolist():
            offsets = rows.offset[rows.source == number].tolist()
            scheduler.schedules.left(scheduler.numbers.sources[number].id, offsets)
    scheduler.ledger.cancelled += len(rows)
    job.count += len(rows)
    return end


def bring_anew(
    scheduler: Scheduler, job: Job, found: Slice, now_ms: int, moved: dict[TargetId, TargetId]
) -> int:
    """They go, and come with other due times, or for another topic; new handles.  As `cancel`.

    `moved`: targets that were, and what they became; the caller keeps it from slice to slice.
    """
    rows, by_ms = found.rows, job.which.by_ms
    assert found.bodies is not None
    order = np.argsort(rows.target, kind="stable")
    rows, near = rows.take(order), found.near[order]
    due_ms = rows.due_ms
    if by_ms is not None:
        due_ms = np.clip(due_ms + by_ms, now_ms, DUE_MS_MAX)
    come = [
        (
            _target(scheduler, job, int(rows.target[start]), moved),
            _columns(rows, due_ms, found.bodies.take(order), start, end),
        )
        for start, end in runs(rows.target)
    ]
    changed = Changed(
        RequestKey(NO_REQUEST),
        now_ms,
        (),
        np.empty(0, dtype=np.uint64),
        (),
        scheduler.keyed.source,
        [scheduler.numbers.targets[target].broker for target, _ in come],
        rows.timer_keys(),
        _frames(scheduler, come, now_ms),
        b"",
        table=_table(scheduler, job, rows),
    )
    head = entry.slice_of(job, entry.SHIFTED, len(rows), now_ms)
    first, *more = keyed_entry.encode(changed)
    position, end = scheduler.log.append(log_entries.BULK, [head, first, *more])
    _uncount(scheduler, found)
    home = position + record.HEADER_BYTES + len(head) + len(first)
    keyed_state.apply(scheduler, changed, home, now_ms, near, [job.which.topic])
    job.count += len(rows)
    return end


def _target(scheduler: Scheduler, job: Job, number: int, moved: dict[TargetId, TargetId]) -> int:
    """Where they go now that went there."""
    if not job.which.to_topic:
        return number
    before = scheduler.numbers.targets[number]
    if before not in moved:
        queues = scheduler.dispatcher.queues(job.which.to_topic) or {}
        moved[before] = _served(before._replace(topic=job.which.to_topic), queues)
    return scheduler.numbers.number_target(moved[before])


def _served(target: TargetId, queues: Mapping[str, int]) -> TargetId:
    """One queue instead of a queue whose broker has none: else it would be waited for, for ever.

    The same at all shards, so what was for one queue stays together.
    """
    brokers = sorted(name for name, count in queues.items() if count)
    if target.queue_id < 0 or not brokers or target.broker in brokers:
        return target
    mark = crc32(f"{target.broker} {target.queue_id}".encode())
    broker = brokers[mark % len(brokers)]
    return TargetId(broker, target.topic, mark // len(brokers) % queues[broker])


def _table(scheduler: Scheduler, job: Job, rows: Rows) -> CancelledTable:
    """What a slice's entry says of those that go."""
    sources = [each.id for each in scheduler.numbers.sources]
    mark = mark_of(job.which.topic)
    return log_entries.cancelled_table(sources, rows.source, rows.offset, rows.due_ms, mark)


def _columns(rows: Rows, due_ms: Wide, bodies: Joined, start: int, end: int) -> NewColumns:
    part = rows.slice(start, end)
    joined = bodies.take(slice(start, end)).bytes()
    return NewColumns(part.size, part.tag_hash, part.key_hash, due_ms[start:end], joined)


def _frames(scheduler: Scheduler, come: list[tuple[int, NewColumns]], now_ms: int) -> bytes:
    offset, frames = next_offset(scheduler), []
    for target, columns in come:
        frames += frame_of(scheduler, target, columns, offset, now_ms)
        offset += len(columns.size)
    return b"".join(frames)


def _uncount(scheduler: Scheduler, found: Slice) -> None:
    """Tells forecasts of those that lie in a block."""
    if found.block is not None:
        slots = scheduler.topics.slots(found.rows.target)
        scheduler.due_counts.loaded(found.block, slots, found.rows.due_ms)


def fences(scheduler: Scheduler) -> dict[SourceId, int]:
    """What came before now: offsets by source."""
    return {each.id: each.next_offset for each in scheduler.numbers.sources}
