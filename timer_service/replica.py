"""A timer shard as one replica of a group: what it opens, and what it is when it leads."""

from __future__ import annotations

import dataclasses

from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.state import ReplicaState
from duemq_server.serving.clock import now_ms
from duemq_server.serving.server import Server
from duemq_server.storage.disk import RealDisk, short_of_space
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.disk.data_directory import checkpoint_path
from duemq_server.timer_service.disk.snapshots import snapshot
from duemq_server.timer_service.disk.snapshots.snapshot import Leaving
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.edge import (
    holds_servicer,
    inspector,
    schedules_servicer,
    servicer,
)
from duemq_server.timer_service.process import Lead, TimerService
from duemq_server.timer_service.settings import Settings

LOG_KEPT_BYTES = 256 << 20
"""Of the log before a checkpoint: what a replica may miss without a snapshot."""


class TimerReplica:
    """Implements replication.running.service.Service."""

    kind = "timer"
    services = (
        servicer.SERVICE,
        inspector.SERVICE,
        schedules_servicer.SERVICE,
        holds_servicer.SERVICE,
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._disk = RealDisk()

    def open(self) -> Standby:
        """Raises InvalidArgument, Corrupt, StorageError."""
        settings = self._settings
        limits = dataclasses.replace(settings.limits(), log_kept_bytes=LOG_KEPT_BYTES)
        # A lost disk is a new one, also of a shard that leaves: the group has its timers.
        is_new = not self._disk.exists(checkpoint_path(settings.data_dir))
        of = settings.shard, settings.shards
        place.check(settings.data_dir, self._disk, *of, may_leave=is_new)
        return Standby.open(settings.data_dir, self._disk, limits, clock=now_ms)

    def not_to_found(self) -> str:
        """A shard that leaves has timers, so it has a group."""
        settings = self._settings
        return place.not_new(settings.shard, settings.shards, f"a new group, {settings.name}")

    def after_loss(self) -> str:
        """To brokers it is another service now."""
        return (
            "its queues are the lost one's until `duemq timer release"
            f" {self._settings.shard} --accept-loss`, once that one has been gone for a minute:"
            " it fires nothing before"
        )

    def lead(self, state: ReplicaState, leading: Leading, server: Server) -> TimerService:
        """A shard on what was followed."""
        assert isinstance(state, Standby)
        return TimerService(self._settings, Lead(leading, state.promote, server))

    def short_of_space(self) -> bool:
        """As Housekeeper looks at it."""
        return short_of_space(self._disk, self._settings.data_dir, self._settings.free_bytes_min)

    def snapshot(self, older: bool) -> Leaving | None:
        """Of the last checkpoint; see snapshot.py."""
        version = snapshot.VERSION_1 if older else snapshot.VERSION
        return snapshot.take(self._settings.data_dir, self._disk, version)
