"""What a service derives from its group's log, as the roles see it."""

from __future__ import annotations

from typing import Protocol

from duemq_server.storage.replicas.replica_log import ReplicaLog


class Leaving(Protocol):
    """A leader's snapshot that is sent, part by part; its methods wait for the disk."""

    def read(self, bytes_max: int, /) -> bytes:
        """The next part; empty at the end."""
        ...

    def close(self) -> None:
        """Lets go of what it reads."""
        ...


class Arriving(Protocol):
    """A leader's snapshot that comes part by part; its methods wait for the disk."""

    def write(self, part: bytes, /) -> None:
        """Raises ValueError, Corrupt: it is none; DiskFull, DiskFailed."""
        ...

    def install(self, log_start: int) -> None:
        """The log begins anew there, the tables from the snapshot.

        Raises ValueError, Corrupt, UnknownVersion, StreamBroken before anything has changed.
        """
        ...

    def close(self) -> None:
        """What was not installed goes."""
        ...


class ReplicaState(Protocol):
    """A store that follows.  Its methods wait for the disk: one thread at a time calls them."""

    log: ReplicaLog
    epochs: tuple[tuple[int, int], ...]
    """All that the log has, as (epoch, start): as of the open, or of what was installed."""
    committed: int
    """What was known to be committed at the open, or when a snapshot was installed."""
    store_id: int
    lost: bool
    """The log ends before what was durable once: it needs a new disk id before it is written."""

    @property
    def applied(self) -> int:
        """The tables are the log up to here; at most what is committed."""
        ...

    @property
    def known_to(self) -> int:
        """Where the checkpoint here was made; the log may end before, as after a snapshot."""
        ...

    @property
    def unfit(self) -> str:
        """Why it cannot lead, whatever an operator says; empty: it can."""
        ...

    def apply(self, committed: int, entries_max: int | None = None) -> None:
        """Applies entries from `applied` on, up to `committed`."""
        ...

    def checkpoint(self) -> None:
        """Saves the tables if it is time for it and something has come; called now and then.

        Raises DiskFull, DiskFailed.
        """
        ...

    def drop_before(self, log_start: int) -> None:
        """The leader keeps nothing before that."""
        ...

    def rename(self, store_id: int) -> None:
        """Takes the group's store id over, durably.  Raises DiskFull, DiskFailed."""
        ...

    def receive(self) -> Arriving:
        """Another snapshot arrives, beside what is here.  Raises DiskFull, DiskFailed."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...
