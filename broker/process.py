"""A broker's process: its parts, how they are wired, in which order they start and stop.

What runs by itself, all of it started here:

commitlog-writer  two threads: write and sync what was appended, in groups (storage/writer.py)
checkpoint        saves the state each interval, or sooner when much was written (checkpoints.py)
key index         builds the runs of what a checkpoint holds, in a thread (key_indexer.py)
upkeep            retention, idle producers, free space, the clock (upkeep.py)
rates             samples how far queues and groups are (sampler.py)
groups            sessions of groups' members (edge/coordinator_servicer.py)
registration      heartbeats to the nameservers (serving/registration.py)
routes            the cluster's routes, for the groups (duemq.transport)
disk-reader       threads: pulls of what memory does not hold (edge/pulls/disk_reads.py)

Shutdown, in this order: leave the nameservers, so that clients turn to others; health says
NOT_SERVING; parked pulls are answered, and members save how far they are; streams end after their
last answers; calls end; the loops end; the writer syncs what is left; the last checkpoint makes the
next start short.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import group_pb2, nameserver_pb2
from duemq_server import __version__
from duemq_server.broker.checkpoints import Checkpoints
from duemq_server.broker.edge import (
    admin_servicer,
    broker_servicer,
    group_admin_servicer,
    message_admin_servicer,
    timer_admin_servicer,
)
from duemq_server.broker.edge.admin_servicer import About, AdminServicer
from duemq_server.broker.edge.broker_servicer import BrokerServicer, OnlyMeant
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.coordinator_servicer import CoordinatorServicer, FromOutside
from duemq_server.broker.edge.group_admin_servicer import GroupAdminServicer
from duemq_server.broker.edge.group_metrics import GroupCollector
from duemq_server.broker.edge.message_admin_servicer import MessageAdminServicer
from duemq_server.broker.edge.metrics import Meters, StoreCollector
from duemq_server.broker.edge.offset_requests import OffsetRequests
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.edge.send_back_requests import SendBackRequests
from duemq_server.broker.edge.send_requests import SendRequests
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from duemq_server.broker.group_store import GroupFile, GroupLog
from duemq_server.broker.groups.coordinator import Coordinator
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.key_indexer import KeyIndexer
from duemq_server.broker.log_loop import LogLoop
from duemq_server.broker.sampler import Sampler
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import group_changes
from duemq_server.broker.store.keys.key_builder import KeyBuilder
from duemq_server.broker.store.recovery import Opened
from duemq_server.broker.upkeep import Upkeep
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.serving.metrics import TraceCollector
from duemq_server.serving.registration import Registration
from duemq_server.serving.server import Server
from duemq_server.storage import starts
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import DiskFailed, DiskFull, StorageError

if TYPE_CHECKING:  # a broker without replicas need not load it
    from duemq_server.replication.running.leading import Leading

log = logging.getLogger(__name__)


# Members hear that the broker leaves, let go of its queues, and say how far they are.  What they do
# not say is delivered again.
FAREWELL_S = 2.0


def _boot_id() -> bytes:
    """Names this run of the machine: as long as it goes on, what was written is not lost."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip()
    except OSError:
        return secrets.token_bytes(16)


class Lead(NamedTuple):
    """What a replica that leads hands to its broker: the server serves, and outlives it."""

    leading: "Leading"
    opened: Opened
    server: Server


class Broker:
    """One broker.  `start`, then `run` until told to stop, then `stop`."""

    def __init__(self, settings: Settings, lead: Lead | None = None) -> None:
        """`lead`: its log has replicas."""
        self.settings = settings
        self._lead = lead
        self._leading = lead.leading if lead is not None else None
        self.server = lead.server if lead is not None else Server(settings)
        self.replicas: Callable[[], Sequence[nameserver_pb2.ReplicaReport]] = tuple
        """The group's replicas as its leader sees them now, for the nameservers; of a lone broker
        none.  Asked with each heartbeat; `registration.changed()` sends one at once."""
        self._disk = RealDisk()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, announced: bool = True) -> None:
        """Opens the data, serves, and registers.

        Raises StorageError, OSError, InvalidArgument if another store has this broker's name.
        """
        began = time.monotonic()
        lead = self._lead
        self._opened = lead.opened if lead is not None else await asyncio.to_thread(self._open)
        self.store = store = self._opened.store
        log.info(
            "log %d to %d, checkpoint at %d, %d entries replayed, open after %.3f s",
            store.log.start_position,
            store.log.end_position,
            self._opened.checkpoint_position,
            self._opened.replayed_entries,
            time.monotonic() - began,
        )
        try:
            self.registration = Registration(
                self.settings.nameservers,
                self.settings.heartbeat_period,
                await self._began_ms(),
                self._report,
                formers=self._leading.leader.record.formers if self._leading is not None else (),
                tls=self.settings.tls,
            )
            known_to = await self.registration.check_free()
            if lead is None and known_to > store.log.end_position:
                await asyncio.to_thread(
                    recovery.leave_out_lost, store, known_to, self.settings.data_dir, self._disk
                )
        except BaseException:
            store.close()
            raise
        self._wire(self._opened)
        self._log_loop.start()
        if lead is None:
            await self.server.start(announced=announced)
        else:
            store.ensure_timer_topic()
            self.replicas = lead.leading.replicas
            lead.leading.on_change = self._replicas_changed
            self._replicas_changed()
        store.on_report = self.registration.changed
        self._routes.start()
        self.registration.start()
        for name, work in (
            ("checkpoint", self._checkpoints.run(self.settings.checkpoint_interval)),
            ("key index", self._key_indexer.run()),
            ("upkeep", self._upkeep.run()),
            ("rates", self._sampler.run()),
            ("groups", self._groups.run()),
        ):
            self._tasks.append(asyncio.create_task(work, name=name))
        self.server.ready()
        process.trace("duemq-broker", self.settings)

    async def _began_ms(self) -> int:
        """Later than that of every process before, so that nameservers take this one for newer."""
        if self._leading is not None:  # of two that call themselves leaders, the later one counts
            return self._leading.leader.record.registered_ms
        return await asyncio.to_thread(starts.begin, self.settings.data_dir, self._disk, now_ms())

    def _replicas_changed(self) -> None:
        assert self._leading is not None
        away = ", ".join(self._leading.blocked)
        self.store.refusal = f"not enough replicas are in sync: {away} missing" if away else ""
        self.registration.changed()

    def _open(self) -> Opened:
        return recovery.open_store(
            self.settings.data_dir,
            self._disk,
            self.settings.store_settings(),
            segment_bytes=self.settings.segment_bytes,
            unsynced_boot=_boot_id() if self.settings.flush_mode == "async" else b"",
        )

    def _wire(self, opened: Opened) -> None:
        settings, server, store = self.settings, self.server, opened.store
        meters = Meters(server.registry)
        # A replica leads when all of its log is committed.
        self._commits = commits = Commits(store.log.durable_position)
        self._log_loop = LogLoop(
            store, commits, meters, settings, self._leading, unsynced=opened.unsynced
        )
        self._activity = activity = Activity()
        self._sampler = Sampler(store, activity, steady_ms)
        self._group_store = self._choose_group_store()
        coordinator = self._coordinator()
        owner, name = coordinator.owner, settings.name
        offsets = OffsetRequests(store, commits, activity, now_ms, steady_ms, owner, name)
        self._sends = SendRequests(
            store,
            commits,
            meters,
            now_ms,
            steady_ms,
            broker=settings.name,
            store_id=opened.store_id,
            traced=settings.tracing != "off",
        )
        self._pulls = PullRequests(
            store, offsets, meters, steady_ms, opened.store_id, activity, server.unsent
        )
        pulls = self._pulls
        server.registry.register(
            StoreCollector(store, lambda: len(pulls), lambda: pulls.parked_queues)
        )
        about = About(settings.name, opened.store_id, __version__, now_ms())
        admin = AdminServicer(store, commits, self._pulls, activity, about, self._sampler.in_per_s)
        self._key_indexer = KeyIndexer(store, KeyBuilder(settings.data_dir, self._disk), meters)
        self._checkpoints = Checkpoints(
            store,
            commits,
            self._log_loop,
            meters,
            settings.data_dir,
            self._disk,
            self._key_indexer.saved,
        )
        self._upkeep = Upkeep(store, commits, meters, settings, self._disk, now_ms, steady_ms)
        self._routes = RouteWatcher(settings.nameservers, tls=settings.tls)
        server.registry.register(TraceCollector())
        server.registry.register(GroupCollector(store, activity, coordinator, now_ms))
        self._groups = CoordinatorServicer(
            coordinator,
            self._routes.cache,
            store.offsets,
            self._group_store,
            server.draining,
            put_groups=lambda: store.groups,
        )
        group_admin = GroupAdminServicer(
            store,
            commits,
            self._pulls,
            coordinator,
            activity,
            self._groups.forget,
            self._sampler.consumed_per_s,
            now_ms,
        )
        self._messages = MessageAdminServicer(store, commits, activity, settings.name)
        self._routes.on_change(self._groups.routes_changed)
        timers = TimerAdminServicer(store, commits, opened.store_id, now_ms, steady_ms)
        broker = BrokerServicer(
            self._sends,
            self._pulls,
            offsets,
            SendBackRequests(store, commits, now_ms, settings.name),
            timers,
        )
        for service, servicer, overrides in (
            (broker_servicer.SERVICE, broker, broker_servicer.OVERRIDES),
            (admin_servicer.SERVICE, admin, None),
            (group_pb2.DESCRIPTOR.services_by_name["GroupCoordinator"], self._groups, None),
            (group_admin_servicer.SERVICE, group_admin, None),
            (message_admin_servicer.SERVICE, self._messages, None),
            (timer_admin_servicer.SERVICE, timers, None),
        ):
            outside = FromOutside(self._groups) if servicer is self._groups else servicer
            server.add(
                service,
                OnlyMeant(servicer, timers),
                overrides,
                outside=OnlyMeant(outside, timers),
            )

    def _choose_group_store(self) -> GroupFile | GroupLog:
        data_dir, store = self.settings.data_dir, self.store
        if self._lead is None and not store.tables.epochs.begins:
            return GroupFile(data_dir, self._disk)
        # Also of a broker whose log had replicas, and may have again: one place, none is stale.
        return GroupLog(store, self._commits, data_dir, self._disk)

    def _coordinator(self) -> Coordinator:
        coordinator = Coordinator(
            self.settings.name,
            session_timeout_ms=int(self.settings.session_timeout * 1000),
            groups_max=self.settings.groups_max,
            check_known=partial(group_changes.check_known, self.store),
        )
        self._group_store.restore(coordinator.table, now_ms())
        return coordinator

    def _report(self) -> nameserver_pb2.BrokerReport:
        writable = self.store.writable
        replicas = self.replicas()
        return nameserver_pb2.BrokerReport(
            name=self.settings.name,
            address=self.server.advertised,
            external_address=self.settings.external_advertised or self.server.external_address,
            store_id=self._opened.store_id,
            topics=[
                nameserver_pb2.TopicQueues(
                    topic=topic.name,
                    queues=topic.queues,
                    readable=True,
                    writable=writable,
                    topic_id=topic.id,
                )
                for topic in self.store.topics
            ],
            replicas=replicas,
            epoch=max((each.epoch for each in replicas), default=0),
            log_end=self.store.log.durable_position if self._lead is None else 0,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.

        Raises Internal or StorageError when the disk or a loop fails, InvalidArgument when the name
        is another's.
        """
        await process.until(stop, self._log_loop.failed, self.registration.refused, *self._tasks)

    async def _say_farewell(self) -> None:
        """Nothing more is given to groups; returns when they have committed what they were given.

        Or when it has lasted long enough.
        """
        self._pulls.close()
        find, activity = self.store.offsets.find, self._activity
        behind = activity.behind(find)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(FAREWELL_S, self.settings.drain_timeout)):
                while behind := [key for key in behind if activity.is_behind(key, find(key))]:
                    await self._commits.progress()

    def quiesce(self) -> None:
        """Takes nothing more; what it took is answered when it is committed."""
        self._pulls.close()
        self._messages.close()
        self._sends.close()

    async def stop(self, *, handed_over: bool = False) -> None:
        """Clean stop; the order is explained above.

        `handed_over`: another replica serves this broker's name by now.
        """
        await process.end_trace(self.settings)  # through this broker: while it serves
        await self.registration.stop(deregister=not handed_over)
        await self._routes.stop()
        if self._lead is None:
            self.server.drain()
            await self._say_farewell()
            self.quiesce()
            await self.server.stop()
        await process.end(*self._tasks)
        await asyncio.to_thread(self._key_indexer.close)
        healthy = await self._log_loop.stop()
        note, takes = (
            (recovery.closed, "this stop for an unclean one")
            if healthy
            else (recovery.failed, "what was acknowledged before it was synced for durable")
        )
        try:
            note(self.settings.data_dir, self._disk)
        except (StorageError, OSError) as error:
            log.error("the next start takes %s: %s", takes, error)
        committed = self._commits.position >= self.store.log.end_position
        if healthy and committed and not self.store.log.disk_full:
            try:
                await self._checkpoints.save()
            except (DiskFull, DiskFailed) as error:  # of an index, perhaps: the log is whole
                log.error("no last checkpoint, the next start takes longer: %s", error)
        self.store.close()
