"""Timers that are due and cannot be delivered now, by topic, with the reason.  Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from duemq_server.timer_service.scheduling.scheduler import Scheduler


class Stuck(NamedTuple):
    """A topic, and why its timers wait."""

    topic: str
    reason: str


def find(scheduler: Scheduler) -> Counter[Stuck]:
    """How many are stuck; cancelled ones that were not met yet included."""
    found: Counter[Stuck] = Counter()
    dispatcher, targets = scheduler.dispatcher, scheduler.numbers.targets
    refusals = dispatcher.refusals()  # once: there may be thousands of targets, and of lanes
    waiting = [(targets[each], dispatcher.due.waiting_for(each)) for each in dispatcher.due.turns()]
    for target, count in (*waiting, *scheduler.segments.parked_counts().items()):
        reason = dispatcher.why_not(target, refusals)
        if reason:
            found[Stuck(target.topic, reason)] += count
    for lane in dispatcher.lanes():
        if lane.failures and lane.reason:
            count = sum(batch.count for batch in lane.unacked)
            found[Stuck(lane.id.topic, lane.reason)] += count
    return found
