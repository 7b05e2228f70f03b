"""Cancels whose look-up runs while timers are flushed, loaded, evicted, parked, fired, cancelled.

Each step of a cancel and of a job is a rule of its own, so that they interleave in every order.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from duemq_server.timer_service.far.look_up import LookUp, Query
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, FIRED, Cancelling
from duemq_server.timer_service.timers.log_entries import Cancelled
from tests.property.job_steps import JobSteps
from tests.property.timer_world import SOURCE, TOPICS, World

HOUR_MS = 3_600_000
waits = st.one_of(
    st.integers(-1_000, 50),
    st.integers(5_000, 40_000),  # moves between memory and disk within a few steps
    st.integers(5_000, 40_000),
    st.integers(0, 3 * HOUR_MS),
    st.integers(0, 100 * 24 * HOUR_MS),
)
which = st.floats(0, 1, exclude_max=True)


@dataclass
class Asked:
    """A cancel on its way."""

    handles: list[Cancelled]
    cancelling: Cancelling
    query: Query | None = None
    look_up: LookUp | None = None
    ran: bool = False


class Races(JobSteps):
    """The core of a shard with two jobs on the disk at once: housekeeping's and a look-up."""

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed: int) -> None:
        self.world = World(seed)
        self.cancels: list[Asked] = []

    # -- timers

    @rule(
        due=st.lists(waits, min_size=1, max_size=8),
        body=st.integers(0, 300),
        topic=st.sampled_from(sorted(TOPICS)),
    )
    def accept(self, due: list[int], body: int, topic: str) -> None:
        self.world.broker.accept([self.world.now_ms + wait for wait in due], body, topic)
        self.world.ingest(5)

    @rule(passed=st.one_of(st.integers(0, 20), st.integers(0, 15_000), st.integers(0, 15_000)))
    def time_passes(self, passed: int) -> None:
        self.world.now_ms += passed

    @rule()
    def fire(self) -> None:
        self.world.tick()
        self.world.sync()
        self.world.send()

    @rule(topics=st.lists(st.sampled_from(sorted(TOPICS)), unique=True))
    def routes_change(self, topics: list[str]) -> None:
        self.world.set_topics(topics)

    @precondition(lambda self: self.job is None)
    @rule(passed=st.integers(0, 15_000))
    def housekeep(self, passed: int) -> None:
        self.world.now_ms += passed
        for _ in range(10):
            if not self.world.housekeep():
                return

    @precondition(lambda self: self.job is None)
    @rule()
    def evict(self) -> None:
        self.world.scheduler.tiers.evict(self.world.now_ms + 1)
        if self.world.scheduler.tiers.memtable.rows:
            self.world.run(self.world.scheduler.tiers.begin_flush(self.world.now_ms))

    @precondition(lambda self: self.job is None and not self.cancels)
    @rule()
    def restart(self) -> None:
        self.world.sync()
        self.world.checkpoint()
        self.world.kill()

    # -- cancels

    @precondition(lambda self: self.world.broker.due_ms)
    @rule(shares=st.lists(which, min_size=1, max_size=8))
    def begin_cancel(self, shares: list[float]) -> None:
        due_ms = self.world.broker.due_ms
        offsets = [int(share * len(due_ms)) for share in shares]
        handles = [Cancelled(SOURCE, offset, due_ms[offset]) for offset in offsets]
        asked = Asked(handles, Cancelling(self.world.scheduler, handles))
        self.cancels.append(asked)
        self._advance(asked)

    @precondition(lambda self: any(not asked.ran for asked in self.cancels))
    @rule()
    def look_up_step(self) -> None:
        begun = [asked.look_up for asked in self.cancels if asked.look_up and not asked.ran]
        if begun:
            begun[0].run()
            for asked in self.cancels:
                asked.ran = asked.ran or asked.look_up is begun[0]
            return
        waiting = [asked for asked in self.cancels if asked.look_up is None]
        look_up = self.world.look_up([asked.query for asked in waiting if asked.query])
        for asked in waiting:
            asked.look_up = look_up

    @precondition(lambda self: any(asked.ran for asked in self.cancels))
    @rule(which=which)
    def go_on(self, which: float) -> None:
        ready = [asked for asked in self.cancels if asked.ran]
        asked = ready[int(which * len(ready))]
        assert asked.query is not None
        assert asked.look_up is not None
        self.world.scheduler.segments.looked_up(asked.look_up)
        asked.cancelling.answered(asked.query)
        self._advance(asked)

    def _advance(self, asked: Asked) -> None:
        decided = asked.cancelling.advance(self.world.now_ms)
        asked.query, asked.look_up, asked.ran = None, None, False
        if not decided:
            asked.query = asked.cancelling.query()
            return
        self.cancels.remove(asked)
        outcomes = self.world.cancelled(asked.cancelling, asked.handles)
        assert set(outcomes) <= {CANCELLED, FIRED}

    @invariant()
    def the_ledger_balances(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while self.job is not None:
            self.job_step(False)
        while self.cancels:
            while any(not asked.ran for asked in self.cancels):
                self.look_up_step()
            self.go_on(0.0)
        self.world.drain()


TestRaces = Races.TestCase
TestRaces.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
