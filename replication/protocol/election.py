"""When to try to lead.  Pure.

Owned by: a replica that does not lead.  Safety rests on the compare-and-set alone (record.py,
`taken_over`): this only says when one is worth a try.  A lease is never compared with a clock of
another machine: it has ended when it was seen unchanged for `lease_ms` here, or when the store
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from duemq_server.replication.protocol.record import HeldRecord, ReplicaId
from duemq_server.replication.protocol.times import Times


class Decision(Enum):
    """What a replica does."""

    WAIT = auto()
    """Somebody leads, or may; ask again later."""
    STAND = auto()
    """Follow nobody any more, then take the record over: whoever still answers lets the old
    leader serve.  If it fails, look again."""


class Election:
    """`jitter` answers between 0 and 1."""

    def __init__(
        self, me: ReplicaId, jitter: Callable[[], float], times: Times, address: str = ""
    ) -> None:
        """`address`: where others reach this process."""
        self._me = me
        self._address = address
        self._jitter = jitter
        self._times = times
        self._found: HeldRecord | None = None
        self._since_ms = 0  # the record and its lease are as they are
        self._wait_ms = 0.0
        self._heard_ms: int | None = None
        self._asked = False
        self.doubled = False
        """Somebody renews the lease in this disk's name: one data directory is a copy."""

    def saw(self, found: HeldRecord | None, now_ms: int) -> None:
        """What the store held at a read that had ended by `now_ms`."""
        if found != self._found:
            another = self._version() != (found.version if found else None)
            if another:
                self._asked = False
            self.doubled = bool(
                found and not another and found.lease and self._leads_elsewhere(found)
            )
            self._found = found
            self._since_ms = now_ms
            self._wait_ms = self._jitter() * self._times.jitter_ms

    def _version(self) -> str | None:
        return self._found.version if self._found else None

    def heard(self, now_ms: int) -> None:
        """A chunk or heartbeat of the leader came."""
        self._heard_ms = now_ms

    def asked(self) -> None:
        """The leader hands over: it accepts and serves no more."""
        self._asked = True

    def decide(self, now_ms: int) -> Decision:
        """What to do now; it changes with time, and with what it is told.

        By what was read, so as of when the last read began: what comes later it cannot know.
        """
        found = self._found
        if found is None or self._me not in found.record.in_sync:
            return Decision.WAIT
        if found.record.epoch == 0 and found.record.missing:
            return Decision.WAIT
        leader = found.record.leader
        free = leader in (None, self._me) and not self._leads_elsewhere(found)
        if self._asked or free:
            return Decision.STAND if self._past(self._since_ms, 0, now_ms) else Decision.WAIT
        return Decision.STAND if self._leader_is_away(found, now_ms) else Decision.WAIT

    def _past(self, since_ms: int, duration_ms: int, now_ms: int) -> bool:
        if self._asked:
            return True
        return now_ms - since_ms >= duration_ms + self._wait_ms

    def _leads_elsewhere(self, found: HeldRecord) -> bool:
        """This disk leads as another process, which may be alive: one has a copy of its data."""
        record = found.record
        return record.leader == self._me and record.address != self._address

    def _leader_is_away(self, found: HeldRecord, now_ms: int) -> bool:
        """By the store's word or by its silence; but who is heard is there.

        A leader serves for `heard_ms` after it sent what was answered; that was heard later.
        """
        if found.dead:
            return self._past(self._since_ms, 0, now_ms)
        if self._heard_ms is not None and now_ms - self._heard_ms < self._times.heard_ms:
            return False
        lease_ms = self._times.lease_ms if found.lease is not None else 0
        return self._past(self._since_ms, lease_ms, now_ms)
