"""What a service gives its replica: what it opens, and what serves clients while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor

from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.state import Leaving, ReplicaState
from duemq_server.serving.server import Server


class Term(Protocol):
    """What serves clients while this replica leads."""

    async def start(self) -> None:
        """Ready for clients when it returns."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises what ends it early."""
        ...

    def quiesce(self) -> None:
        """Appends nothing more; what was accepted is still answered."""
        ...

    async def stop(self, *, handed_over: bool) -> None:
        """Ends it; with `handed_over`, another replica serves its name already."""
        ...


class Service(Protocol):
    """What is replicated: a broker, a timer shard."""

    @property
    def kind(self) -> str:
        """As nameservers know it: "broker" or "timer"."""
        ...

    @property
    def services(self) -> Sequence[ServiceDescriptor]:
        """What clients call; only a leader answers."""
        ...

    def open(self) -> ReplicaState:
        """Opens the data directory.  Waits for the disk."""
        ...

    def not_to_found(self) -> str:
        """Why its group cannot begin with an empty directory; empty: it can."""
        ...

    def after_loss(self) -> str:
        """What an operator who accepted a loss is to do next, in words; empty: nothing."""
        ...

    def lead(self, state: ReplicaState, leading: Leading, server: Server) -> Term:
        """All of the log is applied; the state is the term's from now on."""
        ...

    def short_of_space(self) -> bool:
        """Whether clients would be refused for want of space.  Asks the disk, waits for nothing."""
        ...

    def snapshot(self, older: bool) -> Leaving | None:
        """Of the last checkpoint that was saved; None: there is none yet.  Waits for the disk.

        `older`: such that a replica of the release before can read it.
        """
        ...
