"""A timer shard's process: its parts, how they are wired, in which order they start and stop.

What runs by itself, all of it started here:

timerlog-writer  two threads: write and sync what was appended, in groups (storage/writer.py)
timer-disk       a thread: flushes, loads, checkpoints, one at a time (jobs.py)
firing           a timer of the event loop, set to the next due millisecond (shard.py)
housekeeping     chooses jobs (shard.py)
links            to each broker a sender, a fetcher a queue, commits of offsets (links.py)
registration     heartbeats to the nameservers; routes: what they know (duemq.rpc)

Shutdown, in this order: leave the nameservers, so that cancels turn elsewhere; health says
NOT_SERVING and calls end; links end, with a last commit, so that nothing new comes; housekeeping
ends; the writer syncs what is left; the last checkpoint makes the next start short.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from duemq.rpc import process
from duemq.rpc.registration import Registration
from duemq.rpc.server import Server
from duemq.rpc.watch import RouteWatcher
from duemq.v1 import nameserver_pb2
from storage.disk import RealDisk
from timer_service import servicer
from timer_service.links import Links
from timer_service.metrics import Meters, ShardCollector
from timer_service.servicer import TimerServicer
from timer_service.settings import Settings
from timer_service.shard import Shard, now_ms
from timer_service.store import open_store

log = logging.getLogger(__name__)


class TimerService:
    """One timer shard.  `start`, then `run` until told to stop, then `stop`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.server = Server(settings)
        self._disk = RealDisk()

    async def start(self, *, announced: bool = True) -> None:
        """Opens the data, fires, serves, and registers.  Raises StorageError, OSError."""
        began = time.monotonic()
        settings = self.settings
        store = await asyncio.to_thread(
            open_store, settings.data_dir, self._disk, settings.limits(), now_ms()
        )
        ledger = store.scheduler.ledger
        log.info(
            "%d timers pending, %d in flight, %d entries replayed, open after %.3f s",
            ledger.pending,
            ledger.in_flight,
            store.replayed,
            time.monotonic() - began,
        )
        meters = Meters(self.server.registry)
        self.shard = Shard(store, meters.committed)
        self._routes = RouteWatcher(settings.nameservers)
        self._links = Links(self.shard, self._routes.cache, settings.shard, settings.shards)
        self._routes.on_change(self._links.changed)
        self.server.registry.register(ShardCollector(self.shard, self._links.lag))
        timer = TimerServicer(self.shard, self._links, settings)
        self.server.add(servicer.SERVICE, timer)
        self.shard.start()
        self._routes.start()
        await self.server.start(announced=announced)
        self._registration = Registration(
            settings.nameservers, settings.heartbeat_period, now_ms(), self._report
        )
        self._registration.start()
        gc.collect()
        gc.freeze()  # what was made by now stays: later collections need not look at it
        self._housekeeping = asyncio.create_task(self.shard.housekeeping(), name="housekeeping")
        await self.server.ready()
        process.trace("duemq-timer", settings)

    def _report(self) -> nameserver_pb2.TimerReport:
        return nameserver_pb2.TimerReport(
            name=self.settings.name,
            address=self.server.advertised,
            shard=self.settings.shard,
            shards=self.settings.shards,
            store_id=self.shard.store.producer_id,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises Internal or StorageError when the disk or a loop fails."""
        await process.until(stop, self.shard.failed, self._housekeeping)

    async def stop(self) -> None:
        """Clean stop; the order is explained above."""
        await process.end_trace(self.settings)
        await self._registration.stop()
        await self._routes.stop()
        await self.server.stop()
        await self._links.stop()
        self._housekeeping.cancel()
        await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self.shard.stop()
