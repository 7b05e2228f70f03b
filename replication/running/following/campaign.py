"""A replica that does not lead: it follows whom the record names, and stands when nobody does."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from duemq.settings import Tls
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.election import Decision, Election
from duemq_server.replication.protocol.record import HeldRecord, Record, Refused, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running.following.history import History, RoleChange
from duemq_server.replication.running.following.log_copy import LogCopy
from duemq_server.replication.running.following.streams import Streams
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.replication.running.state import ReplicaState
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.storage.errors import DiskFull

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at all that says what to do; at the record by `Store.look_s`."""
DISK_FULL = "its disk is full"


class Campaign:
    """Until this replica leads.  Used from one event loop.

    `history` and `reason` are for operators.
    """

    def __init__(
        self,
        me: ReplicaId,
        group: str,
        members: frozenset[str],
        min_insync: int,
        times: Times,
        state: ReplicaState,
        store: RecordStore,
        address: str,
        not_to_found: Callable[[int], Awaitable[str]] | None = None,
        *,
        tls: Tls | None = None,
    ) -> None:
        """`address`: where others reach this replica.

        `not_to_found` says, at that time, why no group is to be founded with an empty log.
        """
        self.me = me
        self.found: HeldRecord | None = None
        """The record as it was seen last."""
        self.copy = LogCopy(state)
        self.streams = Streams(me, self.copy, times, address, self, tls)
        self.renewed_ms = 0
        """When the renewal of the lease began that came before the takeover."""
        self.on_role: Callable[[str], None] = lambda role: None
        """Told of another role."""
        self.role = "joining"
        self.reason = ""
        self.history = History()
        self._state = state
        self._group = group
        self._members = members
        self._min = min_insync
        self._times = times
        self._store = store
        self._address = address
        self._not_to_found = not_to_found
        self._election = Election(me, random.random, times, address)
        self._news = asyncio.Event()
        self._looked_ms = 0
        self._hurried_ms = 0  # looks often until then
        self._read_ms = steady_ms()  # when the read began that told what is in the store
        self._away = ""  # why the store does not answer

    # -- the loop -----------------------------------------------------------------------------

    async def won(self) -> HeldRecord:
        """Returns when this replica has taken the record over: it follows nobody any more.

        Raises StorageError, Internal when the disk or what it derives fails.
        """
        while True:
            if self._is_due():
                await self._look()
            if self.streams.installed():
                self.copy.check()
            await self.copy.tell_epoch()
            # As of the read: a lease that was seen then may have been renewed since.
            if self._election.decide(self._read_ms) is Decision.STAND:
                found = await self._stand()
                if found is not None:
                    return found
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _is_due(self) -> bool:
        """Whether to look at the record: often for a while after a stream ended, for who leads
        next may need this replica at once; else as often as the store likes."""
        now = steady_ms()
        look_s = LOOK_S if now < self._hurried_ms else self._store.look_s
        return self._news.is_set() or now - self._looked_ms >= look_s * 1000

    async def _look(self) -> None:
        self._news.clear()
        self._looked_ms = began_ms = steady_ms()
        try:
            self.found = await self._store.read()
        except StoreError as error:
            self._away = f"the record cannot be read: {error}"
            self.note(self.role, self._away)
        else:
            self._away = ""
            self._read_ms = began_ms
            # What it found may be as young as the answer: the leader may have renewed its lease
            # after a slow read began.
            self._election.saw(self.found, steady_ms())
            if self._election.doubled:
                self.note("joining", self._doubled())
        try:
            if not self._away:
                await self._announce()
            await self._follow()  # whom it knows: what leads needs no store while all are there
        except (Refused, DiskFull) as error:  # DiskFull: of the group's store id
            self.note("joining", str(error))

    def _doubled(self) -> str:
        at = self.found.record.address if self.found is not None else ""
        return (
            f"another process, at {at}, leads with the disk of this one, {self.me}: the data"
            " directory of one is a copy of the other's; start the copy with an empty one"
        )

    def note(self, role: str, reason: str) -> None:
        """Its role, and the reason for it."""
        if (role, reason) == (self.role, self.reason):
            return
        if role != self.role:
            self.on_role(role)
        self.role, self.reason = role, reason
        epoch = self.found.record.epoch if self.found is not None else 0
        if self.history.note(RoleChange(now_ms(), role, epoch, reason)):
            log.info("%s%s", role, f": {reason}" if reason else "")

    async def _announce(self) -> None:
        """Rule 7; a log from before there were replicas is the group's if nobody else was there,
        or none but empty ones, whichever came first.  Part of one is not: an operator decides."""
        found, state = self.found, self._state
        known = found.record if found is not None else None
        end = state.log.end_position
        founding = known is None or not known.epoch
        absent = known is None or self.me not in known.in_sync
        if founding and absent and not end:
            await self._check_founding()
        whole = not self.copy.epochs.last and not state.log.catching_up
        if founding and end and whole:
            wanted: Record | None = records.adopted(
                known,
                group=self._group,
                members=self._members,
                me=self.me,
                store_id=state.store_id,
                last_epoch=0,
            )
        else:
            wanted = records.announced(
                known,
                group=self._group,
                members=self._members,
                me=self.me,
                store_id=state.store_id,
                log_end=end,
            )
        if wanted is not None:
            await self._swap(wanted)

    async def _check_founding(self) -> None:
        """Raises Refused."""
        if self._not_to_found is None:
            return
        if reason := await self._not_to_found(steady_ms()):
            raise Refused(reason)

    async def _swap(self, wanted: Record) -> str | None:
        """The new version; None: somebody was faster, or nobody answered."""
        version = self.found.version if self.found is not None else None
        try:
            return await self._store.swap(version, wanted)
        except Conflict:
            self._news.set()  # it is read again, with its lease
        except StoreError as error:
            self.note(self.role, f"the record cannot be changed: {error}")
        return None

    # -- following ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        record = self.found.record if self.found is not None else None
        if record is not None and not record.epoch and record.missing:
            waits = ", ".join(record.missing)
            self.note("joining", f"{self._group} is being founded: it waits for {waits}")
        if record is None or record.leader in (None, self.me):
            return
        if self._state.log.disk_full:
            await self.streams.leave()  # so that the leader goes on without it
            self.note("joining", DISK_FULL)
            return
        if record.leader.name == self.me.name and record.address == self._address:
            await self.streams.leave()
            self.note("joining", self._replaced(record, record.leader))
            return
        await self.streams.follow(record)

    def _replaced(self, record: Record, leader: ReplicaId) -> str:
        """Nobody leads where it would look for a leader: itself."""
        text = f"its disk is a new one; that of before, {leader}, led {self._group}"
        others = ", ".join(sorted(str(each) for each in record.in_sync - {leader}))
        if others:
            return f"{text}: in sync is {others}, which is to lead"
        return (
            f"{text}, and was in sync alone: with that disk back all goes on; if it is lost, see"
            " which replica has the most, then `duemq replica elect` it"
        )

    def heard(self) -> None:
        """Something came from the leader."""
        self._election.heard(steady_ms())
        if self.found is not None:
            in_sync = self.me in self.found.record.in_sync
            self.note("follower" if in_sync else "learner", self._away)

    def asked(self) -> None:
        """The leader hands over."""
        self._election.asked()
        self._news.set()

    def left(self, *, followed: bool) -> None:
        """A stream ended; `followed`: it had been of use."""
        if followed:
            self._hurried_ms = steady_ms() + 2 * self._times.lease_ms
        self._news.set()

    # -- standing -----------------------------------------------------------------------------

    @property
    def unfit(self) -> str:
        """Why it cannot lead, whatever an operator says; empty: it can."""
        # With a full disk it could not write that it leads.
        return DISK_FULL if self._state.log.disk_full else self._state.unfit

    async def _stand(self) -> HeldRecord | None:
        found = self.found
        if found is None:
            return None
        await self.streams.leave()
        if reason := self.unfit:
            self.note("joining", reason)
            return None
        if self._election.decide(self._read_ms) is not Decision.STAND:
            return None  # something came meanwhile, and its leader serves by the answer to it
        self.copy.epochs.truncate(self._state.log.end_position)
        try:
            wanted = records.taken_over(
                found.record,
                self.me,
                address=self._address,
                last_epoch=self.copy.epochs.last,
                min_insync=self._min,
                now_ms=now_ms(),
            )
            await self.copy.take_store_id(wanted)
            self.renewed_ms = steady_ms()
            await self._store.renew(self.me)
        except (Refused, StoreError, DiskFull) as error:
            self.note("joining", str(error))
            return None
        version = await self._swap(wanted)
        if version is None:
            await self._give_up_lease()
            return None
        self.found = HeldRecord(version, wanted)
        self.note("preparing", "")
        return self.found

    async def _give_up_lease(self) -> None:
        try:
            await self._store.release(self.me)
        except StoreError as error:
            log.debug("a lease that is not needed stays: %s", error)

    def leads(self) -> None:
        """What it was left is committed and applied."""
        self.note("leader", "")

    async def end(self) -> None:
        """Follows nobody and writes no log: another one does, or nobody."""
        await self.streams.leave()
        await self.copy.end()
