"""Whatever happens to a timer shard with replicas: once, never early, cancelled for good."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from duemq_server.timer_service.timers.limits import Limits
from tests.property.replicated_timer_world import ReplicatedWorld
from tests.property.test_timer_shard import TimerShard
from tests.property.timer_world import LIMITS, TIGHT

SMALL = replace(
    TIGHT, log_segment_bytes=4 << 10, checkpoint_log_bytes=3_000, uncommitted_max=16 << 10
)
HELD = replace(SMALL, log_held_max=6_000, log_kept_bytes=8 << 10, log_segment_bytes=2 << 10)


class ReplicatedTimerShard(TimerShard):
    """The rules of a lone shard, and what replicas do."""

    world: ReplicatedWorld

    @initialize(seed=st.integers(0, 1 << 16), limits=st.sampled_from([LIMITS, SMALL, HELD]))
    def start(self, seed: int, limits: Limits) -> None:
        self.world = ReplicatedWorld(seed, limits)

    @rule()
    def the_leader_alone_syncs(self) -> None:
        self._survive(self.world.sync_here)

    @rule(bytes_max=st.integers(1, 4_000))
    def some_bytes_are_shipped(self, bytes_max: int) -> None:
        self._survive(lambda: self.world.ship(bytes_max))

    @rule()
    def the_follower_answers(self) -> None:
        self._survive(self.world.hear)

    @rule(share=st.floats(0, 1))
    def the_follower_looks(self, share: float) -> None:
        self._survive(lambda: self.world.standby_pass(share))

    @rule(left=st.sampled_from([0, 500, 2_000, 6_000]))
    def the_follower_looks_and_has_little_space(self, left: int) -> None:
        self._survive(lambda: self.world.standby_pass_with_little_space(left))

    @rule()
    def the_follower_saves(self) -> None:
        self._survive(self.world.standby_checkpoint)

    @rule()
    def the_follower_restarts(self) -> None:
        self._survive(self.world.standby_restarts)

    @rule()
    def brokers_forget_what_they_stored_last(self) -> None:
        """The lanes begin a new epoch."""
        self._survive(self.world.broker_forgets)

    @rule()
    def the_followers_disk_is_emptied(self) -> None:
        self._survive(self.world.empty_standbys_disk)

    @precondition(lambda self: not self.world.standby_disk.off)
    @rule(operations=st.integers(1, 30))
    def cut_the_followers_power_soon(self, operations: int) -> None:
        self.world.cut_standbys_power_in(operations)


TestReplicatedTimerShard = pytest.mark.long(ReplicatedTimerShard.TestCase)
TestReplicatedTimerShard.settings = settings(
    max_examples=max(60, settings.default.max_examples // 2),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
