"""How a schedule moves on: what comes next, what was missed, when to ask again.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from duemq_recurring.occurrences import END_MS, LATE_MS, CatchUp, Occurrence
from duemq_recurring.schedule import PendingMessage, Schedule

NEVER = 1 << 62
AT_ONCE = 64
"""Messages of a schedule that are made together, when that many were missed."""
AT_ONCE_BYTES = 1 << 20
"""The same; of one the last message may be beyond it."""


class ScheduleStep(NamedTuple):
    """How a schedule moves on: messages that go, and those that come in their place."""

    gone: Sequence[PendingMessage]
    come: Sequence[Occurrence]
    cursor_ms: int


def step(schedule: Schedule, now_ms: int) -> ScheduleStep | int:
    """How a schedule moves on now; or when to ask again, NEVER: when something has happened.

    Raises InvalidArgument if this machine cannot tell its occurrences.
    """
    cursor_ms, left = schedule.state.cursor_ms, schedule.pending
    if schedule.state.paused or (schedule.ended and not left):
        return NEVER
    if not left:
        return _next(schedule, now_ms, (), cursor_ms)
    catch_up = schedule.catch_up(left[0].at_ms)
    if catch_up is CatchUp.ALL:
        return NEVER
    last = left[-1]
    following = None if schedule.ended else next(schedule.following(cursor_ms), None)
    if following is not None and following.at_ms <= now_ms:
        return _next(schedule, now_ms, left, cursor_ms)
    if catch_up is CatchUp.NONE and now_ms > last.due_ms + LATE_MS:
        return _next(schedule, now_ms, left, cursor_ms)
    wake_ms = NEVER if following is None else following.at_ms
    if catch_up is CatchUp.NONE:
        wake_ms = min(wake_ms, last.due_ms + LATE_MS + 1)
    return max(wake_ms, now_ms + 1)


def _next(
    schedule: Schedule, now_ms: int, gone: Sequence[PendingMessage], cursor_ms: int
) -> ScheduleStep:
    count = schedule.plan.recurrence.count
    room = count - schedule.state.stored + len(gone) if count else AT_ONCE
    room = min(room, AT_ONCE_BYTES // (len(schedule.plan.record) + 1) + 1)
    come = _coming(schedule, cursor_ms, now_ms)[: max(room, 0)]
    return ScheduleStep(gone, come, come[-1].at_ms if come else END_MS)


def _coming(schedule: Schedule, after_ms: int, now_ms: int) -> list[Occurrence]:
    """The occurrences to come after a time: missed ones as the policy says, or the next one."""
    to_come = schedule.following(after_ms)
    first = next(to_come, None)
    if first is None:
        return []
    if first.at_ms > now_ms:
        return [first]
    policy = schedule.catch_up(first.at_ms)
    if policy is CatchUp.ALL:
        missed = itertools.takewhile(
            lambda each: each.at_ms <= now_ms and schedule.catch_up(each.at_ms) is policy, to_come
        )
        return [first, *itertools.islice(missed, AT_ONCE - 1)]
    last = schedule.latest(after_ms, now_ms) or first
    if policy is CatchUp.LATEST or now_ms <= last.due_ms + LATE_MS:
        return [last]
    following = next(schedule.following(now_ms), None)
    return [] if following is None else [following]
