"""Drops silent instances the moment their report runs out."""

import asyncio
from collections.abc import Callable

from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.registry import Registry

# Between two looks for silent instances at most: one that registers with a short expiry while the
# loop sleeps is missed no later than this.
CHECK_S_MAX = 0.5


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
        while True:
            revision = self._registry.revision
            next_ms = self._registry.expire(self._now_ms())
            if self._registry.revision != revision:
                self._servicer.wake()
            wait_s = (next_ms - self._now_ms()) / 1000
            await asyncio.sleep(min(max(wait_s, 0.001), CHECK_S_MAX))
