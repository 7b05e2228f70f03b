"""A broker as one replica of a group: what it opens, and what it is when it leads."""

from __future__ import annotations

import io
import os

from duemq.v1 import group_pb2
from duemq_server.broker.edge import (
    admin_servicer,
    broker_servicer,
    group_admin_servicer,
    message_admin_servicer,
    timer_admin_servicer,
)
from duemq_server.broker.process import Broker, Lead
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import recovery
from duemq_server.broker.store.standby import Standby
from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.state import ReplicaState
from duemq_server.serving.server import Server
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import RealDisk, short_of_space


class BrokerReplica:
    """Implements replication.running.service.Service."""

    kind = "broker"
    services = (
        broker_servicer.SERVICE,
        admin_servicer.SERVICE,
        group_pb2.DESCRIPTOR.services_by_name["GroupCoordinator"],
        group_admin_servicer.SERVICE,
        message_admin_servicer.SERVICE,
        timer_admin_servicer.SERVICE,
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._disk = RealDisk()

    def open(self) -> Standby:
        """Raises StorageError."""
        return Standby.open(
            self._settings.data_dir,
            self._disk,
            self._settings.store_settings(),
            segment_bytes=self._settings.segment_bytes,
        )

    def not_to_found(self) -> str:
        """Any broker may be new."""
        return ""

    def after_loss(self) -> str:
        """Nothing."""
        return ""

    def lead(self, state: ReplicaState, leading: Leading, server: Server) -> Broker:
        """A broker on what was followed."""
        assert isinstance(state, Standby)
        return Broker(self._settings, Lead(leading, state.promote(), server))

    def short_of_space(self) -> bool:
        """As Upkeep looks at it."""
        return short_of_space(self._disk, self._settings.data_dir, self._settings.free_bytes_min)

    def snapshot(self, older: bool) -> io.BytesIO | None:
        """The payload of the last checkpoint, which older releases know as it is."""
        path = os.path.join(self._settings.data_dir, recovery.CHECKPOINT)
        payload = checkpoint.load(path, self._disk)
        return io.BytesIO(payload) if payload is not None else None
