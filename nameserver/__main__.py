"""`python -m nameserver`: wires one nameserver together and runs it until SIGTERM."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial

from duemq.rpc import server as rpc
from duemq.rpc import settings as rpc_settings
from duemq.rpc.logging import configure
from nameserver import loops
from nameserver.clock import SteadyClock
from nameserver.metrics import expose
from nameserver.registry import Registry
from nameserver.servicer import OVERRIDES, SERVICE, NameserverServicer
from nameserver.settings import Settings

log = logging.getLogger("nameserver")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set."""
    clock = SteadyClock()
    ready_at_ms = clock.now_ms() + int(settings.ready_after * 1000)
    registry = Registry(ready_at_ms, expiry_ms=int(settings.expiry * 1000))
    server = rpc.Server(settings)
    servicer = NameserverServicer(registry, clock.now_ms, settings.watchers_max)
    expose(registry, servicer, server.registry)
    server.add(SERVICE, servicer, OVERRIDES)
    await server.start()
    await loops.serve(registry, servicer, server, clock.now_ms, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a nameserver.  Returns the exit status."""
    settings = rpc_settings.load(Settings, argv)
    configure(settings.log_level, settings.log_format, "nameserver")
    log.info("%s", settings)
    return rpc.run(partial(serve, settings))


if __name__ == "__main__":
    sys.exit(main())
