"""Topics come and go, and numbers of targets are used again: each message goes where it shall."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.far import numbering
from duemq_server.timer_service.far.look_up import Query
from duemq_server.timer_service.scheduling import topic_counts
from duemq_server.timer_service.scheduling.cancelling import Cancelling
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.property.test_bulk_jobs import BulkJobs
from tests.property.test_timer_shard import TimerShard, delays
from tests.property.timer_world import LIMITS, TIGHT, TOPICS, World, topics

MORE = 10  # topics
bounds = st.tuples(
    st.sampled_from([2, 50]), st.integers(0, 1), st.sampled_from([4_096, 4_096, 4_096, 3])
)
seeds = st.integers(0, 1 << 16)
limits_of = st.sampled_from([LIMITS, TIGHT])


class Asked(NamedTuple):
    """A cancel whose blocks were read, and that is not decided yet."""

    life: int
    cancelling: Cancelling
    query: Query
    handles: list[Cancelled]


class TopicsComeAndGo(RuleBasedStateMachine):
    """What makes numbers of targets be given up, often."""

    world: World
    cancels = True  # by handle

    def set_bounds(self, looked_at: int, kept: int, most: int) -> None:
        """Of targets looked at in one go, topics kept, and topics counted one by one."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(numbering, "LOOKED_AT_MIN", looked_at)
        self.patch.setattr(topic_counts, "KEPT_MAX", kept)
        self.patch.setattr(topic_counts, "SHOWN_MAX", 0)
        self.patch.setattr(topic_counts, "TOPICS_MAX", most)
        for number in range(MORE):
            self.patch.setitem(TOPICS, f"t{number}", number % 3 - 1)
        self.asked: list[Asked] = []

    _survive: Any  # of the machine that this is mixed into

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    @rule(served=st.lists(topics, max_size=5, unique=True))
    def only_few_are_served(self, served: list[str]) -> None:
        self.world.set_topics(served)

    @rule(rounds=st.integers(1, 5))
    def forget_gone(self, rounds: int) -> None:
        with suppress(LogFull, DiskFull):
            for _ in range(rounds):
                self.world.scheduler.forget_gone()

    @rule(
        names=st.lists(topics, min_size=1, max_size=4),
        waits=st.lists(st.integers(-100, 30), min_size=1, max_size=3),
        cancelled=st.integers(0, 2),
        far=st.one_of(st.just([]), st.lists(delays, max_size=2)),
    )
    def topics_come_and_go(
        self, names: list[str], waits: list[int], cancelled: int, far: list[int]
    ) -> None:
        self.world.set_away(set())
        for topic in names:
            self._comes_and_goes(topic, waits, cancelled, far)

    def _comes_and_goes(self, topic: str, waits: list[int], cancelled: int, far: list[int]) -> None:
        world = self.world
        world.set_topics([topic])
        world.broker.accept([world.now_ms + wait for wait in (*waits, *far)], 10, topic)
        last = len(world.broker.due_ms)
        first = max(0, last - cancelled) if self.cancels else last
        self._survive(lambda: world.ingest(100))
        for message in range(first, last):
            self._survive(lambda message=message: world.cancel(message))
        for _ in range(3):
            world.now_ms += 20
            self._survive(lambda: world.tick(AHEAD_MS))
            self._survive(world.sync)
            self._survive(world.send)
        world.set_topics([])
        self.forget_gone(5)

    @rule()
    def all_are_listed(self) -> None:
        self._survive(self.world.check_listed)

    @precondition(lambda self: self.world.broker.due_ms)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def a_cancel_begins(self, which: float) -> None:
        """Of one: what memory has of several is gone before anybody is told."""
        message = int(which * len(self.world.broker.due_ms))
        self._survive(lambda: self._ask([self.world.keyed.handle(message)]))

    def _ask(self, handles: list[Cancelled]) -> None:
        cancelling = Cancelling(self.world.scheduler, handles)
        self._go_on_with(cancelling, handles)

    def _go_on_with(self, cancelling: Cancelling, handles: list[Cancelled]) -> None:
        world = self.world
        with suppress(LogFull, DiskFull):
            if cancelling.advance(world.now_ms + AHEAD_MS):
                world.cancelled(cancelling, handles)
                return
            query = cancelling.query()
            look_up = world.look_up([query])
            look_up.run()
            world.scheduler.segments.looked_up(look_up)
            self.asked.append(Asked(world.restarts, cancelling, query, handles))

    @precondition(lambda self: self.asked)
    @rule(at_once=st.booleans())
    def a_cancel_goes_on(self, at_once: bool) -> None:
        life, cancelling, query, handles = self.asked.pop(0)
        if life == self.world.restarts:
            cancelling.answered(query)
            if not at_once:
                self.forget_gone(3)
            self._survive(lambda: self._go_on_with(cancelling, handles))


class ShardOfTopicsThatGo(TopicsComeAndGo, TimerShard):
    """Whatever happens to timers one by one."""

    @initialize(seed=seeds, limits=limits_of, bounds=bounds)
    def start(self, seed: int, limits: Limits, bounds: tuple[int, int, int]) -> None:
        self.set_bounds(*bounds)
        TimerShard.start(self, seed, limits)


class JobsOnTopicsThatGo(TopicsComeAndGo, BulkJobs):
    """And in bulk: cancelled, shifted, moved to another topic."""

    @initialize(seed=seeds, limits=limits_of, at_once=st.sampled_from([1, 4, 1_000]), bounds=bounds)
    def start(self, seed: int, limits: Limits, at_once: int, bounds: tuple[int, int, int]) -> None:
        BulkJobs.start(self, seed, limits, at_once)  # only topics of before have timers for long
        self.set_bounds(*bounds)

    cancels = False  # handles of what was moved are not known here
    a_cancel_begins = None


common = settings(
    max_examples=max(40, settings.default.max_examples // 4),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestShardOfTopicsThatGo = ShardOfTopicsThatGo.TestCase
TestShardOfTopicsThatGo.settings = common
TestJobsOnTopicsThatGo = JobsOnTopicsThatGo.TestCase
TestJobsOnTopicsThatGo.settings = common
