"""A leader's term: the shell around the core (replication/protocol/leader.py).

What runs by itself, all of it started here:

lease-renewal   renews the lease, in a thread (lease.py)
set             admits and removes followers, settles what was asked of the store
a stream each   sends what is written (shipping.py)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from duemq.v1 import nameserver_pb2
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.in_sync import InSyncState, Swap
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Hello
from duemq_server.replication.protocol.record import HeldRecord, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running.leading.blocked import Blocked
from duemq_server.replication.running.leading.handing_over import HandingOver
from duemq_server.replication.running.leading.lease import Lease
from duemq_server.replication.running.leading.log_kept import LogKept
from duemq_server.replication.running.leading.members import MemberChanges
from duemq_server.replication.running.leading.roster import Roster
from duemq_server.replication.running.leading.shipping import Shipping
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at the set, when nothing happens."""
READ_S = 1.0
"""Between two looks at the record: nobody tells a leader that it does not lead any more."""
FULL_MS = 1_000
"""A disk may be full for a moment."""
STALL_MS = 30_000
"""A disk that ends no sync for so long, while others' do, is as good as lost."""


class Leading:
    """One term.  Used from one event loop."""

    def __init__(
        self,
        me: ReplicaId,
        found: HeldRecord,
        epochs: Epochs,
        replica_log: ReplicaLog,
        store: RecordStore,
        *,
        committed: int,
        min_insync: int,
        times: Times,
        catch_up_rate: int,
        address: str,
    ) -> None:
        """`found`: the record as the takeover left it.  Raises Refused if that was overtaken."""
        self.leader = Leader(
            me,
            found,
            epochs,
            start=replica_log.end_position,
            committed=committed,
            min_insync=min_insync,
            now_ms=steady_ms(),
            times=times,
            log_start=replica_log.start_position,
        )
        self.advance: Callable[[int], None] = lambda position: None
        """Told what is committed; changes with who takes it."""
        self.on_change: Callable[[], None] = lambda: None
        """Told when the set of replicas or who is blocked is another."""
        self._loop = asyncio.get_running_loop()
        self.deposed: asyncio.Future[None] = self._loop.create_future()
        """Ends when somebody else leads, or will."""
        self.answering = False
        """Whoever asked for another leader is told before the term is given up, and does it."""
        self.no_space: asyncio.Future[None] = self._loop.create_future()
        """Ends when there was no space for FULL_MS, and another replica could lead."""
        self.short_of_space: Callable[[], bool] = lambda: False
        """Whether nothing is accepted here for want of space, although writes would find some."""
        self._blocked = Blocked(self.leader, min_insync, times.lag_max_ms)
        self._away = ""  # why the store does not answer
        self._unanswered = False  # the last change that was asked for
        self._log = replica_log
        self._store = store
        self._times = times
        self._told = committed
        self._look_now = asyncio.Event()
        self.members = MemberChanges(self.leader, min_insync, self._look_now)
        """What an operator asks for."""
        self.kept = LogKept(self.leader)
        """What of the log those need who catch up."""
        self._moved = asyncio.Event()
        self._lease = Lease(self.leader, store, times, self._look_now)
        self._full_ms: int | None = None  # since when the disk is full
        self._idle_ms: int | None = None  # since when each look found that it does not serve
        self._set_task: asyncio.Task[None] | None = None
        self._roster = Roster(now_ms, address)
        self._shipping = Shipping(
            self.leader,
            replica_log,
            times,
            rate=catch_up_rate,
            look_now=self._look_now,
            on_answer=self._tell,
            on_follower=self._roster.came,
        )
        self._handing_over = HandingOver(self.leader, replica_log, store, self._shipping)

    # -- the term ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Appends the EPOCH entry; from now on others may follow.  Raises DiskFull, LogFull."""
        leader = self.leader
        self._log.committed = lambda: leader.high_watermark
        self._log.on_written = self._written
        self._log.append(
            epoch.KIND, [epoch.encode(leader.epoch, bytes.fromhex(leader.me.disk), now_ms())]
        )
        self._lease.start()
        self._set_task = asyncio.create_task(self._keep_set(), name="set")
        log.info("leads epoch %d from %d on", leader.epoch, leader.start)

    async def prepared(self) -> None:
        """Returns when all is committed that the log held when it began to lead."""
        while not self.leader.prepared:
            self._moved.clear()
            await self._moved.wait()

    async def stop(self) -> None:
        """Ends the streams and the loops; the lease is the caller's to release."""
        self._shipping.end()
        if self._set_task is not None:
            self._set_task.cancel()
            await asyncio.gather(self._set_task, return_exceptions=True)
        await self._lease.stop()
        self._log.on_written = lambda position: None
        for future in (self.deposed, self.no_space):
            if not future.done():
                future.cancel()

    def ended(self) -> asyncio.Future[None]:
        """Of what runs all the time: it must not end by itself."""
        assert self._set_task is not None
        return self._set_task

    def give_up(self) -> None:
        """The term is over, whoever leads next."""
        self.members.end()
        if not self.deposed.done():
            self.deposed.set_result(None)

    def serves(self) -> bool:
        """Whether it may answer reads that do not pass through the log."""
        return self.leader.serves(steady_ms())

    def log_needed_from(self) -> int | None:
        """The log from there on is to be kept for others; None: it is not, or there is no space."""
        return None if self.short_of_space() else self.kept.needed_from(steady_ms())

    def synced(self, position: int) -> None:
        """The leader's own log is durable up to there."""
        self.leader.synced(position)
        self._tell()

    def _tell(self) -> None:
        committed = self.leader.high_watermark
        if committed > self._told:
            self._told = committed
            self.advance(committed)
            self._moved.set()

    def _written(self, _: int) -> None:
        self._loop.call_soon_threadsafe(self._shipping.wake)

    def began_to_renew(self, began_ms: int) -> None:
        """See Lease.began."""
        self._lease.began(began_ms)

    # -- the set ----------------------------------------------------------------------------------

    async def _keep_set(self) -> None:
        read_ms = steady_ms()
        while not (self.leader.deposed or self._is_cut_off() or self._is_held_up()):
            self._lease.alive()
            self._look_now.clear()
            self._look_at_disk()
            await self._confirm()
            asked = self.members.next()
            await self._ask(asked or self.leader.change(steady_ms()))
            if asked is not None:
                self._look_now.set()  # whoever asked is told at once
            unknown = self.leader.set.state is InSyncState.UNKNOWN
            if unknown or steady_ms() - read_ms >= READ_S * 1000:
                read_ms = steady_ms()
                await self._read()
            self._show()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()
            except TimeoutError:
                continue
        reason = "somebody else leads"
        if not self.leader.deposed and self._is_held_up():
            reason = "its disk stalls, and others' do not"
            await self._let_go()
        elif not self.leader.deposed:
            reason = "it reaches neither store nor all"
        log.warning("epoch %d is over: %s", self.leader.epoch, reason)
        self._shipping.wake()
        if self.answering:
            await asyncio.wait((self.deposed,))
        self.give_up()

    async def _confirm(self) -> None:
        """Changes nothing but the record's version."""
        renewed_ms = self._lease.lapsed_ms
        if renewed_ms is None or self.leader.set.state is not InSyncState.SETTLED:
            return
        await self._ask(self.leader.set.propose(self.leader.record.in_sync))
        if self.leader.set.state is InSyncState.SETTLED and not self.leader.deposed:
            self._lease.confirmed(renewed_ms)

    def _is_cut_off(self) -> bool:
        """For a lease it neither could commit, nor serve, nor ask for another set: another one may.

        Followers that hear it do not stand.  A moment is not enough: whoever begins anew while the
        store is away from all knows no record, and leads nothing until it is back.
        """
        if self.serves() or self.leader.resigned:
            self._idle_ms = None
            return False
        now = steady_ms()
        if self._idle_ms is None:
            self._idle_ms = now
        return min(self._lease.silent_ms, now - self._idle_ms) >= self._times.lease_ms

    def _is_held_up(self) -> bool:
        """Nothing is committed for want of its own disk: another one can."""
        stalls = self._blocked.stalled_ms >= STALL_MS
        return stalls and not self.leader.resigned and self.leader.is_outrun()

    async def _let_go(self) -> None:
        """Of the lease: the process may not end before its disk goes on."""
        self.leader.resign()
        self._shipping.end()
        await self._lease.stop()
        with suppress(StoreError):  # then it runs out
            await self._store.release(self.leader.me)

    def _look_at_disk(self) -> None:
        """Another replica may have space, or a disk that works."""
        now, full = steady_ms(), self._log.disk_full
        if not full and not self.short_of_space():
            self._full_ms = None
        elif self._full_ms is None:
            self._full_ms = now
        elif (
            now - self._full_ms >= FULL_MS
            and not self.no_space.done()
            # Two that are short of it would relieve each other for ever.
            and self.leader.may_relieve(with_space=not full)
        ):
            self.no_space.set_result(None)

    async def _read(self) -> None:
        try:
            found = await self._store.read()
        except StoreError as error:
            log.debug("the record cannot be read: %s", error)
            self._away = f"the record cannot be read: {error}"
            return
        self._away = ""
        self._lease.reached()
        settled = self.leader.set.state is InSyncState.SETTLED
        swap = self.leader.read(found)
        if settled and swap is not None:
            log.error("the record is not what this leader wrote last: it is written again")
        await self._ask(swap)

    async def _ask(self, swap: Swap | None) -> None:
        while swap is not None:
            try:
                version = await self._store.swap(swap.version, swap.record)
            except Conflict as conflict:
                swap = self.leader.lost(swap.number, conflict.found)
            except StoreError as error:
                if not self._unanswered:  # it is asked for again and again
                    log.warning("a change of who is in sync is not answered: %s", error)
                self._unanswered = True
                self.leader.unanswered(swap.number)
                return
            else:
                self._unanswered = False
                self.leader.won(swap.number, version)
                record = self.leader.record
                in_sync = ", ".join(sorted(map(str, record.in_sync)))
                log.info("members %s; in sync: %s", ", ".join(sorted(record.members)), in_sync)
                swap = None
        self._tell()

    def _show(self) -> None:
        """Tells if somebody looks different."""
        now = steady_ms()
        unsynced = self._log.written_position > self._log.durable_position
        blocked = self._blocked.look(now, unsynced=unsynced)
        if self._roster.look(self.leader, blocked, self.kept.receivers(now)):
            self.on_change()

    def replicas(self) -> list[nameserver_pb2.ReplicaReport]:
        """Every member of the group as of now, for the nameservers."""
        return self._roster.reports(self.leader, self._log.end_position, steady_ms())

    # -- what others do ---------------------------------------------------------------------------

    async def serve(
        self, hello: Hello, address: str, requests: AsyncIterator[Any], context: Any
    ) -> None:
        """See Shipping.serve."""
        await self._shipping.serve(hello, address, requests, context)

    async def hand_over(self, timeout_s: float, to: str = "") -> str:
        """See HandingOver.run."""
        return await self._handing_over.run(timeout_s, to)

    @property
    def reason(self) -> str:
        """What keeps it from committing, or its store from answering; for operators."""
        return self._blocked.reason or self._away

    @property
    def blocked(self) -> tuple[str, ...]:
        """Names of those without whom nothing is committed: see Blocked."""
        return self._blocked.names

    def followers(self) -> set[str]:
        """Who is in sync and follows."""
        in_sync = self.leader.record.in_sync
        return {p.replica.name for p in self.leader.followers.values() if p.replica in in_sync}
