"""Drops silent instances the moment their report runs out; says when this nameserver is ready."""

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
        self,
        registry: Registry,
        servicer: NameserverServicer,
        now_ms: Callable[[], int],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_ready` is called once everybody had the time to register."""
        self._registry = registry
        self._servicer = servicer
        self._now_ms = now_ms
        self._on_ready = on_ready
        self._awaited_ms = now_ms()  # a start that takes long is late, too

    async def run(self) -> None:
        """For ever."""
        told = False
        while True:
            now_ms = self._now_ms()
            late_ms = now_ms - self._awaited_ms
            if late_ms > STALL_MS_MAX:
                self._registry.forgive(late_ms, now_ms)
            revision = self._registry.revision
            next_ms = self._registry.expire(now_ms)
            if self._registry.revision != revision:
                self._servicer.wake()
            if not told and self._registry.is_ready(now_ms):
                told = True
                self._on_ready()
            wait_s = min(max((next_ms - self._now_ms()) / 1000, 0.001), CHECK_S_MAX)
            self._awaited_ms = self._now_ms() + int(wait_s * 1000)
            await asyncio.sleep(wait_s)
