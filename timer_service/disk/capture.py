"""What a checkpoint says of a shard, taken from its scheduler in one go.

Run by the thread that owns the scheduler.  Encoding it (checkpoint_state.py) and writing it are for
any thread: nothing here is the scheduler's own but bodies, which nobody changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from duemq_server.timer_service.disk.checkpoint_state import CheckpointState, Held, SavedLane
from duemq_server.timer_service.scheduling.fire_lane import FireLane
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.rows import Blob, Rows, runs


def capture(
    scheduler: Scheduler,
    position: int,
    recovery_start: int,
    producer_id: int,
    epochs: Sequence[tuple[int, int]] = (),
    store_id: int = 0,
) -> CheckpointState:
    """The scheduler's state; no job may be running.  Cheap: it is encoded elsewhere."""
    held = _held(scheduler)
    files = {each.home.file for each in held if each.home.file} | scheduler.segments.unfinished()
    in_log = [each.home.position + each.start for each in held if not each.home.file]
    return CheckpointState(
        position=position,
        recovery_start=recovery_start,
        producer_id=producer_id,
        ledger=dataclasses.replace(scheduler.ledger),
        sources=[dataclasses.replace(source) for source in scheduler.numbers.sources],
        targets=list(scheduler.numbers.targets),
        lanes=[_saved(lane) for lane in scheduler.dispatcher.lanes()],
        tombstones=scheduler.tombstones.items(),
        lengths={name: scheduler.segments.lengths[name] for name in files},
        blocks=[dataclasses.replace(each) for each in scheduler.segments.blocks()],
        held=held,
        log_needed_from=min([position, *in_log]),
        forgotten_ms=scheduler.tombstones.forgotten_ms,
        expired_ms=scheduler.tombstones.expired_ms,
        dropped=[(n, *each) for n, each in scheduler.tombstones.gone.dropped.items()],
        fired_until_ms=scheduler.fires.until_ms,
        fired_late=scheduler.fires.pages(),
        replaced=scheduler.tombstones.gone.saved(),
        unmet=scheduler.tombstones.left.saved() if scheduler.tombstones.unmet else None,
        requests=scheduler.keyed.requests.saved(),
        ended_keys=scheduler.keyed.ended.saved(),
        schedules=scheduler.schedules.saved(),
        bulk=scheduler.bulk.saved(),
        epochs=tuple(epochs),
        store_id=store_id,
        topics=scheduler.topics.saved(),
        topics_forgotten=dataclasses.astuple(scheduler.topics.forgotten),
        holds=scheduler.holds.saved(),
        next_hold=scheduler.holds.next_number,
        left=scheduler.holds.left,
        epoch_forgotten=scheduler.dispatcher.epoch_forgotten,
    )


def _saved(lane: FireLane) -> SavedLane:
    unacked = [dataclasses.replace(batch) for batch in lane.unacked] if lane.unacked else ()
    return SavedLane(lane.id, lane.epoch, lane.next_sequence, unacked)


def _held(scheduler: Scheduler) -> list[Held]:
    near = scheduler.near
    ids = near.pending_ids()
    numbers = near.blobs_of(ids)
    ids = ids.take(np.argsort(numbers, kind="stable"))
    numbers = near.blobs_of(ids)
    rows = near.rows(ids)
    held = []
    for first, last in runs(numbers):
        blob = near.blobs[int(numbers[first])]
        if blob is not None:
            held.append(_held_in(blob, rows.slice(first, last)))
    held += [_held_in(blob, _as_now(rows)) for rows, blob in scheduler.tiers.memtable.pieces]
    return held


def _as_now(rows: Rows) -> Rows:
    """A timer that is replaced before this is encoded has its key here yet: that may be lost."""
    if rows.timer_key is None:
        return rows
    return dataclasses.replace(rows, timer_key=rows.timer_key.copy())


def _held_in(blob: Blob, rows: Rows) -> Held:
    start = int(rows.home.min())
    end = int(rows.ends().max())
    data = memoryview(blob.data)[start - blob.start : end - blob.start]
    return Held(blob.home, start, end - start, rows, data=data)
