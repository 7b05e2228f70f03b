"""A timer shard's process: its parts, how they are wired, in which order they start and stop.

What runs by itself, all of it started here:

timerlog-writer  two threads: write and sync what was appended, in groups (storage/writer.py)
firing           a timer of the event loop, set to the next due millisecond (firing.py)
schedules        a timer of the event loop, while there are any (schedule_loop.py)
disk jobs        flushes, loads, checkpoints, one at a time, in the thread timer-disk (disk_jobs.py)
timer-look-up    a thread: looks for timers to cancel that are not in memory (cancels.py)
timer-key-look-up  a thread: the same, by key (keyed_requests.py)
bulk jobs        while one is open; blocks are read in the thread timer-bulk (bulk_loop.py)
links            to each broker claims, fires, a fetcher a queue, commits (edge/broker_link.py)
registration     heartbeats to the nameservers; routes: what they know (duemq.transport)
announcing       ready and registered while brokers let this service serve its shard

Shutdown, in this order: leave the nameservers, so that cancels turn elsewhere; health says
NOT_SERVING and calls end; links end, with a last commit, so that nothing new comes; disk jobs
end; the writer syncs what is left; the last checkpoint makes the next start short.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import nameserver_pb2
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms
from duemq_server.serving.metrics import TraceCollector
from duemq_server.serving.registration import Registration
from duemq_server.serving.server import Server
from duemq_server.storage import starts
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.disk.data_directory import DataDirectory, open_directory
from duemq_server.timer_service.edge import holds_servicer, inspector, schedules_servicer, servicer
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.holds_servicer import TimerHoldsServicer
from duemq_server.timer_service.edge.inspector import TimerInspectorServicer
from duemq_server.timer_service.edge.metrics import LinksCollector, Meters, ShardCollector
from duemq_server.timer_service.edge.others.holds_of_others import HoldsOfOthers
from duemq_server.timer_service.edge.others.other_shards import OtherShards
from duemq_server.timer_service.edge.schedules_servicer import SchedulesServicer
from duemq_server.timer_service.edge.servicer import TimerServicer
from duemq_server.timer_service.edge.topic_metrics import TopicCollector
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard

if TYPE_CHECKING:  # a shard without replicas need not load it
    from duemq_server.replication.running.leading import Leading

log = logging.getLogger(__name__)

# So long a start waits for a broker's word before it tells the nameservers of itself.
FIRST_CLAIM_S = 1.0


class Lead(NamedTuple):
    """What a replica that leads hands to its shard: the server serves, and outlives it."""

    leading: Leading
    open: Callable[[], DataDirectory]
    """All of the log is committed, and nobody writes it.  Blocking."""
    server: Server


class TimerService:
    """One timer shard.  `start`, then `run` until told to stop, then `stop`."""

    def __init__(self, settings: Settings, lead: Lead | None = None) -> None:
        """`lead`: its log has replicas."""
        self.settings = settings
        self._lead = lead
        self._leading = lead.leading if lead is not None else None
        self.server = lead.server if lead is not None else Server(settings)
        self.replicas: Callable[[], Sequence[nameserver_pb2.ReplicaReport]] = tuple
        """The group's replicas as its leader sees them now, for the nameservers; of a lone shard
        none.  Asked with each heartbeat."""
        self._disk = RealDisk()
        self._claims_changed = asyncio.Event()
        self._registration: Registration | None = None
        self._reports = 0  # told to nameservers before the last time that it left them

    async def start(self, *, announced: bool = True) -> None:
        """Opens the data, fires, serves, and registers.

        Raises StorageError, OSError, InvalidArgument if another store has this shard's name.
        """
        began = time.monotonic()
        settings = self.settings
        lead = self._lead
        self.place = await asyncio.to_thread(
            place.check, settings.data_dir, self._disk, settings.shard, settings.shards
        )
        directory = await asyncio.to_thread(lead.open if lead is not None else self._open)
        self._began_ms = await self._begin()
        if lead is not None:
            directory.housekeeper.others_need = lead.leading.log_needed_from
        ledger = directory.scheduler.ledger
        log.info(
            "%d timers pending, %d in flight, %d entries replayed, open after %.3f s",
            ledger.pending,
            ledger.in_flight,
            directory.replayed,
            time.monotonic() - began,
        )
        meters = Meters(self.server.registry)
        former_ids = self._leading.leader.record.formers if self._leading is not None else ()
        self._formers = [store_id | SERVICE_IDS_FROM for store_id in former_ids]
        self._store_id = directory.producer_id
        try:
            # Before it claims: what it took over would wait in a shard that may not serve.
            await self._new_registration().check_free()
        except BaseException:
            directory.log.close()
            raise
        self.shard = Shard(
            directory,
            meters.committed,
            self._leading,
            settings.shard,
            self._formers,
        )
        self._routes = RouteWatcher(settings.nameservers, tls=settings.tls)
        self._others = OtherShards(self._routes.cache, settings.name, self.place, settings.tls)
        self._links = BrokerLinks(self.shard, self._routes.cache, settings, self.place)
        if self._leading is not None:
            self._links.epoch = self._leading.leader.epoch
        self._others.holders = lambda: self._links.holders
        holds = HoldsOfOthers(self.shard, self._others, self.place)
        self._links.before_leaving = holds.leave
        self._links.before_first_fetch = holds.adopt
        self._links.on_claims = self._claims_changed.set
        self.shard.firing.check_clock = self._links.look_at_clock
        self._routes.on_change(self._links.changed)
        self.server.registry.register(ShardCollector(self.shard, self._links.lag))
        self.server.registry.register(TopicCollector(self.shard))
        self.server.registry.register(LinksCollector(self._links))
        self.server.registry.register(TraceCollector())
        timer = TimerServicer(self.shard, self._links, self._others, settings)
        self.server.add(servicer.SERVICE, timer)
        self.server.add(
            inspector.SERVICE, TimerInspectorServicer(self.shard, self._links, self._others)
        )
        schedules = SchedulesServicer(self.shard, self._links)
        self.server.add(schedules_servicer.SERVICE, schedules)
        self.server.add(holds_servicer.SERVICE, TimerHoldsServicer(self.shard, self._links))
        self.shard.log_loop.start()
        self.shard.schedule_loop.start()
        self.shard.bulk.start()
        self.shard.firing.start()
        self.shard.resuming.start()
        self._routes.start()
        if lead is None:
            await self.server.start(announced=announced)
        else:
            self.replicas = lead.leading.replicas
            lead.leading.on_change = self._replicas_changed
        gc.collect()
        gc.freeze()  # what was made by now stays: later collections need not look at it
        self._disk_jobs = asyncio.create_task(self.shard.disk_jobs.run(), name="disk jobs")
        self._announcing = asyncio.create_task(self._announce(), name="announcing")
        process.trace("duemq-timer", settings)

    def _replicas_changed(self) -> None:
        if self._registration is not None:
            self._registration.changed()

    def _open(self) -> DataDirectory:
        settings = self.settings
        return open_directory(settings.data_dir, self._disk, settings.limits(), now_ms())

    async def _begin(self) -> int:
        """Later than that of every process before, so that nameservers take this one for newer."""
        if self._leading is not None:  # of two that call themselves leaders, the later one counts
            return self._leading.leader.record.registered_ms
        return await asyncio.to_thread(starts.begin, self.settings.data_dir, self._disk, now_ms())

    async def _announce(self) -> None:
        """Others are sent here unless brokers refuse this service, and have given it nothing.

        Nor are they before this shard knows which keys are its own: who asks it meanwhile for a
        key or a schedule, by an address known from before, is told UNAVAILABLE, and asks again.
        Raises InvalidArgument when the name is another's.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CLAIM_S):
                await self._claims_changed.wait()
        while True:
            self._claims_changed.clear()
            fenced = bool(self.shard.scheduler.dispatcher.fence)
            serves = (
                not fenced
                and bool(self.place.key_shards)
                and (self._links.granted or not self._links.refusals)
            )
            if serves and self._registration is None:
                self._registration = self._new_registration()
                self._registration.start()
            elif not serves and self._registration is not None:
                registration, self._registration = self._registration, None
                await registration.stop()
                self._reports = registration.counter
            self.server.ready(
                servicer.SERVICE,
                inspector.SERVICE,
                schedules_servicer.SERVICE,
                holds_servicer.SERVICE,
                serving=serves,
            )
            refused = (self._registration.refused,) if self._registration is not None else ()
            await process.until(self._claims_changed, *refused)

    def _new_registration(self) -> Registration:
        settings = self.settings
        return Registration(
            settings.nameservers,
            settings.heartbeat_period,
            self._began_ms,
            self._report,
            counter=self._reports,
            formers=self._formers,
            tls=settings.tls,
        )

    def _report(self) -> nameserver_pb2.TimerReport:
        replicas = self.replicas()
        return nameserver_pb2.TimerReport(
            name=self.settings.name,
            address=self.server.advertised,
            external_address=self.settings.external_advertised or self.server.external_address,
            shard=self.settings.shard,
            shards=self.settings.shards,
            store_id=self._store_id,
            key_shards=self.place.key_shards,
            replicas=replicas,
            epoch=max((each.epoch for each in replicas), default=0),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.

        Raises Internal or StorageError when the disk or a loop fails, InvalidArgument when the name
        is another's.
        """
        await process.until(stop, self.shard.log_loop.failed, self._disk_jobs, self._announcing)

    def quiesce(self) -> None:
        """With replicas: takes nothing more; what it took is answered when it is committed."""
        self.shard.quiesce()

    async def stop(self, *, handed_over: bool = False) -> None:
        """Clean stop; the order is explained above.

        `handed_over`: another replica serves this shard by now.
        """
        await process.end_trace(self.settings)
        await process.end(self._announcing)
        if self._registration is not None:
            await self._registration.stop(deregister=not handed_over)
        await self._routes.stop()
        if self._lead is None:
            await self.server.stop()
        else:
            self.shard.resign()
        await self._links.stop()
        await self._others.stop()
        await process.end(self._disk_jobs)
        await self.shard.stop()
