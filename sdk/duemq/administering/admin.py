"""The asyncio admin client; the synchronous one has its methods.

Each broker keeps its own topics and offsets, so most answers are asked of all of them and joined.
"""

from __future__ import annotations

from duemq.administering.forgetting import Forgetting
from duemq.administering.holds import TimerHolds
from duemq.administering.letters.dead_letters import DeadLetters
from duemq.administering.messages import Messages
from duemq.administering.offsets import Offsets
from duemq.administering.pending_timers import PendingTimers
from duemq.administering.probes import Probes
from duemq.administering.schedules import Schedules
from duemq.administering.topics import Topics
from duemq.producing.cancels import Cancelling
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.rescheduling import Rescheduling
from duemq.settings import Addresses, ClientSettings
from duemq.transport.closing import AsyncClient
from duemq.transport.cluster_client import Client


class Admin(
    DeadLetters,
    Topics,
    Offsets,
    Messages,
    Probes,
    PendingTimers,
    TimerHolds,
    Schedules,
    Forgetting,
    Cancelling,
    Rescheduling,
    AsyncClient,
):
    """As `duemq.Admin`: `await start()` (or `async with`) connects."""

    def __init__(
        self,
        nameserver: Addresses | None = None,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas; None: DUEMQ_NAMESERVER's."""
        super().__init__(Client(nameserver, settings))
        self._timer_calls = TimerCalls(self._client)

    async def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers: it may be tried again."""
        await self._client.start()
        self._timer_calls.start()

    async def close(self) -> None:
        """Ends the connections.  Idempotent."""
        self._client.check_loop()
        await self._timer_calls.close()
        await self._client.close()

    def _timer_calls_now(self) -> TimerCalls:
        return self._timer_calls
