"""A leader's lease, as its leader sees it: when a renewal of it counts."""

from __future__ import annotations

import asyncio
import logging

from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running.record_store import RecordStore, Renewals
from duemq_server.serving.clock import steady_ms

log = logging.getLogger(__name__)


class Lease:
    """Owned by Leading; used from its event loop.  A thread renews it from `start` to `stop`."""

    def __init__(
        self, leader: Leader, store: RecordStore, times: Times, look_now: asyncio.Event
    ) -> None:
        """`look_now` wakes who asks whether it still leads, when the lease had ended."""
        self.lapsed_ms: int | None = None
        """A renewal began then, of a lease that had ended: it counts when it is `confirmed`."""
        self._leader = leader
        self._lease_ms = times.lease_ms
        self._look_now = look_now
        self._renewals = Renewals(store.blocking, leader.me, times.renew_ms, self._renewed)
        self._renewed_ms = self._reached_ms = steady_ms()

    def began(self, began_ms: int) -> None:
        """By a renewal that came before the takeover."""
        self._renewed_ms = began_ms
        self._leader.renewed(began_ms)

    def start(self) -> None:
        """Renews it from now on."""
        self._renewals.start()

    def alive(self) -> None:
        """See Renewals."""
        self._renewals.alive()

    async def stop(self) -> None:
        """See Renewals."""
        await self._renewals.stop()

    def reached(self) -> None:
        """The store answered."""
        self._reached_ms = steady_ms()

    @property
    def silent_ms(self) -> int:
        """Since when the store has not answered."""
        return steady_ms() - self._reached_ms

    def _renewed(self, began_ms: int, ended_ms: int) -> None:
        """Counts if nobody can have found that the lease had ended before it.

        A process that was stopped, or reached no store, renews a lease that another one has seen
        end.  It serves by that only when the record was changed by itself since: whoever stood
        before fails, and whoever stands after waits for a whole lease.
        """
        self._reached_ms = ended_ms
        if self.lapsed_ms is None and ended_ms - self._renewed_ms >= self._lease_ms:
            log.warning("the lease had ended: whether it leads is asked")
            self.lapsed_ms = began_ms
            self._look_now.set()
        self._renewed_ms = began_ms
        if self.lapsed_ms is None:
            self._leader.renewed(began_ms)

    def confirmed(self, renewed_ms: int) -> None:
        """The record was changed after the renewal that began then."""
        self.lapsed_ms = None
        self._leader.renewed(renewed_ms)
