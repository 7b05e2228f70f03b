"""Timers are kept back, or go again: the decisions, and how many are kept back.

Run by: the thread that owns the scheduler.  No clock, no waiting.  Of two requests the one that is
decided later sees what the other did; the same again changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from duemq.errors import InvalidArgument, Overloaded
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.scheduling.holding.adopting import Adopting
from duemq_server.timer_service.scheduling.holding.holds import (
    HOLDS_MAX,
    room_number,
    waiting_room,
)
from duemq_server.timer_service.timers import hold_entry, log_entries
from duemq_server.timer_service.timers.hold_entry import (
    HELD,
    RESUMED,
    RESUMING,
    Hold,
    HoldChange,
)
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.log_entries import TargetId

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


def hold(scheduler: Scheduler, now_ms: int, topic: str, prefix: str) -> bool:
    """From now on nothing of it is dispatched; False: it is held already.

    Raises Overloaded; LogFull, DiskFull: nothing was done, call again.
    """
    scheduler.holds.asked(topic, prefix)
    return _hold(scheduler, now_ms, topic, prefix)


def adopt(
    scheduler: Scheduler, now_ms: int, topic: str, prefix: str, adopting: Adopting, *, held: bool
) -> bool:
    """As `hold` or `resume`, as another shard does, unless somebody has asked here meanwhile."""
    if not adopting.may_change((topic, prefix)):
        return False
    return (_hold if held else _resume)(scheduler, now_ms, topic, prefix)


def _hold(scheduler: Scheduler, now_ms: int, topic: str, prefix: str) -> bool:
    holds = scheduler.holds
    there = holds.get(topic, prefix)
    if there is not None:
        if there.policy:  # what is not dropped by now stays
            held = Hold(there.number, topic, prefix, there.since_ms)
            _append(scheduler, HoldChange(HELD, held))
        return False
    if len(holds) >= HOLDS_MAX:
        raise Overloaded(
            f"{HOLDS_MAX} holds are in force, no more can be: resume some",
            field="topic",
            value=topic,
            limit=HOLDS_MAX,
            retryable=False,
        )
    _append(scheduler, HoldChange(HELD, Hold(holds.next_number, topic, prefix, now_ms)))
    return True


def note_left(scheduler: Scheduler, now_ms: int, *, left: bool) -> None:
    """That this shard leaves, or is back and holds what others hold; for whichever replica leads.

    Raises LogFull, DiskFull: nothing was done, call again.
    """
    scheduler.log.append(log_entries.LEFT, [log_entries.encode_left(left)])
    scheduler.holds.left = left


def resume(scheduler: Scheduler, now_ms: int, topic: str, prefix: str) -> bool:
    """What waits may go, due ones first due first; False: it was not held.

    Raises LogFull, DiskFull: nothing was done, call again.
    """
    scheduler.holds.asked(topic, prefix)
    return _resume(scheduler, now_ms, topic, prefix)


def _resume(scheduler: Scheduler, now_ms: int, topic: str, prefix: str) -> bool:
    there = scheduler.holds.get(topic, prefix)
    if there is None:
        return False
    _append(scheduler, HoldChange(RESUMED, there._replace(since_ms=now_ms)))
    scheduler.resumed(waiting_room(there))
    return True


def resume_some(
    scheduler: Scheduler, now_ms: int, topic: str, prefix: str, policy: int, older_ms: int
) -> bool:
    """It ends once those that do not go are dropped (dropping.py); False: it was not held.

    Raises InvalidArgument if it is under way with another policy; LogFull, DiskFull: nothing was
    done, call again.
    """
    scheduler.holds.asked(topic, prefix)
    there = scheduler.holds.get(topic, prefix)
    if there is None:
        return False
    if not there.policy:
        at_ms = now_ms + AHEAD_MS  # timers are handed out so much sooner, and count as held
        new = there._replace(policy=policy, asked_ms=at_ms, older_ms=older_ms)
        _append(scheduler, HoldChange(RESUMING, new))
    elif (there.policy, there.older_ms) != (policy, older_ms):
        raise InvalidArgument(
            "it is being resumed with another policy: hold it again, or wait for the end of that",
            field="policy",
        )
    return True


def _append(scheduler: Scheduler, change: HoldChange) -> None:
    scheduler.log.append(log_entries.HOLD, [hold_entry.encode(change)])
    scheduler.holds.apply(change)


def _is_held(scheduler: Scheduler, target: TargetId) -> bool:
    holds = scheduler.holds
    if room_number(target) is not None:
        return holds.holds_room(target)
    return target.topic in holds.topics


def parked_blocks(scheduler: Scheduler) -> list[Block]:
    """Blocks in which held timers lie."""
    if not scheduler.holds:
        return []
    blocks = scheduler.segments.blocks()
    return [each for each in blocks if each.parked and _is_held(scheduler, each.parked)]


def waiting(scheduler: Scheduler) -> Counter[str]:
    """Timers that fell due and are kept back, by topic.

    Of those that lie parked the cancelled ones are counted, too: only their blocks tell.
    """
    found: Counter[str] = Counter()
    if not scheduler.holds:
        return found
    for number in scheduler.dispatcher.due.turns():
        target = scheduler.numbers.targets[number]
        if _is_held(scheduler, target):
            found[target.topic] += scheduler.near.count_live(
                scheduler.dispatcher.due.ids_of(number)
            )
    for each in parked_blocks(scheduler):
        assert each.parked is not None
        found[each.parked.topic] += each.count - each.cursor
    return found
