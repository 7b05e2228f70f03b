"""What a store of records can do.

Owned by: a replica's process, which calls it in threads: calls wait.  The record is changed by
compare-and-set only; a lease beside it says whether its leader is there, and nothing more.
"""

from __future__ import annotations

from typing import Protocol

from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId


class StoreError(Exception):
    """The store is away or broke off: what was asked for may have been done, or not."""


class Conflict(Exception):
    """The store holds another version; `found` is what it holds, None if nothing."""

    def __init__(self, found: HeldRecord | None) -> None:
        super().__init__(f"the record is of version {found.version if found else None}")
        self.found = found


class Store(Protocol):
    """One group's record."""

    look_s: float
    """Between two looks of a replica that does not lead, where nothing else says to look."""

    def read(self) -> HeldRecord | None:
        """What is there now (linearizable); None: nothing.  Raises StoreError."""
        ...

    def swap(self, version: str | None, record: Record) -> str:
        """Puts a record where `version` is (None: where none is); the new version.

        Raises Conflict, StoreError.
        """
        ...

    def renew(self, leader: ReplicaId) -> None:
        """Renews the lease of who leads, or begins it: also before a takeover, or others would
        find that its lease has ended.  Raises StoreError."""
        ...

    def release(self, leader: ReplicaId) -> None:
        """Ends it: others need not wait.  Raises StoreError."""
        ...

    def close(self) -> None:
        """Ends every lease, or lets it run out."""
        ...
