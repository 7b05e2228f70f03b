"""Carries out what changes during the day: new times, new gates, a ground stop, a reminder.

Owned by: the demo's main thread.  While the timer service is away it does nothing: a change that
comes too late then is left out, and what waits for the end of the outage waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from duemq import Admin, Outgoing, Producer
from duemq.descriptions import CatchUp
from duemq.errors import PartialAnswer
from duemq.producing.rescheduling import RescheduleOutcome
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.demo.books import Reminder, Stop
from duemq_server.demo.changes import (
    STOP_BEGIN,
    STOP_END,
    STOPPED_AIRPORT,
    Change,
    plan,
    timer_key,
)
from duemq_server.demo.day import Departure
from duemq_server.demo.ledger import Ledger

TOPIC = "departures"
REMINDERS = "reminders"
SCHEDULE = "tower-reminder"
# By the clock on the wall, not by the day's.
REMINDER_CRON, REMINDER_EVERY_MS = "*/5 * * * * *", 5_000
ZONE = "America/New_York"
# A gate is not changed later than this before the flight is due: sent when it has left, the new
# message would be a second flight.
SAFE_S = 3.0


class Tower:
    """Makes the changes when they are announced."""

    def __init__(
        self, admin: Admin, producer: Producer, ledger: Ledger, say: Callable[[str], None]
    ) -> None:
        self._admin = admin
        self._producer = producer
        self._ledger = ledger
        self._say = say
        self._changes: list[Change] = []
        self._stop_ms = (0, 0)
        self._held_since_ms: int | None = None

    @property
    def done(self) -> bool:
        """Nothing is to come any more."""
        return not self._changes and bool(self._ledger.stops)

    def open(self, day: Sequence[Departure], due_ms: Mapping[str, int], speed: float) -> None:
        """Plans the day, whose messages are accepted."""
        self._changes = plan(day, due_ms, speed)
        begin_ms, end_ms = min(due_ms.values()), max(due_ms.values())
        length_ms = end_ms - begin_ms
        self._stop_ms = (
            begin_ms + int(length_ms * STOP_BEGIN),
            begin_ms + int(length_ms * STOP_END),
        )

    def remind(self) -> None:
        """Starts the reminder."""
        self._admin.create_topic(REMINDERS)
        self._admin.put_schedule(
            SCHEDULE,
            topic=REMINDERS,
            body=b"look at the board",
            cron=REMINDER_CRON,
            zone=ZONE,
            catch_up=CatchUp.ALL,
        )

    def close(self, nameserver: str) -> None:
        """Ends the reminder, and has what the services say entered."""
        self._admin.pause_schedule(SCHEDULE)
        self._ledger.reminders = [
            Reminder(int(message.properties["duemq.scheduled_ms"]), message.store_ms)
            for message in read_topic(nameserver, REMINDERS)
        ]
        (self._ledger.count,) = self._admin.count_timers(TOPIC)

    def step(self, clock: str) -> None:
        """What is to be done by now; only while the timer service is there."""
        self._ground_stop(clock)
        now = now_ms()
        while self._changes and self._changes[0].announced_ms <= now:
            self._make(self._changes.pop(0), clock)

    def _make(self, change: Change, clock: str) -> None:
        departure, name = change.departure, change.departure.flight
        if self._ledger.due_ms[name] < now_ms() + SAFE_S * 1000:
            return
        key = timer_key(departure)
        if change.gate is not None:
            message = outgoing(departure, change.due_ms, change.gate)
            (receipt,) = self._producer.send_many(TOPIC, [message])
            self._ledger.change_gate(name, receipt.due_ms or 0, change.gate)
            self._say(f"{clock}  {name} from {departure.origin}: gate {change.gate}")
            return
        answer = self._admin.reschedule(key=(TOPIC, key), deliver_at=change.due_ms)
        if answer.outcome is RescheduleOutcome.RESCHEDULED:
            self._ledger.move(name, answer.due_ms or 0)
            hours, minutes = divmod(departure.late_min, 60)
            self._say(f"{clock}  {name} from {departure.origin}: {hours} h {minutes:02} min later")

    def _ground_stop(self, clock: str) -> None:
        if self._ledger.stops:
            return
        prefix = f"{STOPPED_AIRPORT}/"
        begin_ms, end_ms = self._stop_ms
        now = now_ms()
        # Right after an outage routes may lack the timer shard: each is repeated at the next step.
        with suppress(PartialAnswer):
            if self._held_since_ms is None and now >= begin_ms:
                held = self._admin.hold_timers(TOPIC, key_prefix=prefix)
                self._held_since_ms = now_ms()
                self._say(f"{clock}  ground stop at {STOPPED_AIRPORT}{_flights(held.pending)}")
            elif self._held_since_ms is not None and now >= end_ms:
                waiting = sum(each.held for each in self._admin.count_timers(TOPIC))
                resumed_ms = now_ms()
                self._admin.resume_timers(TOPIC, key_prefix=prefix)
                self._ledger.stops.append(Stop(STOPPED_AIRPORT, self._held_since_ms, resumed_ms))
                self._say(f"{clock}  {STOPPED_AIRPORT} goes on, {waiting} flights have waited")


def outgoing(departure: Departure, due_ms: int, gate: str | None = None) -> Outgoing:
    """The flight's message.  Sent again while it waits, it replaces the one before."""
    return Outgoing(
        departure.body,
        key=departure.flight,
        tag=departure.origin,
        ordering_key=departure.tail or None,
        properties={"gate": gate} if gate else None,
        timer_key=timer_key(departure),
        deliver_at=due_ms,
    )


def now_ms() -> int:
    """Epoch milliseconds, now."""
    return time.time_ns() // 1_000_000


def _flights(pending: int | None) -> str:
    return "" if pending is None else f", {pending} flights are still to leave"
