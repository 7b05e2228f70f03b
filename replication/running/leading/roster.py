"""What a leader tells the nameservers of its group's replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from duemq.v1 import nameserver_pb2 as pb
from duemq_server.replication.protocol.followers import FollowerProgress
from duemq_server.replication.protocol.leader import Leader

SILENT_MS = 3_000
"""Six heartbeats."""
SNAPSHOT = "it gets a snapshot"
SILENCE = "nothing is heard of it"
REFUSES = "it takes nothing of what is sent: `duemq replica status` says why"


@dataclass(slots=True)
class _Standing:
    role: pb.ReplicaRole
    in_sync: bool
    since_ms: int


class Roster:
    """Owned by Leading."""

    def __init__(self, now_ms: Callable[[], int], address: str) -> None:
        """`now_ms`: Unix time.  `address`: the leader's."""
        self._now_ms = now_ms
        self._address = address
        self._addresses: dict[str, str] = {}
        self._came_ms: dict[str, int] = {}
        self._standings: dict[str, _Standing] = {}
        self._blocked: tuple[str, ...] = ()
        self._receivers: Collection[str] = ()

    def came(self, name: str, address: str) -> None:
        """A replica follows; it is reached there."""
        self._addresses[name] = address
        self._came_ms[name] = self._now_ms()

    def look(
        self, leader: Leader, blocked: tuple[str, ...], receivers: Collection[str] = ()
    ) -> bool:
        """Whether a role, the set, or who is `blocked` is another than at the last look.

        `receivers` get a snapshot.
        """
        self._receivers = receivers
        gone = self._standings.keys() - leader.record.members
        for name in gone:
            del self._standings[name]
        changed = bool(gone) or blocked != self._blocked
        self._blocked = blocked
        following = _following(leader)
        for name in leader.record.members:
            role, in_sync = self._standing(leader, name, following.get(name))
            known = self._standings.get(name)
            if known is None or (known.role, known.in_sync) != (role, in_sync):
                self._standings[name] = _Standing(role, in_sync, self._now_ms())
                changed = True
        return changed

    def reports(self, leader: Leader, end: int, steady_ms: int) -> list[pb.ReplicaReport]:
        """Every member of the group, the leader first."""
        me = leader.me.name
        following = _following(leader)
        names = [me, *sorted(leader.record.members - {me})]
        return [self._report(leader, name, following.get(name), end, steady_ms) for name in names]

    def _report(
        self, leader: Leader, name: str, progress: FollowerProgress | None, end: int, steady_ms: int
    ) -> pb.ReplicaReport:
        role, in_sync = self._standing(leader, name, progress)
        known = self._standings.get(name)
        report = pb.ReplicaReport(
            name=name,
            role=role,
            in_sync=in_sync,
            epoch=leader.epoch,
            address=self._addresses.get(name, ""),
            since_ms=known.since_ms if known is not None else self._now_ms(),
        )
        if role == pb.LEADER:
            report.address = self._address
        elif progress is None:
            report.reason = self._absence(name)
        else:
            report.lag_bytes = max(0, end - (progress.durable or 0))
            if report.lag_bytes:
                report.lag_s = max(0, steady_ms - progress.at_end_ms) / 1000
            silent_ms = steady_ms - progress.heard_ms
            if silent_ms > SILENT_MS:  # also of who is in sync: nothing is committed without it
                report.reason = f"nothing is heard of it for {silent_ms / 1000:.0f} s"
            elif not in_sync:
                report.reason = "it catches up"
        return report

    def _absence(self, name: str) -> str:
        if name in self._receivers:
            return SNAPSHOT
        came_ms = self._came_ms.get(name)  # a clock may be set
        came = came_ms is not None and abs(self._now_ms() - came_ms) <= SILENT_MS
        return REFUSES if came else SILENCE

    def _standing(
        self, leader: Leader, name: str, progress: FollowerProgress | None
    ) -> tuple[pb.ReplicaRole, bool]:
        if name == leader.me.name:
            return pb.LEADER, True
        in_set = any(each.name == name for each in leader.record.in_sync)
        if progress is None:
            catches_up = name in self._receivers and not in_set
            return (pb.LEARNER if catches_up else pb.AWAY), in_set
        in_sync = progress.replica in leader.record.in_sync
        return (pb.FOLLOWER if in_sync else pb.LEARNER), in_sync


def _following(leader: Leader) -> dict[str, FollowerProgress]:
    return {each.replica.name: each for each in leader.followers.values() if each.takes}
