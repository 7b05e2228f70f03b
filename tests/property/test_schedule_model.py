"""Whatever happens to a shard with schedules: each occurrence once, never early, as policies say.

With the policy `all` nothing is left out between what a schedule was made for and now.  With the
others what comes is in order, and with `latest` the last one that was due has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duemq_recurring.occurrences import CatchUp
from duemq_recurring.schedule import Plan
from duemq_server.timer_service.timers.limits import Limits
from tests.crash.faulty_disk import PowerCut
from tests.property.schedule_world import (
    KINDS,
    MINUTE_MS,
    ScheduleWorld,
    first_after,
    plan_of,
)
from tests.property.timer_world import BROKER, LIMITS, OTHER, TIGHT, TOPICS

HOUR_MS = 60 * MINUTE_MS
NAMES = ["a", "b", "c"]
names = st.sampled_from(NAMES)


@dataclass
class Told:
    """A plan that a schedule had: what comes of it comes after `after_ms`."""

    kind: str
    policy: CatchUp
    plan: Plan
    after_ms: int


class SchedulesModel(RuleBasedStateMachine):
    """Rules are what users, a network, a clock and a power supply do."""

    @initialize(seed=st.integers(0, 1 << 16), limits=st.sampled_from([LIMITS, TIGHT]))
    def start(self, seed: int, limits: Limits) -> None:
        self.world = ScheduleWorld(seed, limits)
        self.told: dict[str, list[Told]] = {}
        self.paused: set[str] = set()
        self.generation = dict.fromkeys(NAMES, 0)

    def name(self, short: str) -> str:
        """A deleted one's name is not given again: it would be another schedule's past."""
        return f"{short}{self.generation[short]}"

    @rule(short=names, kind=st.sampled_from(sorted(KINDS)), policy=st.sampled_from(list(CatchUp)))
    def put(self, short: str, kind: str, policy: CatchUp) -> None:
        name, plan = self.name(short), plan_of(kind, policy)
        old = self.world.scheduler.schedules.get(name)
        left_ms = old.state.left_ms if old else 0
        if old is None or old.plan != plan:
            told = Told(kind, policy, plan, max(self.world.now_ms - 1, left_ms))
            self.told.setdefault(name, []).append(told)
        self._durably(lambda: self.world.put(name, plan))

    @rule(short=names)
    def pause(self, short: str) -> None:
        self._durably(lambda: self.world.pause(self.name(short)))

    @rule(short=names)
    def resume(self, short: str) -> None:
        self._durably(lambda: self.world.resume(self.name(short)))

    @rule(short=names)
    def delete(self, short: str) -> None:
        name = self.name(short)
        self._durably(lambda: self.world.delete(name))
        if self.world.scheduler.schedules.get(name) is None:
            self.generation[short] += 1

    @rule(passed=st.one_of(st.integers(0, 3_000), st.integers(0, 3 * HOUR_MS)))
    def time_passes(self, passed: int) -> None:
        """And nobody runs."""
        self.world.now_ms += passed

    @rule(passed=st.one_of(st.integers(0, 20_000), st.integers(0, HOUR_MS // 4)))
    def the_shell_works(self, passed: int) -> None:
        end_ms = self.world.now_ms + passed
        self._survive(lambda: self.world.run_until(end_ms))

    @rule(by=st.integers(-2 * HOUR_MS, 2 * HOUR_MS))
    def the_clock_is_set(self, by: int) -> None:
        self.world.now_ms += by

    @rule()
    def advance(self) -> None:
        self._survive(self.world.advance)

    @rule()
    def tick(self) -> None:
        self._survive(lambda: self.world.tick(6))

    @rule()
    def sync(self) -> None:
        self._survive(self.world.sync)

    @rule(drop=st.booleans())
    def send(self, drop: bool) -> None:
        self._survive(lambda: self.world.send(refuse_share=0.2, drop=drop))

    @rule()
    def checkpoint(self) -> None:
        self._survive(self.world.checkpoint)

    @rule()
    def housekeep(self) -> None:
        self._survive(self.world.housekeep)

    @rule()
    def kill(self) -> None:
        self.world.kill()
        self._reconcile()

    @rule()
    def power_cut(self) -> None:
        self.world.power_cut()
        self._reconcile()

    @rule(operations=st.integers(1, 15))
    def power_goes_soon(self, operations: int) -> None:
        self.world.cut_power_in(operations)

    @rule(topics=st.sampled_from([[], ["any"]]))
    def topics_come_and_go(self, topics: list[str]) -> None:
        self.world.set_topics(topics)

    @rule(away=st.sampled_from([set(), {BROKER}, {OTHER}, {BROKER, OTHER}]))
    def brokers_come_and_go(self, away: set[str]) -> None:
        self.world.set_away(away)

    @rule(left=st.sampled_from([0, 100, 5_000]))
    def the_disk_fills(self, left: int) -> None:
        self.world.fill_disk(left)

    @rule(passed=st.one_of(st.integers(0, 3_000), st.integers(0, 2 * MINUTE_MS)))
    def the_log_has_no_room_for_a_while(self, passed: int) -> None:
        self.world.directory.log.disk_full = True
        self._survive(self.world.advance)
        self.world.now_ms += passed
        self.world.free_disk()
        self._survive(self.world.advance)

    @rule()
    def the_disk_has_space(self) -> None:
        self.world.free_disk()

    # -- what holds

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        scheduler.check()
        waits = sum(len(each.pending) for each in scheduler.schedules)
        assert waits == scheduler.ledger.pending

    @invariant()
    def what_came_is_as_it_was_told(self) -> None:
        if hasattr(self, "world"):
            for name, told in self.told.items():
                self._check(name, told, None)

    def _check(self, name: str, told: list[Told], until_ms: int | None) -> None:
        came = sorted(self.world.broker.came.get(name, []))
        # Where the clock went back a later plan begins before an earlier one: that ends there, too.
        later = accumulate(reversed([each.after_ms for each in told[1:]]), min, initial=1 << 62)
        ends = reversed([*later])
        for each, end_ms in zip(told, ends, strict=True):
            mine = [at_ms for at_ms in came if each.after_ms < at_ms <= end_ms]
            assert {self.world.broker.kinds[name, at_ms] for at_ms in mine} <= {each.kind}
            if each.policy is not CatchUp.ALL:
                continue
            expected = first_after(each.kind, each.after_ms)
            for at_ms in mine:
                assert at_ms == expected, f"{name}: {expected} is missing"
                expected = first_after(each.kind, at_ms)
            if until_ms is not None and each is told[-1]:
                assert expected > until_ms, f"{name}: {expected} has not come by {until_ms}"
        if until_ms is not None and told[-1].policy is CatchUp.LATEST:
            last = first_after(told[-1].kind, told[-1].after_ms)
            if last <= until_ms:
                distance_ms = KINDS[told[-1].kind][1]
                last += (until_ms - last) // distance_ms * distance_ms
                assert came[-1] >= last

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        world.set_topics(sorted(TOPICS))
        world.set_away(set())
        for short in NAMES:
            self._durably(lambda short=short: world.resume(self.name(short)))  # type: ignore[misc]
        waits = [each.due_ms for all_of in world.scheduler.schedules for each in all_of.pending]
        past_ms = max([world.now_ms, *waits])
        world.run_until(past_ms + 20_000)  # jitter, and lanes that wait to try again
        for name, told in self.told.items():
            schedule = world.scheduler.schedules.get(name)
            alive = schedule is not None and not schedule.state.paused
            self._check(name, told, past_ms if alive else None)

    def _durably(self, work: Callable[[], object]) -> None:
        self._survive(lambda: (work(), self.world.sync()))
        self._reconcile()

    def _survive(self, work: Callable[[], object]) -> None:
        try:
            work()
        except PowerCut:
            self.world.power_cut()
            self._reconcile()

    def _reconcile(self) -> None:
        """What was not durable may have been forgotten; what could not be done was not."""
        for name, told in self.told.items():
            schedule = self.world.scheduler.schedules.get(name)
            current = name in {self.name(short) for short in NAMES}
            while current and told and (schedule is None or told[-1].plan != schedule.plan):
                if schedule is None and len(told) == 1 and self.world.broker.came.get(name):
                    break
                told.pop()
        self.told = {name: told for name, told in self.told.items() if told}


SchedulesModel.TestCase.settings = settings(
    max_examples=max(40, settings.default.max_examples // 3),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedules = pytest.mark.long(SchedulesModel.TestCase)
