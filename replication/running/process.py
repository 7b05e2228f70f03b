"""A process that is one replica of a group: it follows until it leads, and leads until it ends.

    joining ── follows ──► in sync ── stands, wins ──► preparing ── EPOCH committed ──► leading

A leader whose time is over begins anew as a process (serving.process.BeginAnew): nothing that it
had in memory, and nobody had committed, outlives it.

Clean stop of a leader: it accepts no more; whoever has all takes over; then it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from functools import partial

from duemq.errors import DuemqError, Timeout, Unavailable
from duemq.v1 import nameserver_pb2
from duemq_server.replication import disk_id, formers
from duemq_server.replication.disk_id import DiskId
from duemq_server.replication.protocol.record import Record, Refused, ReplicaId
from duemq_server.replication.running import servicer
from duemq_server.replication.running.following.campaign import Campaign
from duemq_server.replication.running.following.founding import Founding
from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.leading.handing_over import HAND_OVER_S
from duemq_server.replication.running.metrics import ReplicaCollector
from duemq_server.replication.running.operators import Operators
from duemq_server.replication.running.record_store import RecordStore, open_store
from duemq_server.replication.running.service import Service, Term
from duemq_server.replication.running.servicer import ReplicationServicer
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.store import StoreError
from duemq_server.serving import process
from duemq_server.serving.process import BeginAnew
from duemq_server.serving.server import Server
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import DiskFailed, DiskFull, LogFull

log = logging.getLogger(__name__)


class Replica:
    """See the module.  Implements serving.process.Process."""

    def __init__(self, settings: ReplicaSettings, service: Service) -> None:
        self.settings = settings
        self.server = Server(settings)
        self.service = service
        self.operators = Operators(self)
        self._founding = Founding(settings.nameservers, settings.name, service.kind, settings.tls)
        self.leading: Leading | None = None
        """From when it has won."""
        self.term: Term | None = None
        """From when it serves clients."""
        self.started = False
        """`state`, `store` and `campaign` are there."""
        self._begins_anew = False
        self._failed = False

    async def start(self) -> None:
        """Opens the data and serves replicas; clients, when it leads."""
        settings = self.settings
        self.state = await asyncio.to_thread(self.service.open)
        known = await asyncio.to_thread(self._disk_id)
        self.me = ReplicaId(settings.replica, known.id.hex())
        self.store = RecordStore(open_store(settings))
        self.server.add(servicer.SERVICE, ReplicationServicer(self.operators), inside_only=True)
        outside = partial(self.refusal, outside=True)
        self.server.expect(self.service.services, self.refusal, outside=outside)
        await self.server.start()
        former_ids = await asyncio.to_thread(formers.load, settings.data_dir, RealDisk())
        self.campaign = Campaign(
            self.me,
            settings.name,
            frozenset(settings.replicas),
            settings.in_sync_min,
            settings.times(),
            self.state,
            self.store,
            self.server.advertised,
            self._not_to_found,
            tls=settings.tls,
        )
        self.campaign.on_role = self._role_changed
        self.campaign.copy.on_epoch = self._note_epoch
        self.campaign.copy.formers = former_ids
        self.campaign.copy.keep_formers = partial(formers.save, settings.data_dir, RealDisk())
        self.campaign.copy.short_of_space = self.service.short_of_space
        self.started = True
        self.server.registry.register(ReplicaCollector(self.operators.status, self._replicas))
        log.info("replica %s of %s", self.me, settings.name)
        if settings.in_sync_min == len(set(settings.replicas)) > 1:
            log.warning(
                "all %d replicas of %s must be there, for min_insync is %d: while one that follows"
                " is away nothing is accepted, while the one that leads is nothing is read, either",
                settings.in_sync_min,
                settings.name,
                settings.in_sync_min,
            )

    async def _not_to_found(self, now_ms: int) -> str:
        """As Campaign asks for it."""
        return self.service.not_to_found() or await self._founding.refusal(now_ms)

    def _replicas(self) -> list[nameserver_pb2.ReplicaReport]:
        return self.leading.replicas() if self.leading is not None else []

    def _role_changed(self, role: str) -> None:
        """Ready is who may be left alone with what is acknowledged: a leader, or who is in sync."""
        self.server.ready(servicer.SERVICE, serving=role in ("follower", "leader"))

    def _disk_id(self) -> DiskId:
        """Rule 5: whoever has lost what was durable is another disk."""
        data_dir, disk = self.settings.data_dir, RealDisk()
        fresh = secrets.token_bytes(disk_id.DISK_ID_BYTES)
        known = disk_id.load_or_make(data_dir, disk, fresh)
        last = max((epoch for epoch, _ in self.state.epochs), default=0)
        if self.state.lost or last < known.epoch:
            log.error(
                "the log has lost what was durable (it is of epoch %d, has been of %d):"
                " this disk counts as a new one",
                last,
                known.epoch,
            )
            return disk_id.save(data_dir, disk, DiskId(fresh))
        return known

    async def _note_epoch(self, epoch: int) -> None:
        """The log holds the EPOCH entry of this one."""
        known = DiskId(bytes.fromhex(self.me.disk), epoch)
        await asyncio.to_thread(disk_id.save, self.settings.data_dir, RealDisk(), known)

    def refusal(self, *, outside: bool = False) -> DuemqError | None:
        """Why it does not lead; None: it does.

        `outside`: for who came through the external port, and cannot reach the leader's address;
        its external one only nameservers know.
        """
        leading = self.leading
        if self.term is not None and leading is not None and leading.serves():
            return None
        record = self.record
        address = record.address if record is not None and record.leader != self.me else ""
        who = "nobody is known to"
        if address and record and record.leader:
            who = f"{record.leader.name} does" + ("" if outside else f", at {address}")
        elif self.term is None and leading is not None and leading.reason:
            who = f"it prepares to; {leading.reason}"
        return Unavailable(
            f"replica {self.settings.replica} of {self.settings.name} does not lead: {who}",
            field="leader",
            value="" if outside else address,
        )

    @property
    def record(self) -> Record | None:
        """As it is known."""
        if self.leading is not None:
            return self.leading.leader.record
        if not self.started:
            return None
        found = self.campaign.found
        return found.record if found is not None else None

    # -- roles ------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises BeginAnew, and what ends it early."""
        try:
            campaign = self.campaign
            won = asyncio.create_task(campaign.won(), name="campaign")
            try:
                await process.until(stop, won)
            finally:
                await process.end(won)
            if not stop.is_set():
                await self._lead(stop)
        except BeginAnew:
            self._begins_anew = True
            raise
        except (DiskFull, LogFull) as full:  # for a snapshot, or to lead: a start goes on
            self._begins_anew = True
            log.error("its disk has no space, or stalls: %s", full)
            if self.leading is not None:  # it would win again, and not lead
                await self._give_way(self.leading, self.term, stop)
            raise BeginAnew("its disk has no space, or stalls") from full
        except BaseException:
            self._failed = True
            raise

    async def _lead(self, stop: asyncio.Event) -> None:
        campaign, settings = self.campaign, self.settings
        assert campaign.found is not None
        try:
            leading = Leading(
                self.me,
                campaign.found,
                campaign.copy.epochs,
                self.state.log,
                self.store,
                committed=campaign.copy.committed,
                min_insync=settings.in_sync_min,
                times=settings.times(),
                catch_up_rate=settings.catch_up_rate,
                address=self.server.advertised,
            )
        except Refused as refused:
            raise BeginAnew(str(refused)) from refused
        leading.advance = campaign.copy.applying.advance
        leading.short_of_space = self.service.short_of_space
        campaign.copy.writing.on_durable = leading.synced
        leading.began_to_renew(campaign.renewed_ms)
        leading.start()
        self.leading = leading
        leading.synced(self.state.log.durable_position)  # a full disk would never tell
        prepared = asyncio.create_task(self._prepare(leading), name="preparing")
        work = campaign.copy.writing.failed, *campaign.copy.work
        try:
            await self._while_leading(stop, prepared, leading.no_space, *work)
            is_prepared = prepared.done()
        finally:
            await process.end(prepared)
        if stop.is_set():
            return
        if is_prepared:
            await self._serve(leading, stop)
        else:
            await self._give_way(leading, None, stop)

    async def _prepare(self, leading: Leading) -> None:
        await leading.prepared()
        await self.campaign.copy.applying.reach(self.state.log.end_position)
        try:
            await self._note_epoch(leading.leader.epoch)
        except DiskFull as error:  # the log has the epoch; who ended here would come back, and end
            log.error("that its log holds epoch %d is not noted: %s", leading.leader.epoch, error)

    async def _serve(self, leading: Leading, stop: asyncio.Event) -> None:
        await self.campaign.copy.end()
        term = self.service.lead(self.state, leading, self.server)
        await term.start()
        self.term = term  # before that, its services are not there yet, nor what a stop ends
        self.campaign.leads()
        self.server.ready()
        served = asyncio.create_task(term.run(stop), name="term")
        try:
            await self._while_leading(stop, served, leading.no_space)
            if leading.no_space.done() and not stop.is_set():
                await self._give_way(leading, term, stop)
        finally:
            await process.end(served)

    async def _give_way(self, leading: Leading, term: Term | None, stop: asyncio.Event) -> None:
        """`term`: None while it only prepares to lead."""
        log.error("the disk has no space: another replica shall lead")
        leading.leader.resign()
        if term is not None:
            self.server.drain()
            term.quiesce()
        with suppress(Timeout):
            await leading.hand_over(HAND_OVER_S)
        if not stop.is_set():
            raise BeginAnew("its disk has no space")

    async def _while_leading(self, stop: asyncio.Event, *work: asyncio.Future[None]) -> None:
        """Returns when `stop` is set or some of `work` ends.  Raises BeginAnew when deposed."""
        leading = self.leading
        assert leading is not None
        await process.until(stop, leading.deposed, leading.ended(), *work)
        if leading.deposed.done() and not stop.is_set():
            raise BeginAnew(f"epoch {leading.leader.epoch} is over")

    async def stop(self) -> None:
        """Clean stop; a leader hands over first.  Nothing is stopped where all begins anew."""
        if self._begins_anew:
            return
        leading, term, successor = self.leading, self.term, ""
        if leading is not None and term is not None:
            successor = await self._hand_over(leading, term)
        if leading is not None:
            await leading.stop()
        # A disk that stalls holds up the rest, and must not hold up who leads next.
        await self._release_lease()
        if term is not None:
            await term.stop(handed_over=bool(successor))
        else:
            await self.campaign.end()
            if not self._failed:  # else what is applied may be half of it
                try:
                    await asyncio.to_thread(self.state.checkpoint)
                except (DiskFull, DiskFailed) as error:  # the next start applies it once more
                    log.error("stops without a checkpoint: %s", error)
            self.state.close()
        await self.server.stop()
        self.store.close()

    async def _release_lease(self) -> None:
        try:
            await self.store.release(self.me)
        except StoreError as error:
            log.info("the lease runs out by itself: %s", error)

    async def _hand_over(self, leading: Leading, term: Term) -> str:
        """Who leads next; empty: nobody is known to."""
        leading.leader.resign()
        self.server.drain()
        term.quiesce()
        successor = ""
        try:
            # Who has failed commits no more: it ends, and others see that.
            successor = "" if self._failed else await leading.hand_over(HAND_OVER_S)
            log.info("%s leads from now on", successor or "another one")
        except Timeout as error:
            log.warning("stops without a successor: %s", error)
        return successor
