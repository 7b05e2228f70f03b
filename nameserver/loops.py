"""Everything that a nameserver does by itself.  Both loops are started here and nowhere else.

expiry      drops silent instances the moment their report runs out
readiness   says SERVING once everybody had the time to register

Shutdown, in this order: health says NOT_SERVING, so that probes and load balancers turn away; the
watchers' streams end, which sends clients to another nameserver; calls end; the loops are
cancelled.
"""

import asyncio
from collections.abc import Callable

from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.serving.process import until
from duemq_server.serving.server import Server

# Between two looks for silent instances at most: one that registers with a short expiry while the
# loop sleeps is missed no later than this.
EXPIRY_CHECK_S_MAX = 0.5


async def expiry(
    registry: Registry, servicer: NameserverServicer, now_ms: Callable[[], int]
) -> None:
    """Drops silent instances, for ever."""
    while True:
        revision = registry.revision
        next_ms = registry.expire(now_ms())
        if registry.revision != revision:
            servicer.wake()
        wait_s = (next_ms - now_ms()) / 1000
        await asyncio.sleep(min(max(wait_s, 0.001), EXPIRY_CHECK_S_MAX))


async def readiness(registry: Registry, server: Server, now_ms: Callable[[], int]) -> None:
    """Declares the service ready when its time has come."""
    await asyncio.sleep(max(0, registry.ready_at_ms - now_ms()) / 1000)
    await server.ready()


async def serve(
    registry: Registry,
    servicer: NameserverServicer,
    server: Server,
    now_ms: Callable[[], int],
    stop: asyncio.Event,
) -> None:
    """Runs until `stop` is set, then shuts down."""
    loops = (
        asyncio.create_task(expiry(registry, servicer, now_ms), name="expiry"),
        asyncio.create_task(readiness(registry, server, now_ms), name="readiness"),
    )
    try:
        # A loop that ends in an error ends the process: Kubernetes, or `duemq up`, starts another.
        await until(stop, loops[0])
    finally:
        await server.drain()
        servicer.close()
        await server.stop()
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
