"""Jobs on what is pending, while timers come, move and fire, and the shard dies: each timer that
was pending when a job was accepted is touched once, or fires; no other one is."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.scheduling.bulk import walk as walking
from duemq_server.timer_service.scheduling.bulk.counting import Counting
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.bulk.matching import Reading
from duemq_server.timer_service.scheduling.bulk.walk import Walk, accept
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from tests.crash.faulty_disk import PowerCut
from tests.property.timer_world import (
    BROKER,
    LIMITS,
    OTHER,
    TIGHT,
    TOPICS,
    Pending,
    World,
    topics,
)

HOUR_MS = 3_600_000
NO_END_MS = 1 << 60
WAITS = [0, 5_000, 9_000, 20_000, HOUR_MS, 2 * HOUR_MS, 40 * 24 * HOUR_MS] * 4
delays = st.one_of(
    st.integers(-1_000, 50),
    st.integers(0, 12_000),
    st.integers(0, 3 * HOUR_MS),
    st.integers(0, 100 * 24 * HOUR_MS),
)
shifts = st.one_of(
    st.none(),
    st.integers(-12_000, 12_000),
    st.integers(-50 * 24 * HOUR_MS, 50 * 24 * HOUR_MS),
)


class Wish(NamedTuple):
    """What a job is about, and which timers were pending when it was accepted."""

    which: Which
    wanted: frozenset[Pending]


class BulkJobs(RuleBasedStateMachine):
    """Rules are what a shard's shell does, in any order."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        limits=st.sampled_from([LIMITS, TIGHT]),
        at_once=st.sampled_from([1, 4, 1_000]),
    )
    def start(self, seed: int, limits: Limits, at_once: int) -> None:
        self.world = self.made_world(seed, limits)
        self.at_once = at_once
        self.over_at: dict[bytes, int] = {}
        self.told: dict[bytes, int] = {}
        self.number = 0
        self.wishes: dict[bytes, Wish] = {}
        self.walk: Walk | None = None
        for topic in sorted(TOPICS):
            self.world.broker.accept([self.world.now_ms + wait for wait in WAITS], 10, topic)
        self.world.ingest(10)
        self.world.housekeep()
        self.reading: Reading | None = None

    def made_world(self, seed: int, limits: Limits) -> World:
        """The shard, and what is around it."""
        return World(seed, limits)

    @rule(
        waits=st.lists(delays, min_size=1, max_size=25),
        body=st.integers(0, 300),
        topic=topics,
    )
    def accept(self, waits: list[int], body: int, topic: str) -> None:
        self.world.broker.accept([self.world.now_ms + wait for wait in waits], body, topic)
        self._survive(lambda: self.world.ingest(10))

    @precondition(lambda self: self.walk is not None)
    @rule(waits=st.lists(delays, min_size=1, max_size=10))
    def more_come_of_the_job_s_topic(self, waits: list[int]) -> None:
        job = self.world.scheduler.bulk.open
        assert job is not None
        self.accept(waits, 10, job.which.topic)

    @rule(passed=st.integers(0, 3_000), rounds=st.integers(1, 4))
    def the_shell_works(self, passed: int, rounds: int) -> None:
        for _ in range(rounds):
            self.world.now_ms += passed
            for work in (
                lambda: self.world.ingest(3),
                lambda: self.world.tick(AHEAD_MS),
                self.world.housekeep,
                self.world.sync,
                self.world.send,
            ):
                self._survive(work)

    @rule(passed=st.one_of(st.integers(0, 15_000), st.integers(0, HOUR_MS)))
    def time_passes(self, passed: int) -> None:
        self.world.now_ms += passed

    @rule(brokers=st.sets(st.sampled_from([BROKER, OTHER])))
    def brokers_leave_and_come(self, brokers: set[str]) -> None:
        self.world.set_away(brokers)

    @rule(left=st.sampled_from([0, 5_000]), passed=st.integers(0, 3_000))
    def the_disk_is_full_for_a_while(self, left: int, passed: int) -> None:
        self.world.fill_disk(left)
        self.the_shell_works(passed, 1)
        if self.walk is not None:
            self.steps(3)
        self.world.free_disk()

    @rule()
    def sync(self) -> None:
        self._survive(self.world.sync)

    @precondition(lambda self: self.walk is None and self.world.scheduler.bulk.behind is None)
    @rule(
        topic=topics,
        since=st.sampled_from([None, 0, 5_000, HOUR_MS]),
        until=st.sampled_from([None, 1, 20_000, 30 * 24 * HOUR_MS]),
        by_ms=shifts,
        moves=st.booleans(),
    )
    def a_job_begins(
        self, topic: str, since: int | None, until: int | None, by_ms: int | None, moves: bool
    ) -> None:
        now_ms = self.world.now_ms
        from_ms = 0 if since is None else now_ms + since
        to_ms = NO_END_MS if until is None else now_ms + until
        names = sorted(TOPICS)
        other = names[(names.index(topic) + 1) % len(names)]
        to_topic = other if moves and by_ms is None else ""
        which = Which(topic, "", from_ms, to_ms, by_ms, to_topic)
        self._survive(lambda: self._begin(which))

    @precondition(lambda self: self._may_be_passed())
    @rule(topic=topics)
    def a_cancel_goes_first(self, topic: str) -> None:
        job, which = self.world.scheduler.bulk.open, Which(topic, "", 0, NO_END_MS, None)
        assert job is not None
        if which.may_pass(job.which):
            self._survive(lambda: self._begin(which))

    def _may_be_passed(self) -> bool:
        jobs = self.world.scheduler.bulk
        return jobs.open is not None and jobs.open.which.brings and jobs.behind is None

    def _begin(self, which: Which) -> None:
        wanted = frozenset(
            each
            for each in self.world.pending()
            if each.topic == which.topic and which.from_ms <= each.due_ms < which.to_ms
        )
        assert self._counted(which) == len(wanted)
        self.number += 1
        job_id = self.number.to_bytes(16, "big")
        try:
            job = accept(self.world.scheduler, job_id, which, self.world.now_ms)
        except (LogFull, DiskFull):
            return
        self.wishes[job_id] = Wish(which, wanted)
        if which.to_topic:
            goes = self.world.broker.targets
            for each in self.world.listed(which.topic):
                goes[each.made] |= {(which.to_topic, queue) for _, queue in goes[each.made]}
        self.walk, self.reading = Walk(self.world.scheduler, job), None

    def _counted(self, which: Which) -> int:
        counting = Counting(self.world.scheduler, which)
        while (reading := counting.reading()) is not None:
            reading.run()
            for _ in counting.read(reading):
                pass
        return counting.count

    @precondition(lambda self: self.walk is not None or self.world.scheduler.bulk.behind)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._survive(self._step)

    def _step(self) -> None:
        """Reads, or does a slice; what is read may be old by the time that it counts."""
        scheduler, walk = self.world.scheduler, self.walk
        if walk is None:
            self._go_on()
            return
        if self.reading is None:
            self.reading = walk.reading()
            if self.reading is None:
                self._slice(walk)
                return
            with scheduler.segments.pinned(self.reading.files()):
                self.reading.run()
            return
        reading, self.reading = self.reading, None
        walk.read(reading)

    def _go_on(self) -> None:
        """The job that was passed is open again."""
        jobs = self.world.scheduler.bulk
        if jobs.behind is None:
            return
        with suppress(LogFull, DiskFull):
            walking.go_on(self.world.scheduler, self.world.now_ms)
            assert jobs.open is not None
            self.walk = Walk(self.world.scheduler, jobs.open)

    def _slice(self, walk: Walk) -> None:
        job = self.world.scheduler.bulk.open
        assert job is not None
        wish, done, before = self.wishes[job.id], job.count, set(self.world.pending())
        now_ms = self.world.now_ms
        patched = walking.CANCELLED_AT_ONCE, walking.SHIFTED_AT_ONCE
        walking.CANCELLED_AT_ONCE = walking.SHIFTED_AT_ONCE = self.at_once
        try:
            going = walk.step(now_ms)
        except (LogFull, DiskFull):
            assert set(self.world.pending()) == before
            return
        finally:
            walking.CANCELLED_AT_ONCE, walking.SHIFTED_AT_ONCE = patched
        after = set(self.world.pending())
        gone, came = before - after, after - before
        assert gone <= wish.wanted
        assert job.count == done + len(gone)
        assert sorted(each.due_ms for each in came) == sorted(_dues(wish.which, gone, now_ms))
        assert {each.topic for each in came} <= {wish.which.to_topic or wish.which.topic}
        if not going:
            self.walk = None
            assert not after & wish.wanted
            assert job.over_ms
        self._learn_due_times()

    @rule()
    def killed(self) -> None:
        self.world.kill()
        self._restarted()

    @rule()
    def power_cut(self) -> None:
        self.world.power_cut()
        self._restarted()

    @rule(operations=st.integers(1, 30))
    def cut_power_soon(self, operations: int) -> None:
        self.world.cut_power_in(operations)

    def _survive(self, work: object) -> None:
        assert callable(work)
        try:
            work()
        except PowerCut:
            self.world.power_cut()
            self._restarted()

    def _restarted(self) -> None:
        """An open job goes on; what was not durable never was, and what was told stays."""
        jobs = self.world.scheduler.bulk
        self.over_at = {}
        for job_id, count in self.told.items():
            job = jobs.find(job_id)
            assert job is not None
            assert (bool(job.over_ms), job.count) == (True, count)
        self.world.broker.forget_moves_from(self.world.next_offset())
        self.reading = None
        self.walk = None if jobs.open is None else Walk(self.world.scheduler, jobs.open)
        self.wishes = {each: wish for each, wish in self.wishes.items() if jobs.find(each)}
        for job_id, wish in self.wishes.items():
            job = jobs.find(job_id)
            assert job is not None
            assert job.which == wish.which
            assert not job.over_ms or not set(self.world.pending()) & wish.wanted
        self._learn_due_times()

    def _learn_due_times(self) -> None:
        """Of what is pending: a delivery must be as it was listed last."""
        for topic in TOPICS:
            for each in self.world.listed(topic):
                self.world.broker.moved[each.made] = each.position.due_ms

    @invariant()
    def what_is_committed_may_be_told(self) -> None:
        if not hasattr(self, "world"):
            return
        for job_id in self.wishes.keys() - self.told.keys():
            job = self.world.scheduler.bulk.find(job_id)
            assert job is not None
            if job.over_ms:
                end = self.over_at.setdefault(job_id, self.world.directory.log.end_position)
                if self.world.committed >= end:
                    self.told[job_id] = job.count

    @invariant()
    def the_ledger_balances(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        scheduler.check()
        counts = {True: 0, False: 0}
        for job_id in self.wishes:
            job = scheduler.bulk.find(job_id)
            assert job is not None
            assert job.count <= len(self.wishes[job_id].wanted)
            counts[not job.which.brings] += job.count
        assert scheduler.ledger.cancelled == counts[True]
        assert scheduler.ledger.replaced == counts[False]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.heal()
        while self.walk is not None or self.world.scheduler.bulk.behind is not None:
            self._step()
            self.world.sync()  # a log of which too much is not committed takes nothing
        self.world.keyed.moved = self.world.scheduler.ledger.replaced
        self.world.drain()


def _dues(which: Which, gone: set[Pending], now_ms: int) -> list[int]:
    """Of what comes in place of them."""
    if which.to_topic:
        return [each.due_ms for each in gone]
    return [] if which.by_ms is None else [max(each.due_ms + which.by_ms, now_ms) for each in gone]


TestBulkJobs = BulkJobs.TestCase
TestBulkJobs.settings = settings(
    max_examples=max(40, settings.default.max_examples // 3),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
