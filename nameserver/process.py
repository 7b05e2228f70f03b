"""A nameserver's process: its parts, how they are wired, in which order they start and stop.

What runs by itself, all of it started here:

expiry      drops silent instances the moment their report runs out, and says SERVING once
            everybody had the time to register (expiry.py)

Shutdown, in this order: health says NOT_SERVING, so that probes and load balancers turn away; the
watchers' streams end, which sends clients to another nameserver; calls end; the loops end.
"""

import asyncio

from duemq_server.nameserver.clock import SteadyClock
from duemq_server.nameserver.edge.metrics import expose
from duemq_server.nameserver.edge.outside_servicer import OutsideServicer
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.expiry import Expiry
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.settings import Settings
from duemq_server.serving import process
from duemq_server.serving.server import Server


class Nameserver:
    """One nameserver.  `start`, then `run` until told to stop, then `stop`."""

    def __init__(self, settings: Settings, clock: SteadyClock | None = None) -> None:
        self.server = Server(settings)
        self._now_ms = (clock or SteadyClock()).now_ms
        self.registry = Registry(
            self._now_ms() + int(settings.ready_after * 1000),
            expiry_ms=int(settings.expiry * 1000),
            lost_kept_ms=int(settings.lost_kept * 1000),
        )
        self._servicer = NameserverServicer(
            self.registry, self._now_ms, settings.watchers_max, self.server.unsent
        )
        self._looks = Expiry(self.registry, self._servicer, self._now_ms, self.server.ready)
        self._servicer.tells_outside = bool(settings.external_listen)
        expose(self.registry, self._servicer, self.server.registry)
        outside = OutsideServicer(self.registry, self._servicer)
        self.server.add(SERVICE, self._servicer, OVERRIDES, outside=outside)

    async def start(self, *, announced: bool = True) -> None:
        """Serves.  Raises OSError."""
        await self.server.start(announced=announced)
        self._expiry = asyncio.create_task(self._looks.run(), name="expiry")

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises what ends a loop."""
        await process.until(stop, self._expiry)

    async def stop(self) -> None:
        """Clean stop; the order is explained above."""
        self.server.drain()
        self._servicer.close()
        await self.server.stop()
        await process.end(self._expiry)
