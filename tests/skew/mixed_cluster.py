"""A cluster whose processes are of two releases."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.local_cluster.supervisor import ChildPlace, ClusterEvent
from tests.skew.releases import Release


class MixedCluster(EmbeddedCluster):
    """Members start in the release that they were given last."""

    def __init__(self, directory: Path, first: Release, **options: Any) -> None:
        super().__init__(directory, on_event=self._note, **options)
        self._releases: dict[str, Release] = {}
        self._first = first
        self.deaths: list[str] = []
        """Processes that ended by themselves, and how."""

    def release(self, name: str) -> Release:
        """In which a member runs, or starts next."""
        return self._releases.get(name, self._first)

    def move(
        self, name: str, release: Release, *, new_disk: bool = False, kill: bool = False
    ) -> None:
        """Stops a member cleanly, or by kill -9, and starts it in another release."""
        if kill:
            self.kill(name, restart=False)
        elif code := self.stop_member(name):
            self.deaths.append(f"{name} ({self.release(name).name}) was stopped: exit code {code}")
        if new_disk:
            shutil.rmtree(self.data_dir(name))
        self._releases[name] = release
        self.start_member(name)

    def _command(self, member: ChildPlace) -> list[str]:
        command = super()._command(member)
        assert command[:2] == [sys.executable, "-m"]
        assert command[3] == "--log"  # which a child of an older release does not know
        return self.release(member.name).python("-m", "tests.skew.small_logs", *command[5:])

    def _note(self, event: ClusterEvent) -> None:
        if event.event in ("died", "failed"):
            details = event.details
            member = str(details["member"])
            why = details.get("reason") or details.get("message")
            self.deaths.append(f"{member} ({self.release(member).name}): {why}")
