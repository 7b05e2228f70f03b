"""Clocks of a zone change, and the shard's own clock is set by an hour, now and then, meanwhile.

Each occurrence comes once, in order, as its schedule's `dst` and `catch_up` say; against the oracle
of the wall clock's own tests.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from duemq_recurring.occurrences import CatchUp, Recurrence
from duemq_recurring.wall_clock import Dst, zone_of
from tests.property import schedule_world
from tests.property.schedule_world import MINUTE_MS, ScheduleWorld, plan_of
from tests.unit.recurring import wall_oracle

HOUR_MS = 60 * MINUTE_MS
ZONE = "Europe/Berlin"
EXPRESSIONS: dict[str, wall_oracle.Matches] = {
    "30 2 * * *": lambda at: (at.hour, at.minute) == (2, 30),
    "0,30 1,2,3 * * *": lambda at: at.minute in (0, 30) and at.hour in (1, 2, 3),
}
STEPS_MS = (-HOUR_MS, HOUR_MS, 10 * MINUTE_MS, -10 * MINUTE_MS)


def ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


class SummerTime:
    """Schedules of all kinds, and what is to come of each."""

    def __init__(self, seed: int, change: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.world = world = ScheduleWorld(seed)
        self.start_ms = ms(change - timedelta(hours=self.random.uniform(2, 4)))
        world.now_ms = self.start_ms
        self.wanted: dict[tuple[str, CatchUp], list[int]] = {}
        window = change - timedelta(hours=26), change + timedelta(hours=26)
        for (text, matches), dst in itertools.product(EXPRESSIONS.items(), Dst):
            kind, zone = f"{text} {dst}", zone_of(ZONE)
            recurrence = Recurrence(cron=text, zone=ZONE, dst=dst)
            monkeypatch.setitem(schedule_world.KINDS, kind, (recurrence, 0))
            found = list(map(ms, wall_oracle.instants(zone, matches, False, dst, *window)))
            for policy in CatchUp:
                self.wanted[kind, policy] = found
                assert world.put(f"{kind} {policy}", plan_of(kind, policy))
        monkeypatch.setattr(
            schedule_world, "is_occurrence", lambda kind, at: at in self.wanted[kind, CatchUp.ALL]
        )
        world.sync()

    def run(self, end_ms: int) -> None:
        latest_ms = self.start_ms
        while latest_ms < end_ms:
            self.world.run_until(self.world.now_ms + self.random.randrange(HOUR_MS))
            chance = self.random.random()
            if chance < 0.3:
                self.world.now_ms += self.random.choice(STEPS_MS)
            elif chance < 0.4:
                self.world.power_cut()
            latest_ms = max(latest_ms, self.world.now_ms)
        self.world.run_until(latest_ms + MINUTE_MS)

    def check(self) -> None:
        for (kind, policy), wanted in self.wanted.items():
            due = [at for at in wanted if self.start_ms <= at <= self.world.now_ms]
            came = self.world.broker.came.get(f"{kind} {policy}", [])
            assert came == sorted(set(came) & set(due)), (kind, policy)
            if policy is CatchUp.ALL:
                assert came == due, (kind, policy)
            elif policy is CatchUp.LATEST:
                assert came[-1:] == due[-1:], (kind, policy)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "change", [datetime(2027, 3, 28, 1, tzinfo=UTC), datetime(2027, 10, 31, 1, tzinfo=UTC)]
)
def test_clocks_of_a_zone_change_while_the_clock_is_set(
    seed: int, change: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = SummerTime(seed, change, monkeypatch)
    night.run(ms(change + timedelta(hours=5)))
    night.check()
    assert night.world.broker.came
