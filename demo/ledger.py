"""The books of the demo: what was accepted, cancelled, stored, delivered; does it balance?

Pure.  Owned by: the demo's main thread; consumers hand their deliveries over before the audit.

    accepted = delivered to each group + cancelled          nothing lost, nothing made up
    each flight at most once in the topic's log             exactly-once firing
    stored and received at its due time or later            never early
    cancelled = never stored, never delivered

A group may be handed a stored message more than once (at-least-once delivery after a kill -9);
that is counted, and is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from duemq_server.bench.harness.percentiles import summary

# A list of flights in a message for people ends here.
FLIGHTS_NAMED_MAX = 5
# What is later than this during or right after an outage was held up by it.
HELD_UP_MS = 100


@dataclass(frozen=True)
class Delivery:
    """A message as a consumer of a group received it."""

    flight: str
    received_ms: int


@dataclass(frozen=True)
class Stored:
    """A message as it lies in the topic's log."""

    flight: str
    store_ms: int


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
    stored: int
    groups: Sequence[GroupAccount]
    # p50_ms, p99_ms, max_ms of receipt against due time, at the slowest group of each message.
    lateness_outside: dict[str, float]
    lateness_inside: dict[str, float]
    problems: Sequence[str]


@dataclass
class Ledger:
    """Collects the entries; `audit` judges them."""

    due_ms: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    stored: list[Stored] = field(default_factory=list)
    deliveries: dict[str, list[Delivery]] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)

    def accept(self, flight: str, due_ms: int) -> None:
        """Enters a message that was acknowledged."""
        self.due_ms[flight] = due_ms

    def cancel(self, flight: str) -> None:
        """Enters a message whose cancellation was answered `cancelled`."""
        self.cancelled.add(flight)

    def audit(self, expected: int, groups: Sequence[str]) -> Audit:
        """Judges the books of `expected` messages for these groups."""
        problems = [*self._check_accepted(expected), *self._check_log()]
        for group in groups:
            problems += self._check_group(group)
        inside, outside = self._lateness(groups)
        return Audit(
            accepted=len(self.due_ms),
            cancelled=len(self.cancelled),
            stored=len(self.stored),
            groups=[self._account(group) for group in groups],
            lateness_outside=summary(outside),
            lateness_inside=summary(inside),
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

    def _lateness(self, groups: Sequence[str]) -> tuple[list[float], list[float]]:
        latest: dict[str, int] = {}
        for group in groups:
            first: dict[str, int] = {}
            for delivery in self.deliveries.get(group, []):
                first.setdefault(delivery.flight, delivery.received_ms)
            for flight, received_ms in first.items():
                latest[flight] = max(latest.get(flight, 0), received_ms)
        waits = sorted((self.due_ms.get(flight, at), at) for flight, at in latest.items())
        outages = [_with_backlog(outage, waits) for outage in self.outages]
        inside: list[float] = []
        outside: list[float] = []
        for due_ms, received_ms in waits:
            # Its wait, from due to received, and an outage overlap.
            hit = any(due_ms <= o.end_ms and received_ms >= o.begin_ms for o in outages)
            (inside if hit else outside).append(received_ms - due_ms)
        return inside, outside


def _with_backlog(outage: Outage, waits: Sequence[tuple[int, int]]) -> Outage:
    """The outage until all that it held up has come; `waits` are (due, received), in due order.

    The processes serve again before their clients have found them, and what fell due by then is
    behind what waited.
    """
    end_ms = outage.end_ms
    for due_ms, received_ms in waits:
        held_up = received_ms >= outage.begin_ms and received_ms - due_ms > HELD_UP_MS
        if held_up and due_ms <= end_ms:
            end_ms = max(end_ms, received_ms)
    return Outage(outage.begin_ms, end_ms)


def _named(fault: str, flights: Iterable[str]) -> list[str]:
    found = sorted(set(flights))
    if not found:
        return []
    named = ", ".join(found[:FLIGHTS_NAMED_MAX])
    more = len(found) - FLIGHTS_NAMED_MAX
    return [f"{fault}: {named}{f' and {more} more' if more > 0 else ''}"]
