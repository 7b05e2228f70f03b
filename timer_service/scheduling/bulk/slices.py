"""A slice of a job: timers that go, or that go and come, in one entry of the log.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from duemq.protocol.due import DUE_MS_MAX
from duemq_server.storage import record
from duemq_server.timer_service.far.bodies import Bytes
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.scheduling import keyed_state
from duemq_server.timer_service.scheduling.bulk import entry
from duemq_server.timer_service.scheduling.bulk.jobs import Job
from duemq_server.timer_service.scheduling.keyed_changes import New, frames_of
from duemq_server.timer_service.scheduling.topic_counts import mark_of
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.keyed import Handle
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, Changed, RequestKey
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import SourceId
from duemq_server.timer_service.timers.rows import Rows, keys_of
from duemq_server.timer_service.timers.wheel import Ids

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


class Slice(NamedTuple):
    """Pending timers, where they lie at this moment."""

    rows: Rows  # in the shard's numbers
    near: Ids  # of the near table, NOWHERE for those that lie far
    bodies: list[Bytes] | None  # where they are needed
    block: Block | None = None  # that all of them lie in


def cancel(scheduler: Scheduler, job: Job, found: Slice, now_ms: int) -> int:
    """They are cancelled; where the entry ends.  Raises LogFull, DiskFull: nothing was done."""
    rows = found.rows
    head = entry.slice_of(job, entry.CANCELLED, len(rows), now_ms)
    body = log_entries.encode_cancelled(
        [each.id for each in scheduler.numbers.sources],
        rows.source,
        rows.offset,
        rows.due_ms,
        mark_of(job.which.topic),
    )
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


def shift(scheduler: Scheduler, job: Job, found: Slice, now_ms: int) -> int:
    """They go, and come with other due times and new handles.  As `cancel`."""
    rows, by_ms = found.rows, job.which.by_ms
    assert found.bodies is not None
    assert by_ms is not None
    order = np.argsort(rows.target, kind="stable")
    rows, near = rows.take(order), found.near[order]
    bodies = [found.bodies[n] for n in order.tolist()]
    due_ms = np.clip(rows.due_ms + by_ms, now_ms, DUE_MS_MAX)
    come: dict[int, list[New]] = {}
    columns = (rows.target, due_ms, rows.tag_hash, rows.key_hash, rows.timer_keys())
    for body, target, due, *hashes in zip(bodies, *(c.tolist() for c in columns), strict=True):
        come.setdefault(target, []).append(New(body, due, *hashes))
    ids = [each.id for each in scheduler.numbers.sources]
    sources, offsets = rows.source.tolist(), rows.offset.tolist()
    gone = zip(sources, offsets, rows.due_ms.tolist(), strict=True)
    changed = Changed(
        RequestKey(NO_REQUEST),
        now_ms,
        (),
        np.empty(0, dtype=np.uint64),
        [Handle(ids[source], offset, due) for source, offset, due in gone],
        scheduler.keyed.source,
        [scheduler.numbers.targets[target].broker for target in come],
        rows.timer_keys(),
        frames_of(scheduler, come, now_ms),
        b"",
        topics=[mark_of(job.which.topic)] * len(rows),
    )
    head = entry.slice_of(job, entry.SHIFTED, len(rows), now_ms)
    first, *more = keyed_entry.encode(changed)
    position, end = scheduler.log.append(log_entries.BULK, [head, first, *more])
    _uncount(scheduler, found)
    home = position + record.HEADER_BYTES + len(head) + len(first)
    keyed_state.apply(scheduler, changed, home, now_ms, near)
    job.count += len(rows)
    return end


def _uncount(scheduler: Scheduler, found: Slice) -> None:
    """Tells forecasts of those that lie in a block."""
    if found.block is not None:
        slots = scheduler.topics.slots(found.rows.target)
        scheduler.due_counts.loaded(found.block, slots, found.rows.due_ms)


def fences(scheduler: Scheduler) -> dict[SourceId, int]:
    """What came before now: offsets by source."""
    return {each.id: each.next_offset for each in scheduler.numbers.sources}
