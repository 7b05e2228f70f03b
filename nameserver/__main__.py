"""`duemq-nameserver`: wires one nameserver together and runs it until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from duemq_server.nameserver import loops
from duemq_server.nameserver.clock import SteadyClock
from duemq_server.nameserver.edge.metrics import expose
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.settings import Settings
from duemq_server.serving import process
from duemq_server.serving.server import Server


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set."""
    clock = SteadyClock()
    ready_at_ms = clock.now_ms() + int(settings.ready_after * 1000)
    registry = Registry(
        ready_at_ms,
        expiry_ms=int(settings.expiry * 1000),
        lost_kept_ms=int(settings.lost_kept * 1000),
    )
    server = Server(settings)
    servicer = NameserverServicer(registry, clock.now_ms, settings.watchers_max, server.unsent)
    expose(registry, servicer, server.registry)
    server.add(SERVICE, servicer, OVERRIDES)
    await server.start()
    await loops.serve(registry, servicer, server, clock.now_ms, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a nameserver.  Returns the exit status."""
    return process.main("nameserver", Settings, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
