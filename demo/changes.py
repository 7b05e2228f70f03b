"""What changes during the day, and when it is announced.  Pure.

A flight that left hours late is moved to the time at which it left; now and then one changes its
gate; one airport's departures stop for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duemq.descriptions import TimerBucket
from duemq_server.demo.day import Departure

# Announced this long before the flight is due: more than an outage takes.
ANNOUNCED_S = 8.0
# Only who left so late is moved: the screen stays readable.
LATE_MIN = 300
# One in so many of the flights that leave changes its gate.
GATE_EVERY = 50
STOPPED_AIRPORT = "LGA"
# Of the day: the stop begins before the outage and ends after it.
STOP_BEGIN, STOP_END = 0.4, 0.6


@dataclass(frozen=True)
class Change:
    """A flight's new time, or its new gate."""

    departure: Departure
    announced_ms: int
    due_ms: int
    gate: str | None = None
    """None: it is moved to `due_ms`."""


def timer_key(departure: Departure) -> str:
    """A flight's name at the timer service: what begins with its airport can be held together."""
    return f"{departure.origin}/{departure.flight}"


def plan(day: Sequence[Departure], due_ms: Mapping[str, int], speed: float) -> list[Change]:
    """The changes of those that leave, in the order in which they are announced."""
    changes = []
    for number, departure in enumerate(each for each in day if not each.cancelled):
        due = due_ms[departure.flight]
        announced_ms = due - int(ANNOUNCED_S * 1000)
        if departure.late_min >= LATE_MIN:
            later = due + round(departure.late_min * 60_000 / speed)
            changes.append(Change(departure, announced_ms, later))
        elif number % GATE_EVERY == 0:
            changes.append(Change(departure, announced_ms, due, f"G{1 + number // GATE_EVERY}"))
    return sorted(changes, key=lambda change: change.announced_ms)


def by_hours(due_ms: Sequence[int], begin_ms: int, speed: float) -> list[TimerBucket]:
    """How many are due in each hour of the day, from `begin_ms` on; empty hours are left out."""
    hour_ms = 3_600_000 / speed
    counts: dict[int, int] = {}
    for each in due_ms:
        hour = int((each - begin_ms) / hour_ms)
        counts[hour] = counts.get(hour, 0) + 1
    return [
        TimerBucket(
            begin_ms + round(hour * hour_ms), begin_ms + round((hour + 1) * hour_ms), counts[hour]
        )
        for hour in sorted(counts)
    ]
