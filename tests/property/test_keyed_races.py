"""Requests about timer keys whose look-up runs while timers are flushed, loaded, evicted, fired.

Few keys, most timers around the edge of the near window, and each piece of a request and of a job a
rule of its own: so they interleave in every order.  The answers are checked by keyed_model.py.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from duemq_server.timer_service.scheduling.keyed import search
from duemq_server.timer_service.timers.keyed import TimerKey
from tests.property.job_steps import JobSteps
from tests.property.timer_world import TOPICS, World

NAMES = ("a", "b", "c")
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
PLACES = ("near", "memtable", "block", "broker")
topics = st.sampled_from(sorted(TOPICS))
which = st.floats(0, 1, exclude_max=True)
waits = st.lists(
    st.one_of(st.just(20_000), st.integers(5_000, 40_000), st.integers(0, 100)),
    min_size=6,
    max_size=6,
)


class KeyedRaces(JobSteps):
    """A shard with two jobs on the disk at once: housekeeping's and a look-up of keys."""

    @initialize(seed=st.integers(0, 1 << 16), collide=st.booleans())
    def start(self, seed: int, collide: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if collide:
            self.patch.setattr(search, "hash_of", lambda _: 1)
        self.world = World(seed)
        self.keyed = self.world.keyed
        self.keyed.hashes_collide = collide

    # -- requests

    @rule(names=names, waits=waits, topic=topics, if_absent=st.booleans())
    def schedule(self, names: list[str], waits: list[int], topic: str, if_absent: bool) -> None:
        self.keyed.schedule(names, waits[: len(names)], 10, topic, if_absent=if_absent)

    @precondition(lambda self: self.job is None and not self.keyed.begun)
    @rule(topic=topics)
    def a_far_timer_each(self, topic: str) -> None:
        """In blocks, so that whatever is asked next needs a look-up; one stays there."""
        for name, wait in zip(NAMES, (20_000, 40_000, 3_600_000), strict=True):
            self.keyed.schedule([name], [wait], 10, topic, if_absent=True)
            self.keyed.finish_all()
            self.flush()

    @precondition(lambda self: self.job is None and not self.keyed.begun)
    @rule(
        kind=st.sampled_from(["schedule", "absent", "cancel", "reschedule", "handle"]),
        gaps=st.lists(st.sampled_from(["", *PLACES, "cancel"]), min_size=3, max_size=3),
        readable=st.sampled_from([True, True, False]),
        crash=st.booleans(),
        topic=topics,
        wait=waits,
    )
    def a_request_in_pieces(
        self, kind: str, gaps: list[str], readable: bool, crash: bool, topic: str, wait: list[int]
    ) -> None:
        """What the other rules do by chance, often: something between each two of its pieces."""
        self.a_far_timer_each(topic)
        if crash:  # filters are not known
            self.crash(checkpoint=True, sync=True, power=False)
        key = TimerKey(topic, NAMES[0])
        message = self.keyed.waiting(key)
        if kind in ("schedule", "absent"):
            self.keyed.schedule(NAMES[:1], wait[:1], 10, topic, if_absent=kind == "absent")
        elif kind == "cancel":
            self.keyed.cancel([key])
        elif kind == "reschedule":
            self.keyed.reschedule([key], wait[:1])
        elif message is not None:
            self.keyed.reschedule([message], wait[:1])
        for gap in gaps:
            if gap == "cancel" and message is not None:
                self.world.cancel(message)
            elif gap in PLACES:
                self.far_timers_move(gap)
            if any(each.ran for each in self.keyed.begun):
                self.keyed.go_on(0)
            elif self.keyed.begun:
                self.keyed.look_up_step(readable=readable)

    @rule(names=names, topic=topics)
    def cancel(self, names: list[str], topic: str) -> None:
        self.keyed.cancel([TimerKey(topic, name) for name in names])

    @rule(names=names, topic=topics, wait=waits)
    def reschedule(self, names: list[str], topic: str, wait: list[int]) -> None:
        self.keyed.reschedule([TimerKey(topic, name) for name in names], wait[: len(names)])

    @precondition(lambda self: self.keyed.handles)
    @rule(shares=st.lists(which, min_size=1, max_size=3), waits=waits)
    def reschedule_by_handle(self, shares: list[float], waits: list[int]) -> None:
        messages = list(self.keyed.handles)
        chosen = sorted({messages[int(share * len(messages))] for share in shares})
        self.keyed.reschedule(chosen, waits[: len(chosen)])

    @precondition(lambda self: self.keyed.handles)
    @rule(share=which)
    def cancel_by_handle(self, share: float) -> None:
        messages = list(self.keyed.handles)
        self.world.cancel(messages[int(share * len(messages))])

    @precondition(lambda self: any(not each.ran for each in self.keyed.begun))
    @rule(readable=st.sampled_from([True, True, True, False]))
    def look_up_step(self, readable: bool) -> None:
        self.keyed.look_up_step(readable=readable)

    @precondition(lambda self: any(each.ran for each in self.keyed.begun))
    @rule(share=which)
    def go_on(self, share: float) -> None:
        self.keyed.go_on(share)

    @precondition(lambda self: self.keyed.done)
    @rule(share=which)
    def a_request_comes_again(self, share: float) -> None:
        self.keyed.repeat(share)

    # -- what moves timers

    @precondition(lambda self: self.job is None)
    @rule()
    def flush(self) -> None:
        if self.world.scheduler.tiers.memtable.rows:
            self.world.run(self.world.scheduler.tiers.begin_flush(self.world.now_ms))

    @precondition(lambda self: self.job is None)
    @rule(passed=st.sampled_from([0, 5_000, 15_000]))
    def housekeep(self, passed: int) -> None:
        """What becomes near is loaded."""
        self.world.now_ms += passed
        for _ in range(10):
            if not self.world.housekeep():
                return

    @precondition(lambda self: self.job is None)
    @rule(flush=st.booleans())
    def evict(self, flush: bool) -> None:
        self.world.scheduler.tiers.evict(self.world.now_ms + 1)
        if flush:
            self.flush()

    @precondition(lambda self: self.job is None)
    @rule(to=st.sampled_from(PLACES))
    def far_timers_move(self, to: str) -> None:
        """All the way, between two pieces of a request."""
        self.housekeep(15_000)
        if to == "broker":
            self.housekeep(15_000)
            for _ in range(3):
                self.fire()
        elif to != "near":
            self.evict(to == "block")

    @rule()
    def fire(self) -> None:
        self.world.tick()
        self.world.sync()
        self.world.send()

    # -- what goes wrong

    @rule(checkpoint=st.booleans(), sync=st.booleans(), power=st.booleans())
    def crash(self, checkpoint: bool, sync: bool, power: bool) -> None:
        """In the middle of whatever was under way."""
        self.job = None
        if sync or checkpoint:
            self.world.sync()
        if checkpoint and not self.world.scheduler.tiers.flushing:
            self.world.checkpoint()
        (self.world.power_cut if power else self.world.kill)()

    @invariant()
    def the_ledger_balances(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            while self.job is not None:
                self.job_step(False)
            self.world.drain()
        finally:
            self.patch.undo()


TestKeyedRaces = KeyedRaces.TestCase
TestKeyedRaces.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
