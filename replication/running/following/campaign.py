"""A replica that does not lead: it follows whom the record names, and stands when nobody does."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from duemq.errors import Corrupt
from duemq.transport.retrying import Backoff
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.election import Decision, Election
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import Follower, StreamBroken
from duemq_server.replication.protocol.record import Found, Record, Refused, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import snapshots
from duemq_server.replication.running.applying import Applying
from duemq_server.replication.running.following import Following
from duemq_server.replication.running.history import Change, History
from duemq_server.replication.running.log_writing import LogWriting
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.replication.running.snapshots import Snapshot
from duemq_server.replication.running.state import ReplicaState
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.storage.errors import DiskFull, StorageError, UnknownVersion

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at all that says what to do; at the record by `Store.look_s`."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
"""Between two streams to one leader."""


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
    ) -> None:
        """`address`: where others reach this replica."""
        self.me = me
        self.found: Found | None = None
        """The record as it was seen last."""
        self.epochs = Epochs(state.epochs)
        self.committed = state.committed
        """What is known to be."""
        self.renewed_ms = 0
        """When the renewal of the lease began that came before the takeover."""
        self.on_role: Callable[[str], None] = lambda role: None
        """Told of another role."""
        self.on_epoch: Callable[[int], Awaitable[None]] = _nothing
        """Told when another epoch's EPOCH entry is committed."""
        self._told_epoch = self.epochs.last
        self.role = "joining"
        self.reason = ""
        self.history = History()
        self.state = state
        self._group = group
        self._members = members
        self._min = min_insync
        self._times = times
        self._store = store
        self._address = address
        self._election = Election(me, random.random, times)
        self._news = asyncio.Event()
        self._looked_ms = 0
        self._hurried_ms = 0  # looks often until then
        self._stream: asyncio.Task[None] | None = None
        self._follower: Follower | None = None
        self._installing: asyncio.Task[None] | None = None
        self._backoff = Backoff(RETRY_S_MIN, RETRY_S_MAX)
        self._retry_ms = 0
        self._read_ms = steady_ms()  # when the read began that told what is in the store
        self._away = ""  # why the store does not answer
        self._begin_log()

    def _begin_log(self) -> None:
        self.epochs.truncate(self.state.log.end_position)
        self.writing = LogWriting(self.state.log)
        self.applying = Applying(self.state)
        self.applying.advance(self.committed)
        self.work = [
            asyncio.create_task(self.applying.run(), name="apply"),
            asyncio.create_task(self.applying.keep(), name="checkpoint"),
        ]
        self.writing.start()

    async def end_log(self) -> None:
        """Writes no log and applies nothing any more."""
        await self.writing.stop()
        async with self.applying.lock:
            for task in self.work:
                task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)

    # -- the loop -----------------------------------------------------------------------------

    async def won(self) -> Found:
        """Returns when this replica has taken the record over: it follows nobody any more.

        Raises StorageError, Internal when the disk or what it derives fails.
        """
        while True:
            fresh = self._is_due()
            if fresh:
                await self._look()
            self._check_work()
            await self._tell_epoch()
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

    async def _tell_epoch(self) -> None:
        begins = self.epochs.begins
        if not begins or begins[-1].epoch <= self._told_epoch:
            return
        if self.state.applied > begins[-1].start:  # it is committed: nobody truncates it
            with suppress(DiskFull):  # the next look tries again
                await self.on_epoch(begins[-1].epoch)
                self._told_epoch = begins[-1].epoch

    def _is_due(self) -> bool:
        """Whether to look at the record: often for a while after a stream ended, for who leads
        next may need this replica at once; else as often as the store likes."""
        now = steady_ms()
        look_s = LOOK_S if now < self._hurried_ms else self._store.look_s
        return self._news.is_set() or now - self._looked_ms >= look_s * 1000

    def _check_work(self) -> None:
        if self._installing is not None:  # the log and what applies it have ended for that
            if not self._installing.done():
                return
            with suppress(StreamBroken):  # another one is fetched
                self._installing.result()
            self._installing = None
        for task in (*self.work, self.writing.failed):
            if task.done():
                task.result()

    async def _look(self) -> None:
        self._news.clear()
        self._looked_ms = began_ms = steady_ms()
        try:
            self.found = await self._store.read()
        except StoreError as error:
            self._away = f"the record cannot be read: {error}"
            self._note(self.role, self._away)
        else:
            self._away = ""
            self._read_ms = began_ms
            self._election.saw(self.found, began_ms)
        try:
            if not self._away:
                await self._announce()
            await self._follow()  # whom it knows: what leads needs no store while all are there
        except Refused as refused:
            self._note("joining", str(refused))

    def _note(self, role: str, reason: str) -> None:
        if (role, reason) == (self.role, self.reason):
            return
        if role != self.role:
            self.on_role(role)
        self.role, self.reason = role, reason
        epoch = self.found.record.epoch if self.found is not None else 0
        if self.history.note(Change(now_ms(), role, epoch, reason)):
            log.info("%s%s", role, f": {reason}" if reason else "")

    async def _announce(self) -> None:
        """Rule 7; a log from before there were replicas is the group's if nobody else was there."""
        found, state = self.found, self.state
        known = found.record if found is not None else None
        end = state.log.end_position
        if known is None and end and not self.epochs.last:
            wanted: Record | None = records.adopted(
                None,
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

    async def _swap(self, wanted: Record) -> str | None:
        """The new version; None: somebody was faster, or nobody answered."""
        version = self.found.version if self.found is not None else None
        try:
            return await self._store.swap(version, wanted)
        except Conflict:
            self._news.set()  # it is read again, with its lease
        except StoreError as error:
            self._note(self.role, f"the record cannot be changed: {error}")
        return None

    # -- following ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        record = self.found.record if self.found is not None else None
        if record is None or record.leader in (None, self.me):
            return
        if self.state.log.disk_full:
            await self._leave()  # so that the leader goes on without it
            self._note("joining", "its disk is full")
            return
        if self._stream is not None:
            followed = self._follower.record if self._follower is not None else record
            if (followed.epoch, followed.leader) != (record.epoch, record.leader):
                await self._leave()
            elif not self._stream.done():
                return
        if steady_ms() < self._retry_ms:
            return
        await self._begin(record)

    async def _begin(self, record: Record) -> None:
        state = self.state
        await self._take_store_id(record)
        self._follower = Follower(
            self.me,
            record,
            self.epochs,
            start=state.log.start_position,
            end=state.log.end_position,
            durable=state.log.durable_position,
            committed=self.committed,
        )
        following = Following(
            self._follower,
            state.log,
            self.writing,
            self.applying,
            self._times,
            self._address,
            on_heard=self._heard,
            on_asked=self._asked,
        )
        work = self._run(following, record.address)
        self._stream = asyncio.create_task(work, name=f"following {record.leader}")

    async def _take_store_id(self, record: Record) -> None:
        """The group's; another one where an operator accepted a loss.  Raises Refused."""
        self.check_history(record)
        if self.state.store_id != record.store_id:
            await self.applying.alone(self.state.rename, record.store_id)

    def check_history(self, record: Record) -> None:
        """Epochs of two groups may be the same: a log is the group's by its store id, or empty.

        Raises Refused.
        """
        state = self.state
        known = state.store_id in (record.store_id, *record.formers)
        if state.log.end_position and not known:
            raise Refused(
                f"the log in {state.log.directory} is another one's (store {state.store_id:016x},"
                f" the group's is {record.store_id:016x}): start with an empty directory"
            )

    async def _run(self, following: Following, address: str) -> None:
        follower = self._follower
        assert follower is not None
        try:
            needed = await following.run(address)
            await self._install(address, follower.record, needed.log_start)
        except (StreamBroken, Refused) as error:
            self._note("joining", str(error))
        except (StorageError, ValueError) as error:
            log.exception("it cannot be followed")
            self._note("joining", f"{type(error).__name__}: {error}")
        finally:
            self.committed = max(self.committed, follower.committed)
            if following.welcomed:
                self._backoff.reset()
            self._retry_ms = steady_ms() + round(self._backoff.next_s() * 1000)
            self._hurried_ms = steady_ms() + 2 * self._times.lease_ms
            self._news.set()

    async def _install(self, address: str, record: Record, log_start: int) -> None:
        self._note("learner", f"its log ends before {log_start}: it takes a snapshot")
        payload = await snapshots.fetch(address, record)
        self._installing = asyncio.create_task(self._put(payload), name="installing a snapshot")
        await asyncio.shield(self._installing)

    async def _put(self, snapshot: Snapshot) -> None:
        """To its end, whoever leads meanwhile: what ends half-way needs a new start."""
        await self.end_log()
        state = self.state
        try:
            await asyncio.to_thread(state.install, snapshot.data, snapshot.log_start)
        except (ValueError, Corrupt, UnknownVersion) as error:  # and nothing has changed
            self._begin_log()
            raise StreamBroken(f"the leader's snapshot is of no use: {error}") from error
        self.committed = state.committed
        self.epochs = Epochs(state.epochs)
        self._begin_log()

    def _heard(self) -> None:
        self._election.heard(steady_ms())
        found, follower = self.found, self._follower
        if found is not None and follower is not None:
            self.committed = max(self.committed, follower.committed)
            in_sync = self.me in found.record.in_sync
            self._note("follower" if in_sync else "learner", self._away)

    def _asked(self) -> None:
        self._election.asked()
        self._news.set()

    async def _leave(self) -> None:
        """Answers nobody any more."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.gather(self._stream, return_exceptions=True)
            self._stream = None
        if self._installing is not None:
            await asyncio.wait((self._installing,))

    # -- standing -----------------------------------------------------------------------------

    async def _stand(self) -> Found | None:
        found = self.found
        if found is None:
            return None
        await self._leave()
        if self._follower is not None:
            self.epochs.truncate(self.state.log.end_position)
        try:
            wanted = records.taken_over(
                found.record,
                self.me,
                address=self._address,
                last_epoch=self.epochs.last,
                min_insync=self._min,
                now_ms=now_ms(),
            )
            await self._take_store_id(wanted)
            self.renewed_ms = steady_ms()
            await self._store.renew(self.me)
        except (Refused, StoreError) as error:
            self._note("joining", str(error))
            return None
        version = await self._swap(wanted)
        if version is None:
            await self._give_up_lease()
            return None
        self.found = Found(version, wanted)
        self._note("preparing", "")
        return self.found

    async def _give_up_lease(self) -> None:
        try:
            await self._store.release(self.me)
        except StoreError as error:
            log.debug("a lease that is not needed stays: %s", error)

    def leads(self) -> None:
        """What it was left is committed and applied."""
        self._note("leader", "")

    async def end(self) -> None:
        """Follows nobody and writes no log: another one does, or nobody."""
        await self._leave()
        await self.end_log()


async def _nothing(_: int) -> None:
    pass
