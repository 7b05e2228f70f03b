"""What others and operators ask of a replica: its status and snapshot, who leads, who is a member.

Each decision is a compare-and-set of the record, said in words first; done when it is `confirmed`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from duemq.errors import DuemqError, InvalidArgument, ReadOnly, Unavailable
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.messages import Reason
from duemq_server.replication.protocol.record import (
    HeldRecord,
    MemberChange,
    Record,
    Refused,
    ReplicaId,
)
from duemq_server.replication.running import snapshots, wire
from duemq_server.replication.running.following.campaign import Campaign
from duemq_server.replication.running.leading import Leading
from duemq_server.replication.running.leading.handing_over import HAND_OVER_S
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.replication.running.service import Service, Term
from duemq_server.replication.running.state import ReplicaState
from duemq_server.replication.running.threads import in_thread
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving.server import Server

log = logging.getLogger(__name__)

NOT_LEADING = Reason.NOT_LEADING.name
ANSWER_S = 0.1
"""What an operator asked for is answered before the process begins anew."""


class Life(Protocol):
    """The replica that is asked; all but the first three are there once it has `started`."""

    settings: ReplicaSettings
    server: Server
    service: Service
    started: bool
    me: ReplicaId
    state: ReplicaState
    store: RecordStore
    campaign: Campaign
    leading: Leading | None
    term: Term | None

    @property
    def record(self) -> Record | None:
        """As it is known."""
        ...

    def refusal(self) -> DuemqError | None:
        """Why it does not lead; None: it does."""
        ...


class Operators:
    """Implements servicer.AskedReplica.  Owns nothing."""

    def __init__(self, life: Life) -> None:
        self._life = life

    @property
    def leading(self) -> Leading | None:
        """See Member."""
        return self._life.leading

    def why_not(self) -> str:
        """See Member."""
        text = "this replica does not lead"
        reason = self._life.campaign.reason if self._life.started else ""
        # What another one said of itself is told by nobody else: two could do so in turns.
        return text if not reason or NOT_LEADING in reason else f"{text}: {reason}"

    async def send_snapshot(
        self,
        request: pb.GetSnapshotRequest,
        write: Callable[[pb.SnapshotPart], Awaitable[None]],
    ) -> None:
        """See Member."""
        life, leading = self._life, self._life.leading
        led = leading and leading.leader.record
        asked = request.group, request.store_id, request.epoch
        if not leading or not led or asked != (led.group, led.store_id, led.epoch):
            raise Unavailable("this replica does not lead that group in that epoch", field="epoch")
        log_start = life.state.log.start_position  # before the checkpoint, which needs it
        with leading.kept.sending(log_start, request.replica):
            older = not request.replica  # that release does not say who gets it
            leaving = await in_thread(life.service.snapshot, older)
            if leaving is None:
                raise ReadOnly("there is no checkpoint yet: try again")
            try:
                await write(pb.SnapshotPart(log_start=log_start))
                await snapshots.send(
                    leaving, life.settings.catch_up_rate, write, leading.leader.is_over
                )
            finally:
                leaving.close()

    def status(self) -> pb.ReplicaStatus:
        """See Member."""
        life = self._life
        self._check_started()
        state, record, campaign, leading = life.state, life.record, life.campaign, life.leading
        committed = leading.leader.high_watermark if leading else campaign.copy.committed
        return pb.ReplicaStatus(
            group=life.settings.name,
            replica=wire.to_replica_id(life.me),
            role=campaign.role,
            epoch=record.epoch if record is not None else 0,
            log_start=state.log.start_position,
            log_end=state.log.end_position,
            durable=state.log.durable_position,
            committed=committed,
            applied=state.applied if life.term is None else committed,
            record=records.encode(record).decode() if record is not None else "",
            reason=campaign.reason or (leading.reason if leading else ""),
            history=[pb.Change(**change._asdict()) for change in campaign.history.changes],
            log_epoch=campaign.copy.epochs.last,
        )

    async def hand_over(self, to: str) -> pb.HandOverResponse:
        """See Member."""
        life = self._life
        leading, term = life.leading, life.term
        if leading is None:
            raise life.refusal() or Unavailable("this replica does not lead", field="leader")
        if term is None:
            raise Unavailable(
                f"replica {life.me.name} of {life.settings.name} only prepares to lead:"
                f" {leading.reason or 'try again'}",
                field="leader",
            )
        if to == life.me.name:
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
        leading.answering = True
        life.server.drain()
        term.quiesce()
        try:
            leader = await leading.hand_over(HAND_OVER_S, to)
            return pb.HandOverResponse(leader=leader, epoch=leading.leader.epoch + 1)
        finally:  # without a successor it stands again, like any other
            asyncio.get_running_loop().call_later(ANSWER_S, leading.give_up)

    async def adopt(self, *, confirmed: bool, accept_loss: bool = False) -> str:
        """See Member."""
        life = self._life
        self._check_idle()
        campaign = life.campaign
        found = await self._read()
        if found is not None and found.record.epoch >= campaign.copy.epochs.last:
            raise InvalidArgument(
                f"the record of {life.settings.name} is there, of epoch {found.record.epoch}:"
                " nothing is to be adopted",
                field="replica",
                value=life.settings.replica,
            )
        wanted = records.adopted(
            found.record if found is not None else None,
            group=life.settings.name,
            members=frozenset(life.settings.replicas),
            me=life.me,
            store_id=life.state.store_id,
            last_epoch=campaign.copy.epochs.last,
            leap=_leap(),
            formers=campaign.copy.formers,
        )
        if accept_loss:
            wanted = records.renamed(wanted, _new_store_id())
        end = life.state.log.end_position
        text = f"{life.me} with {end} bytes of log is {life.settings.name}'s history from now on"
        if accept_loss:
            text += ", as a new store"
        text = await self._decide(found, wanted, text, confirmed=confirmed)
        return self._with_next(text) if confirmed and accept_loss else text

    async def elect(self, *, confirmed: bool) -> str:
        """See Member."""
        life, campaign = self._life, self._life.campaign
        self._check_idle()
        found = await self._read()
        if found is None:
            raise InvalidArgument("there is no record: adopt a replica instead", field="replica")
        last = campaign.copy.epochs.last
        try:
            campaign.copy.check_history(found.record)
            wanted = records.elected(found.record, life.me, _new_store_id(), last, _leap())
        except Refused as refused:
            raise InvalidArgument(str(refused), field="replica") from refused
        if campaign.role == "follower":
            raise InvalidArgument(
                f"{life.me.name} is in sync and hears {found.record.leader}, which leads:"
                " `duemq replica lead` moves the leader, and nothing is lost",
                field="replica",
                value=life.settings.replica,
            )
        lost = ", ".join(sorted(map(str, found.record.in_sync - {life.me}))) or "nobody else"
        text = (
            f"{life.me} leads with {life.state.log.end_position} bytes of log;"
            f" what only {lost} has is lost"
        )
        if found.record.leader not in (None, life.me):
            text += f", and {found.record.leader} leads no more"
        text = await self._decide(found, wanted, text, confirmed=confirmed)
        return self._with_next(text) if confirmed else text

    async def change_members(self, change: MemberChange, *, confirmed: bool) -> str:
        """See Member."""
        life = self._life
        if life.leading is None:
            raise life.refusal() or Unavailable("this replica does not lead", field="leader")
        text = life.leading.members.would(change)
        if confirmed:
            await life.leading.members.make(change)
            log.warning("an operator decided: %s", text)
        return text

    def _with_next(self, text: str) -> str:
        """With what is to be done after a loss that was accepted."""
        return "; ".join(filter(None, (text, self._life.service.after_loss())))

    def _check_started(self) -> None:
        if not self._life.started:
            raise Unavailable("this replica is about to start")

    def _check_idle(self) -> None:
        life = self._life
        self._check_started()
        if life.leading is not None:
            refusal = "this replica leads: nothing is to be decided"
        elif life.campaign.streams.installing is not None:
            refusal = "a snapshot takes the place of its log just now: try again"
        elif life.campaign.unfit:
            refusal = f"it would not lead: {life.campaign.unfit}"
        else:
            return
        raise InvalidArgument(refusal, field="replica", value=life.settings.replica)

    async def _read(self) -> HeldRecord | None:
        try:
            return await self._life.store.read()
        except StoreError as error:
            raise Unavailable(f"the record cannot be read: {error}") from error

    async def _decide(
        self, found: HeldRecord | None, wanted: Record, text: str, *, confirmed: bool
    ) -> str:
        if not confirmed:
            return text
        log.warning("an operator decides: %s", text)  # who asked may not wait until it is done
        try:
            await self._life.store.swap(found.version if found is not None else None, wanted)
        except Conflict as conflict:
            # Its own, or its takeover by that: what stands between may have asked twice.
            epoch = conflict.found.record.epoch if conflict.found is not None else 0
            if epoch - wanted.epoch not in (0, 1):
                text = f"nothing was done, for the record changed meanwhile: {conflict}"
                raise Unavailable(text) from conflict
        except StoreError as error:
            raise Unavailable(
                f"the store has not answered, and it may be done yet: {error}; look at"
                " `duemq replica status` before you ask again"
            ) from error
        return text


def _new_store_id() -> int:
    return int.from_bytes(secrets.token_bytes(8), "little")


def _leap() -> int:
    """At random: who decides twice may have forgotten the first time, as the store has."""
    return records.LEAP_MIN + secrets.randbelow(records.LEAP_MIN)
