"""Bulk jobs of a shard with replicas: whoever leads goes on with them, and knows their answers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duemq_server.timer_service.timers.limits import Limits
from tests.property.replicated_timer_world import ReplicatedWorld
from tests.property.test_bulk_jobs import BulkJobs


class ReplicatedBulkJobs(BulkJobs):
    """The rules of a lone shard, and what replicas do."""

    world: ReplicatedWorld

    def made_world(self, seed: int, limits: Limits) -> ReplicatedWorld:
        return ReplicatedWorld(seed, limits)

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

    @rule()
    def the_follower_saves(self) -> None:
        self._survive(self.world.standby_checkpoint)

    @rule()
    def the_follower_restarts(self) -> None:
        self._survive(self.world.standby_restarts)

    @rule()
    def the_followers_disk_is_emptied(self) -> None:
        self._survive(self.world.empty_standbys_disk)

    @precondition(lambda self: not self.world.standby_disk.off)
    @rule(operations=st.integers(1, 30))
    def cut_the_followers_power_soon(self, operations: int) -> None:
        self.world.cut_standbys_power_in(operations)


TestReplicatedBulkJobs = pytest.mark.long(ReplicatedBulkJobs.TestCase)
TestReplicatedBulkJobs.settings = settings(
    max_examples=max(30, settings.default.max_examples // 4),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
