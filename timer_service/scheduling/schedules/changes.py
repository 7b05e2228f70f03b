"""Schedules are made, paused, resumed, deleted, and move on: the decisions.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

Each is one RECUR entry, whole or nothing, and done when it is appended; whoever tells the outcome
waits until the log is durable up to `end`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from duemq.errors import InvalidArgument
from duemq_recurring import moves
from duemq_recurring.moves import CHANGED, CREATED, UNCHANGED, Move
from duemq_recurring.occurrences import END_MS, CatchUp, Occurrence
from duemq_recurring.schedule import (
    MADE,
    PendingMessage,
    Plan,
    Schedule,
    ScheduleChange,
    entry_of,
)
from duemq_recurring.steps import ScheduleStep, step
from duemq_server.storage import record
from duemq_server.timer_service.scheduling.keyed import keyed_state
from duemq_server.timer_service.scheduling.keyed.own_frames import New, frames_of, next_offset
from duemq_server.timer_service.scheduling.topic_counts import mark_of
from duemq_server.timer_service.timers import keyed_entry, log_entries, schedule_entry
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, Changed, RequestKey
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId, TargetId

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

ENTRY_SCHEDULES_MAX = 128  # that move on in one entry: some 10 ms of work
RETRY_MS = 60_000
SHORT_MS = 250  # until it is looked whether there is space
ENTRY_BYTES_MAX = 1 << 20  # of the messages that they bring


class Outcome(NamedTuple):
    """What was done; true once the log is durable up to `end`."""

    what: str
    end: int


def put(
    scheduler: Scheduler, name: str, plan: Plan, now_ms: int, *, if_absent: bool = False
) -> Outcome:
    """Makes a schedule, or gives it another plan, which begins now; its messages that wait go.

    CREATED, CHANGED, UNCHANGED: the plan was the same; EXISTS: another one is there, and stays.
    Raises InvalidArgument, Overloaded, LogFull, DiskFull: nothing was done.
    """
    old = scheduler.schedules.get(name)
    kept = moves.kept(old, plan, if_absent=if_absent)
    if kept is not None:
        return Outcome(kept, scheduler.log.end_position)
    plan = moves.with_beginning(plan, now_ms)
    limits = scheduler.limits
    scheduler.schedules.check_room(name, plan, limits.schedules_max, limits.schedule_bytes_max)
    end = _commit(scheduler, [moves.put(old, name, plan, now_ms)], now_ms)
    return Outcome(CREATED if old is None else CHANGED, end)


def pause(scheduler: Scheduler, name: str, now_ms: int) -> Outcome | None:
    """What waits of a schedule goes, and no more comes until it is resumed; None: no such one.

    Raises as `put`.
    """
    schedule = scheduler.schedules.get(name)
    return None if schedule is None else _done(scheduler, moves.pause(schedule), now_ms)


def resume(
    scheduler: Scheduler, name: str, now_ms: int, catch_up: CatchUp | None = None
) -> Outcome | None:
    """It goes on; what was missed is told by the policy, or this one.  As `pause`."""
    schedule = scheduler.schedules.get(name)
    if schedule is None:
        return None
    return _done(scheduler, moves.resume(schedule, now_ms, catch_up), now_ms)


def delete(scheduler: Scheduler, name: str, now_ms: int) -> Outcome | None:
    """It goes, and what waits of it.  As `pause`."""
    schedule = scheduler.schedules.get(name)
    return None if schedule is None else _done(scheduler, moves.delete(schedule), now_ms)


def _done(scheduler: Scheduler, move: Move | None, now_ms: int) -> Outcome:
    if move is None:
        return Outcome(UNCHANGED, scheduler.log.end_position)
    return Outcome(CHANGED, _commit(scheduler, [move], now_ms))


def advance(scheduler: Scheduler, now_ms: int, *, short: bool = False) -> bool:
    """Those whose time has come move on; True: there may be more to do at once.

    `short` of space: those that take away as many messages as they bring; the others wait a while.
    Raises Overloaded, LogFull, DiskFull: nothing was done, call again.
    """
    schedules = scheduler.schedules
    due = schedules.due(now_ms, ENTRY_SCHEDULES_MAX)
    found: list[Move] = []
    size = taken = 0
    for each in due:
        if size > ENTRY_BYTES_MAX:
            break
        taken += 1
        asked = _step(each, now_ms)
        if not isinstance(asked, ScheduleStep):
            schedules.keep(each, asked)
        elif short and len(asked.come) > len(asked.gone):
            schedules.keep(each, now_ms + SHORT_MS)
        elif (move := moves.advance(each, asked)) is not None:
            found.append(move)
            size += len(each.plan.record) * len(move.come)
        else:
            each.state = each.state._replace(cursor_ms=END_MS)  # a start finds that out again
    schedules.put_back(due[taken:])
    if found:
        try:
            _commit(scheduler, found, now_ms)
        except BaseException:
            schedules.put_back(due[:taken])
            raise
    return schedules.next_ms() <= now_ms


def _step(schedule: Schedule, now_ms: int) -> ScheduleStep | int:
    try:
        return step(schedule, now_ms)
    except InvalidArgument as error:  # zone data, or the library, are older than its plan
        _log.error("schedule %r waits: %s", schedule.name, error)
        return now_ms + RETRY_MS


def _commit(scheduler: Scheduler, found: Sequence[Move], now_ms: int) -> int:
    """Appends the entry and applies it; where it ends."""
    cancelled = [_handle(each) for move in found for each in move.cancelled]
    replaced = [_handle(each) for move in found for each in move.replaced]
    come, came = _new(scheduler, found)
    count = sum(map(len, come.values()))
    topics = [
        *(move.topic or move.plan.topic for move in found for _ in move.cancelled),
        *(move.topic or move.plan.topic for move in found for _ in move.replaced),
    ]
    changed = Changed(
        RequestKey(NO_REQUEST),
        now_ms,
        cancelled,
        np.zeros(len(cancelled), dtype=np.uint64),
        replaced,
        scheduler.keyed.source,
        [scheduler.numbers.targets[target].broker for target in come],
        np.zeros(count, dtype=np.uint64),
        frames_of(scheduler, come, now_ms),
        b"",
        topics=list(map(mark_of, topics)),
    )
    changes = [
        ScheduleChange(
            move.name, move.what, move.state, each, move.plan if move.what == MADE else None
        )
        for move, each in zip(found, came, strict=True)
    ]
    stale = _files_of_far(scheduler, [*cancelled, *replaced])
    parts = schedule_entry.encode(changes, keyed_entry.encode(changed))
    position, end = scheduler.log.append(log_entries.RECUR, parts)
    home = position + record.HEADER_BYTES + len(parts[0])
    apply(scheduler, changes, changed, home, now_ms, topics)
    scheduler.due_counts.forget(stale)
    return end


def _files_of_far(scheduler: Scheduler, gone: Sequence[Cancelled]) -> set[str]:
    """Those that timers may lie in which are not near."""
    numbers, near = scheduler.numbers, scheduler.near
    far = [
        each.due_ms
        for each in gone
        if near.find(numbers.number_source(each.source, "", each.offset), each.offset) < 0
    ]
    if not far:
        return set()
    blocks = scheduler.segments.blocks()
    return {b.file for b in blocks if any(b.next_due_ms <= due <= b.last_due_ms for due in far)}


def apply(
    scheduler: Scheduler,
    changes: Iterable[ScheduleChange],
    changed: Changed,
    home: int,
    now_ms: int,
    topics: Sequence[str] | None = None,
) -> None:
    """What a RECUR entry says; its frames lie at `home`; `topics` as `keyed_state.apply`'s."""
    gone = [(each.source, each.offset) for each in (*changed.cancelled, *changed.replaced)]
    scheduler.schedules.take_away(gone)
    keyed_state.apply(scheduler, changed, home, now_ms, topics=topics)
    scheduler.schedules.apply(changes)


def _handle(pending: PendingMessage) -> Cancelled:
    return Cancelled(SourceId(*pending.source), pending.offset, pending.due_ms)


def _new(
    scheduler: Scheduler, found: Sequence[Move]
) -> tuple[dict[int, list[New]], list[list[PendingMessage]]]:
    """The timers that come, by target, and those of each schedule.  Offsets follow the targets."""
    groups: dict[int, list[tuple[int, Occurrence]]] = {}
    for at, move in enumerate(found):
        if move.come:
            target = scheduler.numbers.number_target(TargetId("", move.plan.topic, -1))
            groups.setdefault(target, []).extend((at, each) for each in move.come)
    offset, source = next_offset(scheduler), scheduler.keyed.source
    come: dict[int, list[New]] = {}
    came: list[list[PendingMessage]] = [[] for _ in found]
    for target, group in groups.items():
        for at, each in group:
            plan = found[at].plan
            body = entry_of(found[at].name, plan, each)
            new = New(body, each.due_ms, plan.tag_hash, plan.key_hash, 0)
            come.setdefault(target, []).append(new)
            came[at].append(PendingMessage(source, offset, each.at_ms, each.due_ms))
            offset += 1
    return come, came
