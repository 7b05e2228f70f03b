"""Whatever happens to a timer shard, in whatever order: once, never early, cancelled for good."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duemq_server.timer_service.scheduling.keyed import search
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from tests.crash.faulty_disk import PowerCut
from tests.property.timer_world import (
    BROKER,
    LIMITS,
    OTHER,
    TIGHT,
    TOPICS,
    Listing,
    World,
    topics,
)

HOUR_MS = 3_600_000
delays = st.one_of(
    st.integers(-1_000, 50),
    st.integers(0, 12_000),
    st.integers(0, 3 * HOUR_MS),
    st.integers(0, 100 * 24 * HOUR_MS),
)
keys = st.sampled_from([f"key-{number}" for number in range(8)])
prefixes = st.sampled_from(["", "k", "key-1"])


class TimerShard(RuleBasedStateMachine):
    """Rules are what a network, a clock and a power supply do."""

    @initialize(seed=st.integers(0, 1 << 16), limits=st.sampled_from([LIMITS, TIGHT, TIGHT]))
    def start(self, seed: int, limits: Limits) -> None:
        self.world = World(seed, limits)

    @rule(
        waits=st.lists(delays, min_size=1, max_size=25),
        body=st.one_of(st.integers(0, 300), st.integers(0, 5_000)),
        topic=topics,
    )
    def accept(self, waits: list[int], body: int, topic: str) -> None:
        self.world.broker.accept([self.world.now_ms + wait for wait in waits], body, topic)

    @rule(frames=st.integers(1, 5))
    def ingest(self, frames: int) -> None:
        self._survive(lambda: self.world.ingest(frames))

    @rule(passed=st.one_of(st.integers(0, 20), st.integers(0, 15_000), st.integers(0, HOUR_MS)))
    def time_passes(self, passed: int) -> None:
        self.world.now_ms += passed

    @rule(
        count=st.integers(1, 120),
        wait=st.integers(0, 12_000),
        topic=topics,
    )
    def accept_a_herd(self, count: int, wait: int, topic: str) -> None:
        """More than a tick takes, and than memory holds, in one millisecond."""
        self.world.broker.accept([self.world.now_ms + wait] * count, 10, topic)

    @rule(passed=st.integers(0, 3_000), rounds=st.integers(1, 4))
    def the_shell_works(self, passed: int, rounds: int) -> None:
        """What goes on all the time, so that what goes wrong meets a shard at work."""
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

    @rule()
    def tick(self) -> None:
        """Ahead as the shell does, always: an earlier time means that the clock went back."""
        self._survive(lambda: self.world.tick(AHEAD_MS))

    @rule(by=st.one_of(st.integers(-10, 10), st.integers(-5 * HOUR_MS, 5 * HOUR_MS)))
    def the_clock_is_set(self, by: int) -> None:
        self.world.now_ms += by

    @rule(left=st.sampled_from([0, 100, 5_000]))
    def the_disk_fills(self, left: int) -> None:
        self.world.fill_disk(left)

    @rule(passed=st.integers(0, 3_000), rounds=st.integers(1, 4))
    def the_disk_is_full_for_a_while(self, passed: int, rounds: int) -> None:
        self.world.fill_disk(0)
        self.the_shell_works(passed, rounds)
        self.world.free_disk()

    @rule(left=st.sampled_from([0, 1_000, 4_000]), passed=st.integers(0, 3_000))
    def others_fill_the_disk_and_the_log_has_space_of_its_own(self, left: int, passed: int) -> None:
        self.world.fill_disk(left)
        self.world.directory.log.disk_full = False
        self.the_shell_works(passed, 3)

    @rule()
    def the_disk_has_room(self) -> None:
        self.world.free_disk()

    @rule(brokers=st.sets(st.sampled_from([BROKER, OTHER])))
    def brokers_leave_and_come(self, brokers: set[str]) -> None:
        self.world.set_away(brokers)

    @rule()
    def sync(self) -> None:
        self._survive(self.world.sync)

    @rule(refuse=st.sampled_from([0.0, 0.3]), drop=st.booleans())
    def send(self, refuse: float, drop: bool) -> None:
        self._survive(lambda: self.world.send(refuse_share=refuse, drop=drop))

    @precondition(lambda self: self.world.broker.due_ms)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def cancel(self, which: float) -> None:
        offset = int(which * len(self.world.broker.due_ms))
        self._survive(lambda: self.world.cancel(offset))

    @rule(blocks=st.integers(1, 5))
    def somebody_reads_blocks(self, blocks: int) -> None:
        self._survive(lambda: self.world.count_some(blocks))

    @rule()
    def blocks_were_read(self) -> None:
        self.world.join_counted()

    @rule(topic=st.one_of(st.none(), topics))
    def somebody_asks_for_a_forecast(self, topic: str | None) -> None:
        self._survive(lambda: self.world.check_forecast(topic))

    @precondition(lambda self: self.world.broker.due_ms)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def somebody_looks_for_a_timer(self, which: float) -> None:
        offset = int(which * len(self.world.broker.due_ms))
        self._survive(lambda: self.world.find(offset))

    @precondition(lambda self: len(self.world.listings) < 3)
    @rule(
        topic=topics,
        limit=st.sampled_from([1, 7, 1_000]),
        every=st.sampled_from([1, 3]),
    )
    def somebody_begins_a_list(self, topic: str, limit: int, every: int) -> None:
        self._survive(lambda: self.world.listings.append(Listing(self.world, topic, limit, every)))

    @precondition(lambda self: self.world.listings)
    @rule(pages=st.integers(0, 5), which=st.integers(0, 2))
    def somebody_reads_on(self, pages: int, which: int) -> None:
        """No page: one is begun, and read when other things have happened."""
        listing = self.world.listings[which % len(self.world.listings)]
        if not pages:
            listing.open()
        for _ in range(pages):
            if not listing.over:
                self._survive(listing.read)
        if listing.over:
            self.world.listings.remove(listing)

    @rule(
        keys=st.lists(keys, min_size=1, max_size=6, unique=True),
        waits=st.lists(delays, min_size=6, max_size=6),
        body=st.one_of(st.integers(0, 300), st.integers(0, 2_000)),
        topic=topics,
        if_absent=st.booleans(),
    )
    def schedule(
        self, keys: list[str], waits: list[int], body: int, topic: str, if_absent: bool
    ) -> None:
        model = self.world.keyed
        self._survive(
            lambda: model.schedule(keys, waits[: len(keys)], body, topic, if_absent=if_absent)
        )

    @rule(keys=st.lists(keys, min_size=1, max_size=4, unique=True))
    def cancel_keys(self, keys: list[str]) -> None:
        asked = [TimerKey(topic, key) for key in keys for topic in sorted(TOPICS)]
        self._survive(lambda: self.world.keyed.cancel(asked))

    @rule(
        keys=st.lists(keys, max_size=3, unique=True),
        messages=st.lists(st.floats(0, 1, exclude_max=True), max_size=3),
        waits=st.lists(delays, min_size=6, max_size=6),
        fire=st.booleans(),
    )
    def reschedule(
        self, keys: list[str], messages: list[float], waits: list[int], fire: bool
    ) -> None:
        model = self.world.keyed
        known = [*range(len(self.world.broker.due_ms)), *model.handles]
        ids = {known[int(each * len(known))] for each in messages if known}
        which = [*(TimerKey("any", key) for key in keys), *sorted(ids)]
        waits = [0] * len(which) if fire else waits[: len(which)]
        self._survive(lambda: model.reschedule(which, waits, fire=fire))

    @rule(topic=topics, prefix=prefixes)
    def hold(self, topic: str, prefix: str) -> None:
        self._survive(lambda: self.world.holds.hold(topic, prefix))

    @rule(topic=topics, prefix=prefixes, older_ms=st.sampled_from([0, 500]))
    def resume_without(self, topic: str, prefix: str, older_ms: int) -> None:
        self._survive(lambda: self.world.holds.resume_without(topic, prefix, older_ms))

    @rule(topic=topics, prefix=prefixes)
    def resume(self, topic: str, prefix: str) -> None:
        self._survive(lambda: self.world.holds.resume(topic, prefix))

    @precondition(lambda self: self.world.keyed.begun)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def a_look_up_goes_on(self, which: float) -> None:
        self._survive(lambda: self.world.keyed.finish(which))

    @precondition(lambda self: self.world.keyed.done)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def a_request_comes_again(self, which: float) -> None:
        self._survive(lambda: self.world.keyed.repeat(which))

    @precondition(lambda self: self.world.keyed.handles)
    @rule(which=st.floats(0, 1, exclude_max=True))
    def cancel_by_the_newest_handle(self, which: float) -> None:
        messages = list(self.world.keyed.handles)
        self._survive(lambda: self.world.cancel(messages[int(which * len(messages))]))

    @rule()
    def housekeep(self) -> None:
        self._survive(self.world.housekeep)

    @rule()
    def flush(self) -> None:
        self._survive(self.world.flush)

    @rule()
    def checkpoint(self) -> None:
        self._survive(self.world.checkpoint)

    @rule(served=st.lists(topics, unique=True))
    def routes_change(self, served: list[str]) -> None:
        self.world.set_topics(served)

    @rule()
    def kill(self) -> None:
        self.world.kill()

    @rule()
    def kill_on_a_full_disk(self) -> None:
        self.world.kill_on_a_full_disk()

    @rule()
    def power_cut(self) -> None:
        self.world.power_cut()

    @rule(operations=st.integers(1, 30))
    def cut_power_soon(self, operations: int) -> None:
        self.world.cut_power_in(operations)

    def _survive(self, work: object) -> None:
        assert callable(work)
        try:
            work()
        except PowerCut:
            self.world.power_cut()

    @invariant()
    def the_ledger_balances(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()
            for listing in self.world.listings:
                while not listing.over:
                    listing.read()
            self.world.drain()


class CollidingTimerShard(TimerShard):
    """The same, and every key's hash is one of two."""

    @initialize(seed=st.integers(0, 1 << 16), limits=st.sampled_from([LIMITS, TIGHT]))
    def start(self, seed: int, limits: Limits) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(search, "hash_of", lambda key: 1 + len(key.topic) % 2)
        super().start(seed, limits)
        self.world.keyed.hashes_collide = True

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


TestTimerShard = TimerShard.TestCase
TestTimerShard.settings = settings(
    max_examples=max(60, settings.default.max_examples // 2),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestCollidingTimerShard = CollidingTimerShard.TestCase
TestCollidingTimerShard.settings = settings(TestTimerShard.settings, max_examples=30)
