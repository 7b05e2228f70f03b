"""A clean end of a term: whoever has all is asked to take over, and waited for."""

from __future__ import annotations

import asyncio

from duemq.errors import Timeout
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.running.leading.shipping import Shipping
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.replication.stores.store import StoreError
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.replicas.replica_log import ReplicaLog

HAND_OVER_S = 5.0
"""How long who stops, or was told to, waits for a successor."""
LOOK_S = 0.005
STAND_MS = 500
ALONE_MS = 500
"""A leader that nobody follows waits so long for one to come back before it stops."""
ASKED_MS = 2_500
"""Who is asked to lead has left its stream, and may wait so long for the store."""


class HandingOver:
    """Owned by Leading; used from its event loop."""

    def __init__(
        self, leader: Leader, replica_log: ReplicaLog, store: RecordStore, shipping: Shipping
    ) -> None:
        self._leader = leader
        self._log = replica_log
        self._store = store
        self._shipping = shipping

    async def run(self, timeout_s: float, to: str = "") -> str:
        """Asks whoever has all, or the replica named, to lead; who does.  Nothing is appended now.

        Raises Timeout: nobody has all, or nobody took over; soon, if nobody follows at all.
        """
        self._leader.resign()
        asked, alone_from_ms = False, steady_ms() + ALONE_MS
        try:
            async with asyncio.timeout(timeout_s):
                while self._shipping.open or steady_ms() < alone_from_ms:
                    if self._ask_successor(to):  # perhaps it is dead by now
                        asked, alone_from_ms = True, steady_ms() + ASKED_MS
                    leader = await self._took_over(STAND_MS if asked else 0)
                    if leader:
                        return leader
        except TimeoutError:
            pass
        raise Timeout(
            f"nobody took over within {timeout_s:g} s: in sync are"
            f" {', '.join(sorted(each.name for each in self._leader.record.in_sync))}"
            if self._shipping.open
            else "nobody follows"
        )

    def _ask_successor(self, to: str) -> bool:
        """Again and again: it may have seen a record that has changed meanwhile."""
        # What a full disk does not take was acknowledged to nobody.
        log_end = self._log.written_position if self._log.disk_full else self._log.end_position
        successor = self._leader.successor(log_end, to)
        return successor is not None and self._shipping.ask_to_lead(successor)

    async def _took_over(self, wait_ms: int) -> str:
        """Who leads; empty: nobody within the time.

        Who was asked leaves its stream to stand: nobody else is asked meanwhile.
        """
        until_ms = steady_ms() + wait_ms
        while True:
            leader = await self._successor()
            if leader or steady_ms() >= until_ms:
                return leader

    async def _successor(self) -> str:
        await asyncio.sleep(LOOK_S)
        try:
            found = await self._store.read()
        except StoreError:
            return ""
        if found is None or found.record.epoch <= self._leader.epoch or not found.record.leader:
            return ""
        return found.record.leader.name
