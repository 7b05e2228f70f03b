"""The in-sync set as its leader knows it, while changes of it are under way.  Pure.

Rule 2: while a change is under way, the leader counts the union of old and new.  A change whose
answer was lost is settled by the next successful compare-and-set, never by a read: the first may
still be on its way to the store, and be applied after the read.

Within an epoch nobody but its leader writes the record.  So one that the leader has not written, or
has written over, was set back, by a backup of the store say.  Whoever was in sync there may lack
what was committed since: the leader writes its own record again, at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import HeldRecord, MemberChange, Record, ReplicaId


@dataclass(frozen=True, slots=True)
class Swap:
    """A compare-and-set to be made; its answer comes back with the number."""

    number: int
    version: str | None
    record: Record


class InSyncState(Enum):
    """Of the set."""

    SETTLED = auto()
    """The record is known."""
    ASKED = auto()
    """A compare-and-set is under way."""
    UNKNOWN = auto()
    """Its answer was lost: the record is to be read, and then written again."""


class InSyncSet:
    """Owned by Leader."""

    def __init__(self, version: str, record: Record, min_insync: int) -> None:
        self.record = record
        """As it was last known to be in the store."""
        self.state = InSyncState.SETTLED
        self.deposed = False
        """Somebody else leads, or the record is gone."""
        self._version = version
        self._min = min_insync
        self._possible = {record.in_sync}  # what the store may hold
        self._asked: Swap | None = None
        self._numbers = 0

    @property
    def counted(self) -> frozenset[ReplicaId]:
        """All whose disk an entry must be on: rule 2."""
        return frozenset[ReplicaId]().union(*self._possible)

    @property
    def enough(self) -> bool:
        """Whether something can be committed: `min_insync` are in every set there may be."""
        return min(map(len, self._possible)) >= self._min

    def propose(self, in_sync: Iterable[ReplicaId]) -> Swap:
        """Begins a change."""
        return self._propose(records.with_in_sync(self.record, frozenset(in_sync)))

    def propose_members(self, change: MemberChange) -> Swap:
        """Begins a change of who may take part; who leaves is out of the set.

        Raises Refused.
        """
        return self._propose(records.with_change(self.record, change, self._min))

    def _propose(self, record: Record) -> Swap:
        if self.state is not InSyncState.SETTLED:
            raise ValueError("another change is under way")
        return self._ask(self._version, record)

    def _ask(self, version: str, record: Record) -> Swap:
        self._numbers += 1
        self._possible.add(record.in_sync)
        self._asked = Swap(self._numbers, version, record)
        self.state = InSyncState.ASKED
        return self._asked

    def won(self, number: int, version: str) -> None:
        """The store holds what was asked for."""
        if self._asked is not None and number == self._asked.number:
            self.record, self._version = self._asked.record, version
            self._possible = {self.record.in_sync}
            self._asked = None
            self.state = InSyncState.SETTLED

    def lost(self, number: int, found: HeldRecord | None) -> Swap | None:
        """The store holds something else; what to ask for next."""
        if self._asked is None or number != self._asked.number:
            return None
        self._asked = None
        self.state = InSyncState.UNKNOWN
        return self.read(found)

    def unanswered(self, number: int) -> None:
        """No answer came: it may have been done, or be done yet."""
        if self._asked is not None and number == self._asked.number:
            self._asked = None
            self.state = InSyncState.UNKNOWN

    def read(self, found: HeldRecord | None) -> Swap | None:
        """What the store holds; if it may not be our record, what to ask for next."""
        ours = self.record
        if found is None or (found.record.epoch, found.record.leader) != (ours.epoch, ours.leader):
            self.deposed = True
            return None
        settled = self.state is InSyncState.SETTLED
        if self.state is InSyncState.ASKED or (settled and found.version == self._version):
            return None
        wanted = found.record
        if settled or wanted.in_sync not in self._possible:
            newest = max(ours.revision, wanted.revision)
            wanted = replace(ours, revision=newest)  # it was set back
        self._possible.add(found.record.in_sync)
        return self._ask(found.version, records.with_in_sync(wanted, wanted.in_sync))
