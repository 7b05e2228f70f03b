"""The books of the demo: what was accepted, changed, cancelled, stored, delivered; is it right?

Pure.  Owned by: the demo's main thread; consumers hand their deliveries over before the audit.

    accepted = delivered to each group + cancelled          nothing lost, nothing made up
    each flight at most once in the topic's log             exactly-once firing
    stored and received at its newest time or later         never early
    stored with its newest gate                             what is replaced is never sent
    none of an airport stored during its ground stop        held, and then all of them
    cancelled = never stored, never delivered

A group may be handed a stored message more than once (at-least-once delivery after a kill -9);
that is counted, and is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from duemq.descriptions import TimerCount
from duemq_server.bench.harness.percentiles import summary
from duemq_server.demo.books import Reminder, Stop, check_counts, check_reminders

# A list of flights in a message for people ends here.
FLIGHTS_NAMED_MAX = 5
# What is later than this during or right after an outage was held up by it.
HELD_UP_MS = 100
# Clients look for a broker as soon as they hear that it is back.  Between two attempts to connect
# gRPC waits up to 0.6 s.
FOUND_AGAIN_MS = 1_000


@dataclass(frozen=True)
class Delivery:
    """A message as a consumer of a group received it."""

    flight: str
    received_ms: int


@dataclass(frozen=True)
class LoggedMessage:
    """A message as it lies in the topic's log."""

    flight: str
    store_ms: int
    gate: str | None = None
    airport: str = ""


@dataclass(frozen=True)
class Outage:
    """From the kill to the moment when all that was killed served again."""

    begin_ms: int
    end_ms: int


@dataclass(frozen=True)
class GroupAccount:
    """What one group got."""

    group: str
    delivered: int
    repeated: int


@dataclass(frozen=True)
class Audit:
    """The verdict.  No problems: the books balance."""

    accepted: int
    cancelled: int
    moved: int
    """To another time."""
    gates: int
    """Changed."""
    stored: int
    groups: Sequence[GroupAccount]
    # p50_ms, p99_ms, max_ms of receipt against due time, at the slowest group of each message.
    lateness_outside: dict[str, float]
    lateness_inside: dict[str, float]
    # Of those that a ground stop kept back.
    lateness_stopped: dict[str, float]
    count: TimerCount | None
    reminders: int
    problems: Sequence[str]


@dataclass
class Ledger:
    """Collects the entries; `audit` judges them."""

    due_ms: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    stored: list[LoggedMessage] = field(default_factory=list)
    deliveries: dict[str, list[Delivery]] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    gates: dict[str, str] = field(default_factory=dict)
    moves: int = 0
    gate_changes: int = 0
    count: TimerCount | None = None
    """What the timer service says of the topic in the end; None: it was not asked."""
    reminders: list[Reminder] | None = None
    """None: there was no schedule."""
    reminder_every_ms: int = 5_000

    def accept(self, flight: str, due_ms: int) -> None:
        """Enters a message that was acknowledged."""
        self.due_ms[flight] = due_ms

    def cancel(self, flight: str) -> None:
        """Enters a message whose cancellation was answered `cancelled`."""
        self.cancelled.add(flight)

    def move(self, flight: str, due_ms: int) -> None:
        """Enters another due time, as it was answered."""
        self.due_ms[flight] = due_ms
        self.moves += 1

    def change_gate(self, flight: str, due_ms: int, gate: str) -> None:
        """Enters a message that was acknowledged in place of the one before."""
        self.due_ms[flight] = due_ms
        self.gates[flight] = gate
        self.gate_changes += 1

    def audit(self, expected: int, groups: Sequence[str]) -> Audit:
        """Judges the books of `expected` messages for these groups."""
        problems = [*self._check_accepted(expected), *self._check_log(), *self._check_changes()]
        for group in groups:
            problems += self._check_group(group)
        problems += self._check_services()
        inside, outside, stopped = self._lateness(groups)
        return Audit(
            accepted=len(self.due_ms),
            cancelled=len(self.cancelled),
            moved=self.moves,
            gates=self.gate_changes,
            stored=len(self.stored),
            groups=[self._account(group) for group in groups],
            lateness_outside=summary(outside),
            lateness_inside=summary(inside),
            lateness_stopped=summary(stopped),
            count=self.count,
            reminders=len(self.reminders or ()),
            problems=problems,
        )

    def _check_accepted(self, expected: int) -> Iterable[str]:
        if len(self.due_ms) != expected:
            yield f"{len(self.due_ms)} messages were accepted, {expected} were to be sent"

    def _check_log(self) -> Iterable[str]:
        counts = Counter(entry.flight for entry in self.stored)
        due = self.due_ms
        yield from _named("twice in the log", (f for f, n in counts.items() if n > 1))
        yield from _named("in the log, never accepted", counts.keys() - due.keys())
        yield from _named("in the log although cancelled", counts.keys() & self.cancelled)
        yield from _named("not in the log", due.keys() - self.cancelled - counts.keys())
        early = (e.flight for e in self.stored if e.store_ms < due.get(e.flight, 0))
        yield from _named("stored before its due time", early)

    def _check_changes(self) -> Iterable[str]:
        gates = self.gates
        old = (e.flight for e in self.stored if e.gate != gates.get(e.flight))
        yield from _named("in the log with another gate than its newest", old)
        for stop in self.stops:
            left = (e.flight for e in self.stored if self._left_during(stop, e))
            yield from _named(f"left during the ground stop at {stop.airport}", left)

    def _left_during(self, stop: Stop, entry: LoggedMessage) -> bool:
        # What was due before the hold was answered may have been on its way.
        held = entry.airport == stop.airport and self.due_ms.get(entry.flight, 0) > stop.begin_ms
        return held and entry.store_ms < stop.end_ms

    def _check_services(self) -> Iterable[str]:
        flew = len(self.due_ms) - len(self.cancelled)
        changed = self.moves + self.gate_changes
        yield from check_counts(self.count, len(self.due_ms), changed, flew)
        if self.reminders is not None:
            yield from check_reminders(self.reminders, self.reminder_every_ms)

    def _check_group(self, group: str) -> Iterable[str]:
        deliveries = self.deliveries.get(group, [])
        delivered = {delivery.flight for delivery in deliveries}
        due = self.due_ms
        yield from _named(f"lost for group {group}", due.keys() - self.cancelled - delivered)
        yield from _named(f"delivered to {group} although cancelled", delivered & self.cancelled)
        yield from _named(f"delivered to {group}, never accepted", delivered - due.keys())
        early = (d.flight for d in deliveries if d.received_ms < due.get(d.flight, 0))
        yield from _named(f"early at group {group}", early)

    def _account(self, group: str) -> GroupAccount:
        deliveries = self.deliveries.get(group, [])
        distinct = len({delivery.flight for delivery in deliveries})
        return GroupAccount(group, distinct, len(deliveries) - distinct)

    def _lateness(self, groups: Sequence[str]) -> tuple[list[float], list[float], list[float]]:
        latest: dict[str, int] = {}
        for group in groups:
            first: dict[str, int] = {}
            for delivery in self.deliveries.get(group, []):
                first.setdefault(delivery.flight, delivery.received_ms)
            for flight, received_ms in first.items():
                latest[flight] = max(latest.get(flight, 0), received_ms)
        kept_back = {e.flight for e in self.stored if self.kept_back(e.flight, e.airport)}
        stopped = [float(latest[f] - self.due_ms.get(f, 0)) for f in kept_back & latest.keys()]
        waits = sorted(
            (self.due_ms.get(flight, at), at)
            for flight, at in latest.items()
            if flight not in kept_back
        )
        outages = [_with_backlog(outage, waits) for outage in self.outages]
        inside: list[float] = []
        outside: list[float] = []
        for due_ms, received_ms in waits:
            # Its wait, from due to received, and an outage overlap.
            hit = any(due_ms <= o.end_ms and received_ms >= o.begin_ms for o in outages)
            (inside if hit else outside).append(received_ms - due_ms)
        return inside, outside, stopped

    def kept_back(self, flight: str, airport: str) -> bool:
        """Whether it fell due at the airport while that was stopped."""
        due_ms = self.due_ms.get(flight, 0)
        return any(
            stop.airport == airport and stop.begin_ms < due_ms <= stop.end_ms for stop in self.stops
        )


def _with_backlog(outage: Outage, waits: Sequence[tuple[int, int]]) -> Outage:
    """The outage until all that it held up has come; `waits` are (due, received), in due order.

    The processes serve again before their clients have found them, and what fell due by then is
    behind what waited.
    """
    end_ms, found_ms = outage.end_ms, outage.end_ms + FOUND_AGAIN_MS
    for due_ms, received_ms in waits:
        held_up = received_ms >= outage.begin_ms and received_ms - due_ms > HELD_UP_MS
        if held_up and due_ms <= max(end_ms, found_ms):
            end_ms = max(end_ms, received_ms)
    return Outage(outage.begin_ms, end_ms)


def _named(fault: str, flights: Iterable[str]) -> list[str]:
    found = sorted(set(flights))
    if not found:
        return []
    named = ", ".join(found[:FLIGHTS_NAMED_MAX])
    more = len(found) - FLIGHTS_NAMED_MAX
    return [f"{fault}: {named}{f' and {more} more' if more > 0 else ''}"]
