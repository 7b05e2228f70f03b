"""A leader's term: the shell around the core (replication/protocol/leader.py).

What runs by itself, all of it started here:

lease-renewal   renews the lease, in a thread (record_store.py)
set             admits and removes followers, settles what was asked of the store
a stream each   sends what is written, and what comes on it moves the high watermark
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from duemq.errors import Timeout
from duemq.v1 import nameserver_pb2
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.in_sync import State, Swap
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Hello, Welcome
from duemq_server.replication.protocol.record import Found, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import wire
from duemq_server.replication.running.members import MemberChanges
from duemq_server.replication.running.record_store import RecordStore, Renewals
from duemq_server.replication.running.roster import Roster
from duemq_server.replication.stores.store import Conflict, StoreError
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at the set, when nothing happens."""
READ_S = 1.0
"""Between two looks at the record: nobody tells a leader that it does not lead any more."""
HAND_OVER_LOOK_S = 0.005
STAND_MS = 500
ALONE_MS = 500
"""A leader that nobody follows waits so long for one to come back before it stops."""
THROTTLED_BYTES_MIN = 64 * 1024
"""Of a chunk, whatever `catch_up_rate` is: the least rate is twice that a second."""
FULL_MS = 1_000
"""A disk may be full for a moment."""
ASKED_MS = 2_500
"""Who is asked to lead has left its stream, and may wait so long for the store."""
INLINE_BYTES = 8 << 20
"""So far behind the log's end its bytes are in memory; what lies before is read by a thread."""


@dataclass(slots=True)
class _Stream:
    """What the sender of one stream waits for."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    take_over: bool = False


class Leading:
    """One term.  Used from one event loop, but for `committed`."""

    def __init__(
        self,
        me: ReplicaId,
        found: Found,
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
        self.no_space: asyncio.Future[None] = self._loop.create_future()
        """Ends when the disk has been full for FULL_MS, and another replica could lead."""
        self.blocked: tuple[str, ...] = ()
        """Replicas that are in sync and do not answer, without which nothing is committed."""
        self._away = ""  # why the store does not answer
        self._log = replica_log
        self._store = store
        self._min = min_insync
        self._times = times
        self._rate = catch_up_rate
        self._told = committed
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._look_now = asyncio.Event()
        self.members = MemberChanges(self.leader, min_insync, self._look_now)
        """What an operator asks for."""
        self._moved = asyncio.Event()
        self._renewals = Renewals(store.blocking, me, times.renew_ms, self._renewed)
        self._renewed_ms = steady_ms()
        self._lapsed_ms: int | None = None
        self._reached_ms = steady_ms()  # the store answered
        self._full_ms: int | None = None  # since when the disk is full
        self._set_task: asyncio.Task[None] | None = None
        self._roster = Roster(now_ms, address)

    # -- the term ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Appends the EPOCH entry; from now on others may follow."""
        leader = self.leader
        self._log.committed = lambda: leader.high_watermark
        self._log.on_written = self._written
        self._log.append(
            epoch.KIND, [epoch.encode(leader.epoch, bytes.fromhex(leader.me.disk), now_ms())]
        )
        self._renewals.start()
        self._set_task = asyncio.create_task(self._keep_set(), name="set")
        log.info("leads epoch %d from %d on", leader.epoch, leader.start)

    async def prepared(self) -> int:
        """Where the log ended when it began to lead: all of that is committed."""
        while not self.leader.prepared:
            self._moved.clear()
            await self._moved.wait()
        return self._told

    async def stop(self) -> None:
        """Ends the streams and the loops; the lease is the caller's to release."""
        for stream in self._streams.values():
            stream.ended = True
            stream.wake.set()
        if self._set_task is not None:
            self._set_task.cancel()
            await asyncio.gather(self._set_task, return_exceptions=True)
        await self._renewals.stop()
        self._log.on_written = None
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
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for stream in self._streams.values():
            stream.wake.set()

    # -- the lease --------------------------------------------------------------------------------

    def began_to_renew(self, began_ms: int) -> None:
        """By a renewal that came before the takeover."""
        self._renewed_ms = began_ms
        self.leader.renewed(began_ms)

    def _renewed(self, began_ms: int, ended_ms: int) -> None:
        """Counts if nobody can have found that the lease had ended before it.

        A process that was stopped, or reached no store, renews a lease that another one has seen
        end.  It serves by that only when the record was changed by itself since: whoever stood
        before fails, and whoever stands after waits for a whole lease.
        """
        self._reached_ms = ended_ms
        if self._lapsed_ms is None and ended_ms - self._renewed_ms >= self._times.lease_ms:
            log.warning("the lease had ended: whether it leads is asked")
            self._lapsed_ms = began_ms
            self._look_now.set()
        self._renewed_ms = began_ms
        if self._lapsed_ms is None:
            self.leader.renewed(began_ms)

    async def _confirm(self) -> None:
        """Changes nothing but the record's version."""
        renewed_ms = self._lapsed_ms
        if renewed_ms is None or self.leader.set.state is not State.SETTLED:
            return
        await self._ask(self.leader.set.propose(self.leader.record.in_sync))
        if self.leader.set.state is State.SETTLED and not self.leader.deposed:
            self._lapsed_ms = None
            self.leader.renewed(renewed_ms)

    # -- the set ----------------------------------------------------------------------------------

    async def _keep_set(self) -> None:
        read_ms = steady_ms()
        while not self.leader.deposed and not self._is_cut_off():
            self._renewals.alive()
            self._look_now.clear()
            self._look_at_disk()
            await self._confirm()
            await self._ask(self.members.next())
            await self._ask(self.members.next() or self.leader.change(steady_ms()))
            unknown = self.leader.set.state is State.UNKNOWN
            if unknown or steady_ms() - read_ms >= READ_S * 1000:
                read_ms = steady_ms()
                await self._read()
            self._show()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()
            except TimeoutError:
                continue
        log.warning(
            "epoch %d is over: %s",
            self.leader.epoch,
            "somebody else leads" if self.leader.deposed else "it reaches neither store nor all",
        )
        self._wake()
        self.give_up()

    def _is_cut_off(self) -> bool:
        """It can neither commit nor serve, nor ask for another set: somebody else may.

        Followers that hear it do not stand.
        """
        silent_ms = steady_ms() - self._reached_ms
        return silent_ms >= self._times.lease_ms and not self.leader.resigned and not self.serves()

    def _look_at_disk(self) -> None:
        """Another replica may have space, or a disk that works."""
        now = steady_ms()
        if not self._log.disk_full:
            self._full_ms = None
        elif self._full_ms is None:
            self._full_ms = now
        elif now - self._full_ms >= FULL_MS and not self.no_space.done():
            in_sync = self.leader.record.in_sync
            if any(each.replica in in_sync for each in self.leader.followers.values()):
                self.no_space.set_result(None)

    def _note_log_start(self) -> None:
        """Retention moves it: who lacks what is before needs a snapshot, who has it may drop it."""
        self.leader.log_start = self._log.start_position

    async def _read(self) -> None:
        try:
            found = await self._store.read()
        except StoreError as error:
            log.debug("the record cannot be read: %s", error)
            self._away = f"the record cannot be read: {error}"
            return
        self._away = ""
        self._reached_ms = steady_ms()
        await self._ask(self.leader.read(found))

    async def _ask(self, swap: Swap | None) -> None:
        while swap is not None:
            try:
                version = await self._store.swap(swap.version, swap.record)
            except Conflict as conflict:
                swap = self.leader.lost(swap.number, conflict.found)
            except StoreError as error:
                log.warning("a change of who is in sync is not answered: %s", error)
                self.leader.unanswered(swap.number)
                return
            else:
                self.leader.won(swap.number, version)
                record = self.leader.record
                in_sync = ", ".join(sorted(map(str, record.in_sync)))
                log.info("members %s; in sync: %s", ", ".join(sorted(record.members)), in_sync)
                swap = None
        self._tell()

    def _show(self) -> None:
        """Tells if somebody looks different."""
        now = steady_ms()
        followers = {each.replica: each for each in self.leader.followers.values()}
        lag_max_ms = self._times.lag_max_ms
        blocked = [
            each.name
            for each in self.leader.set.counted - {self.leader.me}
            if each not in followers or now - followers[each].at_end_ms > lag_max_ms
        ]
        counted = self.leader.set.counted
        missing = self.leader.record.missing if len(counted) < self._min else []
        self.blocked = tuple(sorted({*blocked, *missing}))
        if self._roster.look(self.leader, self.blocked):
            self.on_change()

    def replicas(self) -> list[nameserver_pb2.ReplicaReport]:
        """Every member of the group as of now, for the nameservers."""
        return self._roster.reports(self.leader, self._log.end_position, steady_ms())

    # -- streams ----------------------------------------------------------------------------------

    async def serve(
        self, hello: Hello, address: str, requests: AsyncIterator[Any], context: Any
    ) -> None:
        """One follower's stream, until it ends."""
        number = next(self._numbers)
        self._note_log_start()
        greeting = self.leader.hello(number, hello, self._log.end_position, steady_ms())
        stream = self._streams[number] = _Stream()
        answers = None
        try:
            await context.write(wire.to_greeting(greeting))
            if not isinstance(greeting, Welcome):
                log.info("%s does not follow: %s", hello.replica, greeting)
                return
            log.info("%s follows from %d on", hello.replica, greeting.truncate_to)
            self._roster.came(hello.replica.name, address)
            answers = asyncio.create_task(self._hear(number, stream, requests), name="answers")
            await self._send(number, stream, context)
        finally:
            del self._streams[number]
            self.leader.broke(number)
            self._look_now.set()
            if answers is not None:
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)

    async def _hear(self, number: int, stream: _Stream, requests: AsyncIterator[Any]) -> None:
        try:
            async for message in requests:
                answer = wire.answer(message)
                self.leader.answered(number, answer, self._log.written_position, steady_ms())
                self._tell()
                stream.wake.set()  # there may be room
                if answer.replica not in self.leader.record.in_sync:
                    self._look_now.set()
        finally:
            stream.ended = True
            stream.wake.set()

    async def _send(self, number: int, stream: _Stream, context: Any) -> None:
        sent_ms = 0
        while not stream.ended and not self.leader.deposed and number in self.leader.followers:
            stream.wake.clear()
            wanted = self.leader.to_read(number, self._log.written_position)
            due_ms = sent_ms + self._times.heartbeat_ms - steady_ms()
            if wanted is None and due_ms > 0 and not stream.take_over:
                try:
                    async with asyncio.timeout(due_ms / 1000):
                        await stream.wake.wait()
                except TimeoutError:
                    pass
                continue
            data = await self._read_run(number, *wanted) if wanted is not None else b""
            if number not in self.leader.followers:
                return
            sent_ms = steady_ms()
            self._note_log_start()
            chunk = self.leader.chunk(number, data, sent_ms, take_over=stream.take_over)
            stream.take_over = False
            await context.write(wire.to_chunk(chunk))
            await self._throttle(number, len(data))

    async def _read_run(self, number: int, position: int, bytes_max: int) -> memoryview:
        if self._is_throttled(number):  # no more than until the next heartbeat, or little
            rate = self._rate * self._times.heartbeat_ms // 1000
            bytes_max = min(bytes_max, max(rate, THROTTLED_BYTES_MIN))
        if self._log.written_position - position <= INLINE_BYTES:
            return self._log.read_run(position, bytes_max)
        return await asyncio.to_thread(self._log.read_run, position, bytes_max)

    async def _throttle(self, number: int, size: int) -> None:
        """Who is not in sync gets `catch_up_rate` at most: the living come first."""
        if size and self._is_throttled(number):
            longest_s = self._times.heartbeat_ms / 1000  # who hears nothing ends its stream
            await asyncio.sleep(min(size / self._rate, longest_s))

    def _is_throttled(self, number: int) -> bool:
        progress = self.leader.followers.get(number)
        if progress is None or not self._rate:
            return False
        return progress.replica not in self.leader.set.counted

    # -- the end ----------------------------------------------------------------------------------

    async def hand_over(self, timeout_s: float, to: str = "") -> str:
        """Asks whoever has all, or the replica named, to lead; who does.  Nothing is appended now.

        Raises Timeout: nobody has all, or nobody took over; soon, if nobody follows at all.
        """
        self.leader.resign()
        asked, alone_from_ms = False, steady_ms() + ALONE_MS
        try:
            async with asyncio.timeout(timeout_s):
                while self._streams or steady_ms() < alone_from_ms:
                    if self._ask_successor(to):  # perhaps it is dead by now
                        asked, alone_from_ms = True, steady_ms() + ASKED_MS
                    leader = await self._took_over(STAND_MS if asked else 0)
                    if leader:
                        return leader
        except TimeoutError:
            pass
        raise Timeout(
            f"nobody took over within {timeout_s:g} s: in sync are"
            f" {', '.join(sorted(each.name for each in self.leader.record.in_sync))}"
            if self._streams
            else "nobody follows"
        )

    @property
    def reason(self) -> str:
        """What keeps it from committing, or its store from answering; for operators."""
        if self.blocked:
            return f"nothing is committed: it waits for {', '.join(self.blocked)}"
        return self._away

    def followers(self) -> set[str]:
        """Who is in sync and follows."""
        in_sync = self.leader.record.in_sync
        return {p.replica.name for p in self.leader.followers.values() if p.replica in in_sync}

    def _ask_successor(self, to: str) -> bool:
        """Again and again: it may have seen a record that has changed meanwhile."""
        # What a full disk does not take was acknowledged to nobody.
        log_end = self._log.written_position if self._log.disk_full else self._log.end_position
        successor = self.leader.successor(log_end, to)
        for number, progress in self.leader.followers.items():
            if progress.replica == successor and number in self._streams:
                self._streams[number].take_over = True
                self._streams[number].wake.set()
                return True
        return False

    async def _took_over(self, wait_ms: int) -> str:
        """Who leads; empty: nobody within the time.

        Who was asked leaves its stream to stand: nobody else is asked meanwhile.
        """
        until_ms = steady_ms() + wait_ms
        while True:
            leader = await self._successor()
            if leader or steady_ms() >= until_ms:
                return leader

    async def _successor(self) -> str:
        await asyncio.sleep(HAND_OVER_LOOK_S)
        try:
            found = await self._store.read()
        except StoreError:
            return ""
        if found is None or found.record.epoch <= self.leader.epoch or not found.record.leader:
            return ""
        return found.record.leader.name
