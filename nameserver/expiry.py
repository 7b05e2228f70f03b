"""Drops silent instances the moment their report runs out."""

import asyncio
from collections.abc import Callable

from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.registry import Registry

# Between two looks for silent instances at most: one that registers with a short expiry while the
# loop sleeps is missed no later than this.
CHECK_S_MAX = 0.5
# A look later than this means that the process was stopped, or the machine busy: what was said to
# it meanwhile has yet to be read, and would come too late.
STALL_MS_MAX = 1_000


class Expiry:
    """See the module."""

    def __init__(
        self, registry: Registry, servicer: NameserverServicer, now_ms: Callable[[], int]
    ) -> None:
        self._registry = registry
        self._servicer = servicer
        self._now_ms = now_ms

    async def run(self) -> None:
        """For ever."""
        awaited_ms = self._now_ms()
        while True:
            late_ms = self._now_ms() - awaited_ms
            if late_ms > STALL_MS_MAX:
                self._registry.forgive(late_ms)
            revision = self._registry.revision
            next_ms = self._registry.expire(self._now_ms())
            if self._registry.revision != revision:
                self._servicer.wake()
            wait_s = min(max((next_ms - self._now_ms()) / 1000, 0.001), CHECK_S_MAX)
            awaited_ms = self._now_ms() + int(wait_s * 1000)
            await asyncio.sleep(wait_s)
