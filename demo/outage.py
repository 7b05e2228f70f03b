"""The demo's outage: two processes killed with -9, started again by the cluster's supervisor."""

from __future__ import annotations

import threading
import time

from duemq_server.demo.ledger import Outage
from duemq_server.local_cluster import ClusterFailed, EmbeddedCluster

RECOVERY_TIMEOUT_S = 30.0


class Killing:
    """Kills members once and measures until all serve again, on a thread of its own."""

    def __init__(self, cluster: EmbeddedCluster, victims: tuple[str, ...]) -> None:
        self.victims = victims
        self.outage: Outage | None = None
        self.failure: ClusterFailed | None = None
        self._cluster = cluster
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> str:
        """For the live table."""
        if self._thread is None:
            return ""
        killed = " and ".join(self.victims)
        if self.outage is None:
            return f"{killed} killed with -9"
        return f"{killed} back after {(self.outage.end_ms - self.outage.begin_ms) / 1000:.1f} s"

    def begin(self) -> None:
        """Kills; does nothing the second time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outage")
            self._thread.start()

    def join(self) -> None:
        """Waits for the end of the outage."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        begin_ms = time.time_ns() // 1_000_000
        try:
            for victim in self.victims:
                self._cluster.kill(victim)
            self._cluster.wait_ready(RECOVERY_TIMEOUT_S)
        except ClusterFailed as error:
            self.failure = error
        self.outage = Outage(begin_ms, time.time_ns() // 1_000_000)
