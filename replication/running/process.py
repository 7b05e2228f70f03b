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
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor

from duemq.errors import DuemqError, InvalidArgument, ReadOnly, Timeout, Unavailable
from duemq.v1 import nameserver_pb2
from duemq_server.replication import disk_id
from duemq_server.replication.disk_id import DiskId
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import MemberChange, Record, Refused, ReplicaId
from duemq_server.replication.running import servicer, wire
from duemq_server.replication.running.campaign import Campaign
from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.metrics import ReplicaCollector
from duemq_server.replication.running.record_store import RecordStore, open_store
from duemq_server.replication.running.servicer import ReplicationServicer
from duemq_server.replication.running.snapshots import Snapshot
from duemq_server.replication.running.state import ReplicaState
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving import process
from duemq_server.serving.process import BeginAnew
from duemq_server.serving.server import Server
from duemq_server.storage.disk import RealDisk

log = logging.getLogger(__name__)

HAND_OVER_S = 5.0
"""How long a clean stop waits for a successor."""
ANSWER_S = 0.1
"""What an operator asked for is answered before the process begins anew."""


class Term(Protocol):
    """What serves clients while this replica leads."""

    async def start(self) -> None:
        """Ready for clients when it returns."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises what ends it early."""
        ...

    def quiesce(self) -> None:
        """Appends nothing more; what was accepted is still answered."""
        ...

    async def stop(self, *, handed_over: bool) -> None:
        """Ends it; with `handed_over`, another replica serves its name already."""
        ...


class Service(Protocol):
    """What is replicated: a broker, a timer shard."""

    @property
    def services(self) -> Sequence[ServiceDescriptor]:
        """What clients call; only a leader answers."""
        ...

    def open(self) -> ReplicaState:
        """Opens the data directory.  Waits for the disk."""
        ...

    def lead(self, state: ReplicaState, leading: Leading, server: Server) -> Term:
        """All of the log is applied; the state is the term's from now on."""
        ...

    def snapshot(self) -> bytes | None:
        """The last checkpoint that was saved; None: there is none yet.  Waits for the disk."""
        ...


class Replica:
    """See the module.  Implements serving.process.Process."""

    def __init__(self, settings: ReplicaSettings, service: Service) -> None:
        self.settings = settings
        self.server = Server(settings)
        self.leading: Leading | None = None
        self._service = service
        self._term: Term | None = None
        self._begins_anew = False
        self._failed = False
        self._started = False
        self._marks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Opens the data and serves replicas; clients, when it leads."""
        settings = self.settings
        self._state = await asyncio.to_thread(self._service.open)
        known = await asyncio.to_thread(self._disk_id)
        self.me = ReplicaId(settings.replica, known.id.hex())
        self._store = RecordStore(open_store(settings))
        self.server.add(servicer.SERVICE, ReplicationServicer(self))
        self.server.expect(self._service.services, self._refusal)
        await self.server.start()
        self._campaign = Campaign(
            self.me,
            settings.name,
            frozenset(settings.replicas),
            settings.in_sync_min,
            settings.times(),
            self._state,
            self._store,
            self.server.advertised,
        )
        self._campaign.on_role = self._role_changed
        self._campaign.on_epoch = self._note_epoch
        self._started = True
        self.server.registry.register(ReplicaCollector(self.status, self._replicas))
        log.info("replica %s of %s", self.me, settings.name)

    def _replicas(self) -> list[nameserver_pb2.ReplicaReport]:
        return self.leading.replicas() if self.leading is not None else []

    def _role_changed(self, role: str) -> None:
        """Ready is who may be left alone with what is acknowledged: a leader, or who is in sync."""
        mark = self.server.ready if role in ("follower", "leader") else self.server.not_ready
        task = asyncio.get_running_loop().create_task(mark(servicer.SERVICE))
        self._marks.add(task)
        task.add_done_callback(self._marks.discard)

    def _disk_id(self) -> DiskId:
        """Rule 5: whoever has lost what was durable is another disk."""
        data_dir, disk = self.settings.data_dir, RealDisk()
        fresh = secrets.token_bytes(disk_id.DISK_ID_BYTES)
        known = disk_id.load_or_make(data_dir, disk, fresh)
        last = max((epoch for epoch, _ in self._state.epochs), default=0)
        if self._state.lost or last < known.epoch:
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

    def _refusal(self) -> DuemqError | None:
        leading = self.leading
        if self._term is not None and leading is not None and leading.serves():
            return None
        record = self._record
        address = record.address if record is not None and record.leader != self.me else ""
        who = (
            f"{record.leader.name} does, at {address}"
            if address and record and record.leader
            else "nobody is known to"
        )
        return Unavailable(
            f"replica {self.settings.replica} of {self.settings.name} does not lead: {who}",
            field="leader",
            value=address,
        )

    @property
    def _record(self) -> Record | None:
        if self.leading is not None:
            return self.leading.leader.record
        if not self._started:
            return None
        found = self._campaign.found
        return found.record if found is not None else None

    # -- roles ------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.  Raises BeginAnew, and what ends it early."""
        try:
            campaign = self._campaign
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
        except BaseException:
            self._failed = True
            raise

    async def _lead(self, stop: asyncio.Event) -> None:
        campaign, settings = self._campaign, self.settings
        assert campaign.found is not None
        try:
            leading = Leading(
                self.me,
                campaign.found,
                campaign.epochs,
                self._state.log,
                self._store,
                committed=campaign.committed,
                min_insync=settings.in_sync_min,
                times=settings.times(),
                catch_up_rate=settings.catch_up_rate,
                address=self.server.advertised,
            )
        except Refused as refused:
            raise BeginAnew(str(refused)) from refused
        self.leading = leading
        leading.advance = campaign.applying.advance
        campaign.writing.on_durable = leading.synced
        leading.began_to_renew(campaign.renewed_ms)
        leading.start()
        prepared = asyncio.create_task(self._prepare(leading), name="preparing")
        try:
            await self._while_leading(stop, prepared, campaign.writing.failed, *campaign.work)
        finally:
            await process.end(prepared)
        if not stop.is_set():
            await self._serve(leading, stop)

    async def _prepare(self, leading: Leading) -> None:
        await leading.prepared()
        await self._campaign.applying.reach(self._state.log.end_position)
        await self._note_epoch(leading.leader.epoch)

    async def _serve(self, leading: Leading, stop: asyncio.Event) -> None:
        await self._campaign.end_log()
        self._term = term = self._service.lead(self._state, leading, self.server)
        await term.start()
        self._campaign.leads()
        await self.server.ready()
        served = asyncio.create_task(term.run(stop), name="term")
        try:
            await self._while_leading(stop, served, leading.no_space)
            if leading.no_space.done() and not stop.is_set():
                await self._give_way(leading, term, stop)
        finally:
            await process.end(served)

    async def _give_way(self, leading: Leading, term: Term, stop: asyncio.Event) -> None:
        log.error("the disk is full: another replica shall lead")
        leading.leader.resign()
        await self.server.drain()
        term.quiesce()
        with suppress(Timeout):
            await leading.hand_over(HAND_OVER_S)
        if not stop.is_set():
            raise BeginAnew("its disk is full")

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
        leading = self.leading
        if leading is not None and self._term is not None:
            await self._stop_leading(leading, self._term)
        else:
            if leading is not None:
                await leading.stop()
            await self._campaign.end()
            if not self._failed:  # else what is applied may be half of it
                await asyncio.to_thread(self._state.checkpoint)
            self._state.close()
        await self.server.stop()
        try:
            await self._store.release(self.me)
        except StoreError as error:
            log.info("the lease runs out by itself: %s", error)
        self._store.close()

    async def _stop_leading(self, leading: Leading, term: Term) -> None:
        leading.leader.resign()
        await self.server.drain()
        term.quiesce()
        successor = ""
        try:
            # Who has failed commits no more: it ends, and others see that.
            successor = "" if self._failed else await leading.hand_over(HAND_OVER_S)
            log.info("%s leads from now on", successor or "another one")
        except Timeout as error:
            log.warning("stops without a successor: %s", error)
        await term.stop(handed_over=bool(successor))
        await leading.stop()

    # -- what is asked of it ----------------------------------------------------------------------

    async def snapshot(self, request: pb.GetSnapshotRequest) -> Snapshot:
        """See Member."""
        if self.leading is None or self.leading.leader.epoch != request.epoch:
            raise Unavailable("this replica does not lead in that epoch", field="epoch")
        log_start = self._state.log.start_position
        data = await asyncio.to_thread(self._service.snapshot)
        if data is None:
            raise ReadOnly("there is no checkpoint yet: try again")
        return Snapshot(log_start, data)

    def status(self) -> pb.ReplicaStatus:
        """See Member."""
        self._check_started()
        state, record, campaign = self._state, self._record, self._campaign
        committed = self.leading.leader.high_watermark if self.leading else campaign.committed
        return pb.ReplicaStatus(
            group=self.settings.name,
            replica=wire.to_replica_id(self.me),
            role=campaign.role,
            epoch=record.epoch if record is not None else 0,
            log_start=state.log.start_position,
            log_end=state.log.end_position,
            durable=state.log.durable_position,
            committed=committed,
            applied=state.applied if self._term is None else committed,
            record=records.encode(record).decode() if record is not None else "",
            reason=campaign.reason or (self.leading.reason if self.leading else ""),
            history=[pb.Change(**change._asdict()) for change in campaign.history.changes],
        )

    async def hand_over(self, to: str) -> pb.HandOverResponse:
        """See Member."""
        leading, term = self.leading, self._term
        if leading is None:
            raise self._refusal() or Unavailable("this replica does not lead", field="leader")
        if term is None:
            raise Unavailable(
                f"replica {self.me.name} of {self.settings.name} only prepares to lead:"
                f" {leading.reason or 'try again'}",
                field="leader",
            )
        if to == self.me.name:
            return pb.HandOverResponse(leader=to, epoch=leading.leader.epoch)
        able = leading.followers()
        if not able or (to and to not in able):
            others = ", ".join(sorted(able)) or "no others"
            raise InvalidArgument(
                f"to: {to!r} cannot lead: in sync and heard of are {others}",
                field="to",
                value=to,
                limit="a replica that is in sync",
            )
        await self._read()  # who cannot take over must not be waited for
        leading.leader.resign()
        await self.server.drain()
        term.quiesce()
        try:
            leader = await leading.hand_over(HAND_OVER_S, to)
            return pb.HandOverResponse(leader=leader, epoch=leading.leader.epoch + 1)
        finally:  # without a successor it stands again, like any other
            asyncio.get_running_loop().call_later(ANSWER_S, leading.give_up)

    async def adopt(self, *, confirmed: bool) -> str:
        """See Member."""
        self._check_idle()
        campaign = self._campaign
        found = await self._read()
        if found is not None and found.record.epoch >= campaign.epochs.last:
            raise InvalidArgument(
                f"the record of {self.settings.name} is there, of epoch {found.record.epoch}:"
                " nothing is to be adopted",
                field="replica",
                value=self.settings.replica,
            )
        wanted = records.adopted(
            found.record if found is not None else None,
            group=self.settings.name,
            members=frozenset(self.settings.replicas),
            me=self.me,
            store_id=self._state.store_id,
            last_epoch=campaign.epochs.last,
        )
        end = self._state.log.end_position
        text = f"{self.me} with {end} bytes of log is {self.settings.name}'s history from now on"
        return await self._decide(found, wanted, text, confirmed=confirmed)

    async def elect(self, *, confirmed: bool) -> str:
        """See Member."""
        self._check_idle()
        found = await self._read()
        if found is None:
            raise InvalidArgument("there is no record: adopt a replica instead", field="replica")
        try:
            self._campaign.check_history(found.record)
        except Refused as refused:
            raise InvalidArgument(str(refused), field="replica") from refused
        store_id = int.from_bytes(secrets.token_bytes(8), "little")
        wanted = records.elected(found.record, self.me, store_id, self._campaign.epochs.last)
        if self._campaign.role == "follower":
            raise InvalidArgument(
                f"{self.me.name} is in sync and hears {found.record.leader}, which leads:"
                " `duemq replica lead` moves the leader, and nothing is lost",
                field="replica",
                value=self.settings.replica,
            )
        lost = ", ".join(sorted(map(str, found.record.in_sync - {self.me}))) or "nobody else"
        text = (
            f"{self.me} leads with {self._state.log.end_position} bytes of log;"
            f" what only {lost} has is lost"
        )
        if found.record.leader not in (None, self.me):
            text += f", and {found.record.leader} leads no more"
        return await self._decide(found, wanted, text, confirmed=confirmed)

    async def change_members(self, change: MemberChange, *, confirmed: bool) -> str:
        """See Member."""
        if self.leading is None:
            raise self._refusal() or Unavailable("this replica does not lead", field="leader")
        text = self.leading.members.would(change)
        if confirmed:
            await self.leading.members.make(change)
            log.warning("an operator decided: %s", text)
        return text

    def _check_started(self) -> None:
        if not self._started:
            raise Unavailable("this replica is about to start")

    def _check_idle(self) -> None:
        self._check_started()
        if self.leading is not None:
            raise InvalidArgument(
                "this replica leads: nothing is to be decided",
                field="replica",
                value=self.settings.replica,
            )

    async def _read(self) -> records.Found | None:
        try:
            return await self._store.read()
        except StoreError as error:
            raise Unavailable(f"the record cannot be read: {error}") from error

    async def _decide(
        self, found: records.Found | None, wanted: Record, text: str, *, confirmed: bool
    ) -> str:
        if not confirmed:
            return text
        try:
            await self._store.swap(found.version if found is not None else None, wanted)
        except Conflict as conflict:
            raise Unavailable(f"the record changed meanwhile: {conflict}") from conflict
        except StoreError as error:
            raise Unavailable(f"the record cannot be changed: {error}") from error
        log.warning("an operator decided: %s", text)
        return text
