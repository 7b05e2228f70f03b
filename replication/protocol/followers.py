"""A follower as its leader sees it, and who is none.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from duemq_server.replication.protocol.messages import Hello, Reason
from duemq_server.replication.protocol.record import Record, ReplicaId


@dataclass(slots=True)
class FollowerProgress:
    """A follower whose stream is open."""

    replica: ReplicaId
    address: str
    next: int
    """What is sent next."""
    began: int
    durable: int | None
    """As it said on this stream."""
    heard_ms: int
    """When that was sent what it answered last."""
    at_end_ms: int
    """When it had all that there was then; what it lacks is younger."""
    mark: int
    """The leader's end at `mark_ms`: a follower that comes there was at the end then."""
    mark_ms: int
    short_of_space: bool = False
    """As it said last."""
    takes: bool = False
    """It has taken something on this stream: who finds its own log to be another one, or damage in
    what comes, says hello each second, and ends its stream by that."""

    def note_lag(self, end: int, now_ms: int) -> None:
        """It said what it has; `end` is the leader's own."""
        durable = self.durable or 0
        if durable >= end:
            self.at_end_ms = self.mark_ms = now_ms
            self.mark = end
        elif durable >= self.mark:
            self.at_end_ms = self.mark_ms
            self.mark, self.mark_ms = end, now_ms


def refusal(hello: Hello, ours: Record, epoch: int, *, deposed: bool) -> tuple[Reason, str] | None:
    """Why who says hello cannot follow, as the leader's record of its epoch has it."""
    if (hello.group, hello.store_id) != (ours.group, ours.store_id):
        # Before all else: epochs of another group say nothing here.
        return Reason.FOREIGN, f"this is {ours.group}, store {ours.store_id:#x}"
    if hello.epoch > epoch:
        return Reason.NOT_LEADING, f"epoch {hello.epoch} has begun"
    if deposed:
        return Reason.NOT_LEADING, "somebody else leads"
    if hello.epoch < epoch:
        return Reason.STALE, f"this is epoch {epoch}"
    if hello.replica.name not in ours.members:
        text = f"{hello.replica.name} is no member of {ours.group}: members are"
        return Reason.STRANGER, f"{text} {', '.join(sorted(ours.members))}"
    if hello.log_version < ours.log_version:
        return (
            Reason.STRANGER,
            f"{hello.replica} reads logs up to version {hello.log_version}, and that of"
            f" {ours.group} is of {ours.log_version}: start a newer release there",
        )
    return None


def rival(hello: Hello, me: ReplicaId, alive: Iterable[FollowerProgress]) -> str:
    """Why it cannot be who it says, while another one is alive, as `me` is; empty: it can.

    Else two processes would take each other's place again and again, or count as one disk.
    """
    replica = hello.replica
    if replica.disk == me.disk:
        return _copied(replica, f"{me}, which leads")
    if replica.name == me.name:
        return f"{me} leads: two processes have one name"
    for each in alive:
        if each.replica.disk == replica.disk:
            if (each.replica, each.address) != (replica, hello.address):
                return _copied(replica, f"{each.replica} at {each.address}, which follows")
        elif each.replica.name == replica.name:
            return f"{each.replica} follows already: two processes have one name"
    return ""


def _copied(replica: ReplicaId, other: str) -> str:
    return (
        f"{replica} has the disk of {other}: the data directory of one is a copy of the other's;"
        " start the copy with an empty one"
    )
