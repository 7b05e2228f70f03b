"""An embedded cluster: DueMQ's services as supervised child processes.

`EmbeddedCluster` runs nameservers, brokers and a timer service on loopback, with all data in one
folder.  `duemq up`, the demo, the benchmarks and the cluster tests are built on it.  It needs the
`duemq-server` distribution.

Modules: `cluster` (its life, what callers see), `plan` (members, groups of replicas, command
lines), `readiness` (what is missing), `supervisor` (owns the processes), `child` (what each runs
first), `restarts` (when a dead one is started again; pure), `layout` (the data folder).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duemq_server.local_cluster.cluster import EmbeddedCluster
    from duemq_server.local_cluster.supervisor import CalledOff, ClusterEvent, ClusterFailed

__all__ = ["CalledOff", "ClusterEvent", "ClusterFailed", "EmbeddedCluster"]


def __getattr__(name: str) -> object:
    # Lazily: every child imports this package on its way to `child`, and shall stay small.
    if name in __all__:
        from duemq_server.local_cluster import cluster

        return getattr(cluster, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
