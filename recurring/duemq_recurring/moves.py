"""What becomes of a schedule that is made, paused, resumed, deleted, or moves on.  Pure.

A Move says which messages come and which go; whoever keeps them gives them places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from duemq.protocol import checks
from duemq_recurring.occurrences import END_MS, CatchUp, Occurrence
from duemq_recurring.schedule import (
    DELETED,
    MADE,
    MOVED,
    PendingMessage,
    Plan,
    Schedule,
    ScheduleState,
)
from duemq_recurring.steps import ScheduleStep, step

CREATED, CHANGED, UNCHANGED, EXISTS = "CREATED", "CHANGED", "UNCHANGED", "EXISTS"
"""What came of `put`; CHANGED and UNCHANGED of the others, too."""


class Move(NamedTuple):
    """What becomes of a schedule, before its new messages have places."""

    name: str
    what: int  # as of ScheduleChange
    plan: Plan
    state: ScheduleState
    come: Sequence[Occurrence] = ()
    cancelled: Sequence[PendingMessage] = ()
    replaced: Sequence[PendingMessage] = ()
    topic: str = ""  # of what goes; empty: the plan's


def kept(old: Schedule | None, plan: Plan, *, if_absent: bool) -> str | None:
    """UNCHANGED, the plan is the same; EXISTS, another one stays; None: `put` has work to do."""
    if old is not None and old.plan.same(plan):
        return UNCHANGED
    return EXISTS if old is not None and if_absent else None


def with_beginning(plan: Plan, now_ms: int) -> Plan:
    """As it is kept: it says when it begins.  Raises InvalidArgument."""
    if not plan.from_given:
        from_ms = min(now_ms + plan.recurrence.every_ms, END_MS)
        recurrence = dataclasses.replace(plan.recurrence, from_ms=from_ms)
        plan = dataclasses.replace(plan, recurrence=recurrence)
    plan.recurrence.check()
    return plan


def put(old: Schedule | None, name: str, plan: Plan, now_ms: int) -> Move:
    """Made, or given another plan, which begins now; what waits of the old one goes.

    `plan`: with its beginning.  Raises InvalidArgument, also if nothing would ever come.
    """
    left_ms = old.state.left_ms if old is not None else 0
    cursor_ms = max(now_ms - 1, left_ms)
    state = ScheduleState(old is not None and old.state.paused, cursor_ms, 0, left_ms)
    first = Schedule(name, plan, state).occurrences.after(cursor_ms) or _refuse(plan)
    replaced = old.pending if old is not None else ()
    topic = old.plan.topic if old is not None else plan.topic
    move = Move(name, MADE, plan, state, replaced=replaced, topic=topic)
    if state.paused:
        return move
    return move._replace(state=ScheduleState(False, first.at_ms, 1, left_ms), come=(first,))


def _refuse(plan: Plan) -> NoReturn:
    recurrence = plan.recurrence
    if recurrence.until_ms < END_MS or not recurrence.cron:
        raise checks.wrong("until_ms", recurrence.until_ms, "later: nothing comes until then")
    raise checks.wrong("cron", recurrence.cron, "what comes within 50 years")


def pause(schedule: Schedule) -> Move | None:
    """What waits goes, and no more comes until it is resumed; None: it is paused.

    Raises InvalidArgument if this machine cannot tell its occurrences.
    """
    if schedule.state.paused:
        return None
    state = _rewound(schedule)._replace(paused=True)
    return Move(schedule.name, MOVED, schedule.plan, state, cancelled=schedule.pending)


def resume(schedule: Schedule, now_ms: int, catch_up: CatchUp | None = None) -> Move | None:
    """It goes on; what was missed is told by its policy, or this one.  None: it is not paused.

    Raises InvalidArgument as `step`.
    """
    if not schedule.state.paused:
        return None
    plan = schedule.plan
    policy = catch_up or plan.recurrence.catch_up
    # More may have been missed than comes at once.
    all_until_ms = now_ms if policy is CatchUp.ALL is not plan.recurrence.catch_up else 0
    state = schedule.state._replace(paused=False, all_until_ms=all_until_ms)
    recurrence = dataclasses.replace(plan.recurrence, catch_up=policy)
    asked = Schedule(schedule.name, dataclasses.replace(plan, recurrence=recurrence), state)
    found = step(asked, now_ms)
    move = Move(schedule.name, MOVED, plan, state)
    return _moved(move, found) if isinstance(found, ScheduleStep) else move


def delete(schedule: Schedule) -> Move:
    """It goes, and what waits of it."""
    return Move(schedule.name, DELETED, schedule.plan, schedule.state, cancelled=schedule.pending)


def advance(schedule: Schedule, found: ScheduleStep) -> Move | None:
    """What a step asks for; None: nothing, and nothing ever will."""
    if not found.come and not found.gone:
        return None
    move = Move(schedule.name, MOVED, schedule.plan, schedule.state, replaced=found.gone)
    return _moved(move, found)


def _moved(move: Move, found: ScheduleStep) -> Move:
    stored = move.state.stored + len(found.come) - len(found.gone)
    left_out = tuple(each for each in move.state.left_out if each > found.cursor_ms)
    state = move.state._replace(cursor_ms=found.cursor_ms, stored=stored, left_out=left_out)
    if move.state.cursor_ms >= state.all_until_ms:
        state = state._replace(all_until_ms=0)
    return move._replace(state=state, come=found.come)


def _rewound(schedule: Schedule) -> ScheduleState:
    """How far it had come without the messages that wait.

    One between them may have been fired or cancelled by its handle: it does not come again.
    """
    state, pending = schedule.state, schedule.pending
    if not pending:
        return state
    cursor_ms, waiting = pending[0].at_ms - 1, {each.at_ms for each in pending}
    left_out = state.left_out
    if state.left_ms > cursor_ms:
        # Later ones have not come yet: the clock was set back since, and it was resumed.
        until_ms = min(state.left_ms, state.cursor_ms)
        passed = itertools.takewhile(
            lambda each: each.at_ms <= until_ms, schedule.occurrences.following(cursor_ms)
        )
        gone = {each.at_ms for each in passed} - waiting
        left_out = tuple(sorted(gone.union(left_out)))
    return state._replace(
        cursor_ms=cursor_ms, stored=state.stored - len(pending), left_out=left_out
    )
