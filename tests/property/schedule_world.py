"""A timer shard with schedules, in the world made of memory (timer_world.py).

The broker checks each message as it comes: once, never early, of an occurrence of what its schedule
said, in order.  The oracle is plain arithmetic: no cron library, no recurrence of ours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from duemq.errors import InvalidArgument, Overloaded
from duemq.v1 import message_pb2
from duemq_recurring.occurrences import CatchUp, Recurrence
from duemq_recurring.schedule import AT_PROPERTY, NAME_PROPERTY, Plan
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.scheduling.fire_lane import FireBatch
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.scheduling.schedules.changes import Outcome
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from tests.property.timer_world import LIMITS, START_MS, BrokerModel, World

MINUTE_MS = 60_000
STEP_MS_MAX = 256
# (recurrence, whether an instant is an occurrence, their distance)
KINDS: dict[str, tuple[Recurrence, int]] = {
    "seconds": (Recurrence(every_ms=1_000, from_ms=START_MS), 1_000),
    "odd": (Recurrence(every_ms=7_300, from_ms=START_MS + 17), 7_300),
    "jittered": (Recurrence(every_ms=5_000, from_ms=START_MS, jitter_ms=4_000), 5_000),
    "minutes": (Recurrence(cron="* * * * *"), MINUTE_MS),
    "quarters": (Recurrence(cron="*/15 * * * *", zone="Asia/Kathmandu"), 15 * MINUTE_MS),
    "hours": (Recurrence(every_ms=60 * MINUTE_MS, from_ms=START_MS), 60 * MINUTE_MS),
}


def is_occurrence(kind: str, at_ms: int) -> bool:
    recurrence, distance_ms = KINDS[kind]
    return at_ms >= recurrence.from_ms and (at_ms - recurrence.from_ms) % distance_ms == 0


def first_after(kind: str, after_ms: int) -> int:
    recurrence, distance_ms = KINDS[kind]
    from_ms = recurrence.from_ms
    return max(from_ms, from_ms + ((after_ms - from_ms) // distance_ms + 1) * distance_ms)


def plan_of(kind: str, catch_up: CatchUp, topic: str = "any", **more: int) -> Plan:
    recurrence = dataclasses.replace(KINDS[kind][0], catch_up=catch_up, **more)
    return Plan(topic, recurrence, message_pb2.Record(body=kind.encode()).SerializeToString())


@dataclass
class ScheduleBroker(BrokerModel):
    """What came of schedules, by name: instants that were to be, in order of delivery."""

    came: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[tuple[str, int], str] = field(default_factory=dict)
    ids: Counter[str] = field(default_factory=Counter)
    clock_went_back: bool = False

    def _deliver(self, batch: FireBatch, now_ms: int) -> None:
        for each in message_pb2.RecordBatch.FromString(batch.records).records:
            name, at_ms = each.properties[NAME_PROPERTY], int(each.properties[AT_PROPERTY])
            kind = each.body.decode()
            self.ids[each.message_id] += 1
            assert self.ids[each.message_id] == 1, f"{each.message_id} came twice"
            assert is_occurrence(kind, at_ms), f"{name}: {at_ms} is none of {kind}"
            assert at_ms <= each.due_ms <= at_ms + KINDS[kind][0].jitter_ms
            assert each.due_ms <= now_ms or self.clock_went_back, f"{name}: {at_ms} was early"
            self.kinds[name, at_ms] = kind
            self.came.setdefault(name, []).append(at_ms)


class ScheduleWorld(World):
    """Schedules are made, changed, and run."""

    broker: ScheduleBroker

    def __init__(self, seed: int = 0, limits: Limits = LIMITS) -> None:
        super().__init__(seed, limits)
        self.broker = ScheduleBroker()

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.broker.clock_went_back |= now_ms < self._now_ms
        self._now_ms = now_ms

    def put(self, name: str, plan: Plan) -> Outcome | None:
        return self.change(lambda: schedule_changes.put(self.scheduler, name, plan, self.now_ms))

    def pause(self, name: str) -> Outcome | None:
        return self.change(lambda: schedule_changes.pause(self.scheduler, name, self.now_ms))

    def resume(self, name: str) -> Outcome | None:
        return self.change(lambda: schedule_changes.resume(self.scheduler, name, self.now_ms))

    def delete(self, name: str) -> Outcome | None:
        return self.change(lambda: schedule_changes.delete(self.scheduler, name, self.now_ms))

    def change(self, work: Callable[[], Outcome | None]) -> Outcome | None:
        """None: it could not be done now."""
        with suppress(LogFull, DiskFull, Overloaded, InvalidArgument):
            return work()
        return None

    def advance(self) -> None:
        """As the shell does, to the end."""
        schedules = self.scheduler.schedules
        with suppress(LogFull, DiskFull, Overloaded):
            while schedules.next_ms() <= self.now_ms:
                schedule_changes.advance(self.scheduler, self.now_ms)

    def work(self) -> None:
        """One round of the shell."""
        self.advance()
        self.tick(AHEAD_MS)
        self.sync()
        self.send()
        self.housekeep()

    def run_until(self, end_ms: int) -> None:
        """As time passes: from one thing that is due to the next.

        While what is due cannot go, as on a full disk, in ever longer steps.
        """
        step_ms, done = 1, self._done()
        while self.now_ms < end_ms:
            self.work()
            step_ms = min(2 * step_ms, STEP_MS_MAX) if self._done() == done else 1
            done = self._done()
            due_ms = self.scheduler.tiers.next_due_ms()
            next_ms = min(due_ms or end_ms, self.scheduler.schedules.next_ms())
            if self.scheduler.ledger.in_flight or next_ms <= self.now_ms:
                next_ms = self.now_ms + step_ms
            self.now_ms = min(next_ms, end_ms)
        for _ in range(6):  # what is due now may have to be loaded, and sent
            self.work()

    def _done(self) -> tuple[int, int]:
        ledger = self.scheduler.ledger
        return ledger.fired, ledger.in_flight
