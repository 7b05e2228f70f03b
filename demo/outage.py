"""The demo's outage: a broker and the timer service killed with -9, and started again.

With replicas it is those that lead, and their disks go with them: they come back empty.
"""

from __future__ import annotations

import shutil
import threading
import time

from duemq_server.demo.ledger import Outage
from duemq_server.local_cluster import ClusterFailed, EmbeddedCluster

RECOVERY_TIMEOUT_S = 30.0


class Killing:
    """Kills members once and measures until all serve again, on a thread of its own."""

    def __init__(self, cluster: EmbeddedCluster, groups: tuple[str, ...]) -> None:
        self.victims: list[str] = []
        self._groups = groups
        self.outage: Outage | None = None
        self.failure: ClusterFailed | None = None
        self._cluster = cluster
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> str:
        """For the live table."""
        if self._thread is None:
            return ""
        killed = " and ".join(self.victims or self._groups)
        if self.outage is None:
            return f"{killed} killed with -9"
        return f"{killed} back after {(self.outage.end_ms - self.outage.begin_ms) / 1000:.1f} s"

    @property
    def under_way(self) -> bool:
        """Not all that was killed serves again."""
        return self._thread is not None and self.outage is None

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
            for group in self._groups:
                self._kill(self._cluster.leader(group), group)
            self._cluster.wait_ready(RECOVERY_TIMEOUT_S)
        except ClusterFailed as error:
            self.failure = error
        self.outage = Outage(begin_ms, time.time_ns() // 1_000_000)

    def _kill(self, leader: str, group: str) -> None:
        if not leader:
            raise ClusterFailed(f"nobody leads {group}, although nobody was killed yet")
        replicated = leader != group
        self.victims.append(f"{leader} with its disk" if replicated else leader)
        self._cluster.kill(leader, restart=not replicated)
        if replicated:
            shutil.rmtree(self._cluster.data_dir(leader))
            self._cluster.start_member(leader)
