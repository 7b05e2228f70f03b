"""A replica's metrics: its role, its log, and, while it leads, the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from duemq.v1 import nameserver_pb2
from duemq_server.replication.running.v1 import replication_pb2 as pb

ROLES = ("joining", "learner", "follower", "preparing", "leader")


class ReplicaCollector(Collector):
    """See the module."""

    def __init__(
        self,
        status: Callable[[], pb.ReplicaStatus],
        replicas: Callable[[], Sequence[nameserver_pb2.ReplicaReport]],
    ) -> None:
        """`replicas`: of the group, by its leader; elsewhere none."""
        self._status = status
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """The figures as of now."""
        status = self._status()
        roles = GaugeMetricFamily("duemq_replica_role", "1 for the role it has", labels=("role",))
        for role in ROLES:
            roles.add_metric((role,), float(role == status.role))
        yield roles
        for name, text, value in (
            ("epoch", "Grows with each change of the leader", status.epoch),
            ("log_end", "End of the log", status.log_end),
            ("log_durable", "End of the log on the disk", status.durable),
            ("log_committed", "What is on the disks of all in sync", status.committed),
            ("log_applied", "What has taken effect here", status.applied),
        ):
            yield GaugeMetricFamily(f"duemq_replica_{name}", text, value=value)
        yield from self._of_the_group()

    def _of_the_group(self) -> Iterator[Metric]:
        in_sync = GaugeMetricFamily(
            "duemq_replica_in_sync",
            "1: what is acknowledged is on its disk",
            labels=("replica",),
        )
        lag_bytes = GaugeMetricFamily(
            "duemq_replica_lag_bytes", "Log that it lacks", labels=("replica",)
        )
        lag_s = GaugeMetricFamily(
            "duemq_replica_lag_seconds", "Since when it lacks any", labels=("replica",)
        )
        for each in self._replicas():
            in_sync.add_metric((each.name,), float(each.in_sync))
            lag_bytes.add_metric((each.name,), each.lag_bytes)
            lag_s.add_metric((each.name,), each.lag_s)
        yield from (in_sync, lag_bytes, lag_s)
