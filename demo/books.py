"""What the services' own books say, against what the demo knows.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duemq.descriptions import TimerCount


@dataclass(frozen=True)
class Stop:
    """An airport's ground stop: from the answer to its hold until the resume was asked for."""

    airport: str
    begin_ms: int
    end_ms: int


@dataclass(frozen=True)
class Reminder:
    """A message of the schedule as it lies in its topic's log."""

    scheduled_ms: int
    store_ms: int


def check_counts(count: TimerCount | None, flights: int, changed: int, flew: int) -> Iterable[str]:
    """The timer service's account of the topic; `changed`: new gates and new times.

    Each of them is one accepted anew, in place of one that is replaced.
    """
    if count is None:
        return
    # A line of the account, as it should be; the topic's flights leave nothing behind.
    should = {"accepted": flights + changed, "replaced": changed, "fired": flew, "pending": 0}
    for name, expected in should.items():
        if (found := getattr(count, name)) != expected:
            yield f"the timer service says {name} {found:,}, the demo {expected:,}"
    gone = count.fired + count.cancelled + count.replaced + count.dropped + count.lost
    if count.accepted != count.pending + gone:
        yield f"the timer service's own books do not balance: {count}"


def check_reminders(reminders: Sequence[Reminder], every_ms: int) -> Iterable[str]:
    """One each period, none twice, none early; at least one."""
    times = Counter(each.scheduled_ms for each in reminders)
    if not times:
        yield "no reminder came"
        return
    missed = set(range(min(times), max(times), every_ms)) - times.keys()
    twice = sum(n > 1 for n in times.values())
    early = sum(each.store_ms < each.scheduled_ms for each in reminders)
    for fault, number in (("missing", len(missed)), ("twice", twice), ("early", early)):
        if number:
            yield f"reminders {fault}: {number}"
