"""Schedules are made, paused, resumed, deleted, and move on: the decisions.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

Each is one RECUR entry, whole or nothing, and done when it is appended; whoever tells the outcome
waits until the log is durable up to `end`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from duemq.errors import InvalidArgument, Overloaded
from duemq.protocol import checks
from duemq_server.storage import record
from duemq_server.timer_service.recurring import schedule_entry
from duemq_server.timer_service.recurring.occurrences import END_MS, CatchUp, Occurrence
from duemq_server.timer_service.recurring.schedule import (
    Pending,
    Plan,
    Schedule,
    State,
    entry_of,
    size_of,
)
from duemq_server.timer_service.recurring.schedule_entry import (
    DELETED,
    MADE,
    MOVED,
    ScheduleChange,
)
from duemq_server.timer_service.recurring.schedules import Step, step
from duemq_server.timer_service.scheduling import keyed_state
from duemq_server.timer_service.scheduling.keyed_changes import (
    New,
    frames_of,
    next_offset,
)
from duemq_server.timer_service.scheduling.topic_counts import mark_of
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, Changed, RequestKey
from duemq_server.timer_service.timers.log_entries import Cancelled, TargetId

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

CREATED, CHANGED, UNCHANGED, EXISTS = "CREATED", "CHANGED", "UNCHANGED", "EXISTS"
ENTRY_SCHEDULES_MAX = 128  # that move on in one entry: some 10 ms of work
RETRY_MS = 60_000
ENTRY_BYTES_MAX = 1 << 20  # of the messages that they bring


class Outcome(NamedTuple):
    """What was done; true once the log is durable up to `end`."""

    what: str
    end: int


class _Move(NamedTuple):
    """What becomes of a schedule, before its new timers have offsets."""

    name: str
    what: int
    plan: Plan
    state: State
    come: Sequence[Occurrence] = ()
    cancelled: Sequence[Pending] = ()
    replaced: Sequence[Pending] = ()
    topic: str = ""  # of what goes


def put(
    scheduler: Scheduler, name: str, plan: Plan, now_ms: int, *, if_absent: bool = False
) -> Outcome:
    """Makes a schedule, or gives it another plan, which begins now; its messages that wait go.

    CREATED, CHANGED, UNCHANGED: the plan was the same; EXISTS: another one is there, and stays.
    Raises InvalidArgument, Overloaded, LogFull, DiskFull: nothing was done.
    """
    old = scheduler.schedules.get(name)
    end = scheduler.log.end_position
    if old is not None and old.plan.same(plan):
        return Outcome(UNCHANGED, end)
    if old is not None and if_absent:
        return Outcome(EXISTS, end)
    plan = _with_beginning(plan, now_ms)
    plan.recurrence.check()
    _check_room(scheduler, name, plan, old)
    left_ms = old.state.left_ms if old is not None else 0
    cursor_ms = max(now_ms - 1, left_ms)
    state = State(old is not None and old.state.paused, cursor_ms, 0, left_ms)
    made = Schedule(name, plan, state)
    first = made.occurrences.after(cursor_ms) or _refuse(plan)
    replaced = old.pending if old is not None else ()
    topic = old.plan.topic if old is not None else plan.topic
    move = _Move(name, MADE, plan, state, replaced=replaced, topic=topic)
    if not state.paused:
        move = move._replace(state=State(False, first.at_ms, 1, left_ms), come=(first,))
    return Outcome(CREATED if old is None else CHANGED, _commit(scheduler, [move], now_ms))


def _refuse(plan: Plan) -> NoReturn:
    recurrence = plan.recurrence
    if recurrence.until_ms < END_MS or not recurrence.cron:
        raise checks.wrong("until_ms", recurrence.until_ms, "later: nothing comes until then")
    raise checks.wrong("cron", recurrence.cron, "what comes within 50 years")


def pause(scheduler: Scheduler, name: str, now_ms: int) -> Outcome | None:
    """What waits of a schedule goes, and no more comes until it is resumed; None: no such one.

    Raises as `put`.
    """
    schedule = scheduler.schedules.get(name)
    if schedule is None:
        return None
    if schedule.state.paused:
        return Outcome(UNCHANGED, scheduler.log.end_position)
    state = _rewound(schedule)._replace(paused=True)
    move = _Move(name, MOVED, schedule.plan, state, cancelled=schedule.pending)
    return Outcome(CHANGED, _commit(scheduler, [move], now_ms))


def resume(
    scheduler: Scheduler, name: str, now_ms: int, catch_up: CatchUp | None = None
) -> Outcome | None:
    """It goes on; what was missed is told by the policy, or this one.  As `pause`."""
    schedule = scheduler.schedules.get(name)
    if schedule is None:
        return None
    if not schedule.state.paused:
        return Outcome(UNCHANGED, scheduler.log.end_position)
    plan, state = schedule.plan, schedule.state._replace(paused=False)
    policy = catch_up or plan.recurrence.catch_up
    recurrence = dataclasses.replace(plan.recurrence, catch_up=policy)
    asked = Schedule(name, dataclasses.replace(plan, recurrence=recurrence), state)
    found = step(asked, now_ms)
    move = _Move(name, MOVED, plan, state)
    if isinstance(found, Step):
        move = _moved(move, found)
    return Outcome(CHANGED, _commit(scheduler, [move], now_ms))


def delete(scheduler: Scheduler, name: str, now_ms: int) -> Outcome | None:
    """It goes, and what waits of it.  As `pause`."""
    schedule = scheduler.schedules.get(name)
    if schedule is None:
        return None
    move = _Move(name, DELETED, schedule.plan, schedule.state, cancelled=schedule.pending)
    return Outcome(CHANGED, _commit(scheduler, [move], now_ms))


def advance(scheduler: Scheduler, now_ms: int) -> bool:
    """Those whose time has come move on; True: there may be more to do at once.

    Raises Overloaded, LogFull, DiskFull: nothing was done, call again.
    """
    schedules = scheduler.schedules
    due = schedules.due(now_ms, ENTRY_SCHEDULES_MAX)
    moves: list[_Move] = []
    size = taken = 0
    for each in due:
        if size > ENTRY_BYTES_MAX:
            break
        taken += 1
        found = _step(each, now_ms)
        if not isinstance(found, Step):
            schedules.keep(each, found)
        elif found.come or found.gone:
            move = _Move(each.name, MOVED, each.plan, each.state, replaced=found.gone)
            moves.append(_moved(move, found))
            size += len(each.plan.record) * len(found.come)
        else:
            each.state = each.state._replace(cursor_ms=END_MS)  # a start finds that out again
    schedules.put_back(due[taken:])
    if moves:
        try:
            _commit(scheduler, moves, now_ms)
        except BaseException:
            schedules.put_back(due[:taken])
            raise
    return schedules.next_ms() <= now_ms


def _step(schedule: Schedule, now_ms: int) -> Step | int:
    try:
        return step(schedule, now_ms)
    except InvalidArgument as error:  # zone data, or the library, are older than its plan
        _log.error("schedule %r waits: %s", schedule.name, error)
        return now_ms + RETRY_MS


def _moved(move: _Move, found: Step) -> _Move:
    stored = move.state.stored + len(found.come) - len(found.gone)
    state = move.state._replace(cursor_ms=found.cursor_ms, stored=stored)
    return move._replace(state=state, come=found.come)


def _rewound(schedule: Schedule) -> State:
    """How far it had come without the messages that wait."""
    state, pending = schedule.state, schedule.pending
    if not pending:
        return state
    return state._replace(cursor_ms=pending[0].at_ms - 1, stored=state.stored - len(pending))


def _with_beginning(plan: Plan, now_ms: int) -> Plan:
    if plan.from_given:
        return plan
    from_ms = min(now_ms + plan.recurrence.every_ms, END_MS)
    return dataclasses.replace(
        plan, recurrence=dataclasses.replace(plan.recurrence, from_ms=from_ms)
    )


def _check_room(scheduler: Scheduler, name: str, plan: Plan, old: Schedule | None) -> None:
    schedules, limits = scheduler.schedules, scheduler.limits
    if old is None and len(schedules) >= limits.schedules_max:
        raise Overloaded(
            f"schedules_max: this shard has {len(schedules)} schedules, no more are allowed",
            field="schedules_max",
            value=len(schedules),
            limit=limits.schedules_max,
            retryable=False,
        )
    size = schedules.bytes + size_of(name, plan) - (old.size if old is not None else 0)
    if size > limits.schedule_bytes_max:
        raise Overloaded(
            f"schedule_bytes_max: this shard's schedules would take {size} bytes,"
            f" {limits.schedule_bytes_max} are allowed",
            field="schedule_bytes_max",
            value=size,
            limit=limits.schedule_bytes_max,
            retryable=False,
        )


def _commit(scheduler: Scheduler, moves: Sequence[_Move], now_ms: int) -> int:
    """Appends the entry and applies it; where it ends."""
    cancelled = [_handle(each) for move in moves for each in move.cancelled]
    replaced = [_handle(each) for move in moves for each in move.replaced]
    come, came = _new(scheduler, moves)
    count = sum(map(len, come.values()))
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
        topics=[
            *(mark_of(move.topic or move.plan.topic) for move in moves for _ in move.cancelled),
            *(mark_of(move.topic or move.plan.topic) for move in moves for _ in move.replaced),
        ],
    )
    changes = [
        ScheduleChange(
            move.name, move.what, move.state, each, move.plan if move.what == MADE else None
        )
        for move, each in zip(moves, came, strict=True)
    ]
    stale = _files_of_far(scheduler, [*cancelled, *replaced])
    parts = schedule_entry.encode(changes, keyed_entry.encode(changed))
    position, end = scheduler.log.append(log_entries.RECUR, parts)
    apply(scheduler, changes, changed, position + record.HEADER_BYTES + len(parts[0]), now_ms)
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
) -> None:
    """What a RECUR entry says; its frames lie at `home` of the log."""
    gone = [(each.source, each.offset) for each in (*changed.cancelled, *changed.replaced)]
    scheduler.schedules.take_away(gone)
    keyed_state.apply(scheduler, changed, home, now_ms)
    scheduler.schedules.apply(changes)


def _handle(pending: Pending) -> Cancelled:
    return Cancelled(pending.source, pending.offset, pending.due_ms)


def _new(
    scheduler: Scheduler, moves: Sequence[_Move]
) -> tuple[dict[int, list[New]], list[list[Pending]]]:
    """The timers that come, by target, and those of each schedule.  Offsets follow the targets."""
    groups: dict[int, list[tuple[int, Occurrence]]] = {}
    for at, move in enumerate(moves):
        if move.come:
            target = scheduler.numbers.number_target(TargetId("", move.plan.topic, -1))
            groups.setdefault(target, []).extend((at, each) for each in move.come)
    offset, source = next_offset(scheduler), scheduler.keyed.source
    come: dict[int, list[New]] = {}
    came: list[list[Pending]] = [[] for _ in moves]
    for target, group in groups.items():
        for at, each in group:
            plan = moves[at].plan
            body = entry_of(moves[at].name, plan, each)
            new = New(body, each.due_ms, plan.tag_hash, plan.key_hash, 0)
            come.setdefault(target, []).append(new)
            came[at].append(Pending(source, offset, each.at_ms, each.due_ms))
            offset += 1
    return come, came
