"""A replica: the real cores and the real log, on a disk that forgets what was not synced."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.election import Decision, Election
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import Extend, Follower, StreamBroken
from duemq_server.replication.protocol.in_sync import InSyncState, Swap
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import (
    Answer,
    Chunk,
    Hello,
    Reason,
    Refusal,
    Welcome,
)
from duemq_server.replication.protocol.record import HeldRecord, MemberChange, Refused, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.storage.errors import CorruptLog, LogFull
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk
from tests.simulation.model_store import ModelStore, Request

DIRECTORY = "/log"
SEGMENT_BYTES = 4096
TIMES = Times()
NUMBERS = itertools.count(1)


class Violation(Exception):
    """What must never be, was."""


@dataclass
class Stream:
    """A follower's connection; each direction keeps its order."""

    number: int
    follower: Node
    leader: Node
    to_leader: deque[Any] = field(default_factory=deque)
    to_follower: deque[Any] = field(default_factory=deque)


def lose_stream(stream: Stream) -> None:
    """The leader notices that a follower's stream has ended."""
    if stream.leader.up and stream.leader.leader is not None:
        stream.leader.leader.broke(stream.number)


class Node:
    """One name of the group, its disk, and the process that may run on it."""

    def __init__(
        self,
        name: str,
        store: ModelStore,
        streams: dict[int, Stream],
        members: frozenset[str],
        min_insync: int,
        random: Random,
    ) -> None:
        self.name = name
        self.random = random
        self.disk = FaultyDisk()
        self.new_disk_id()
        self.members = members
        self.min_insync = min_insync
        self.store = store
        self.streams = streams
        self.on_commit: Callable[[Node], None] = lambda node: None
        self.on_break: Callable[[Stream], None] = lose_stream
        self.life = 0  # of the process
        self.up = False
        self.refuses = 0.0  # how often its log has no room for what came
        self.truncated = 0
        self.caught_up = 0
        self.takeovers = 0
        self.refused = 0

    def new_disk_id(self) -> None:
        self.me = ReplicaId(self.name, self.random.randbytes(16).hex())

    # -- the process

    def start(self, now_ms: int) -> None:
        """Opens the log, as every start does."""
        self.life += 1
        self.up = True
        self.log = ReplicaLog.open(DIRECTORY, self.disk, segment_bytes=SEGMENT_BYTES)
        self.epochs = Epochs()
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self.stream: Stream | None = None
        self.standing = False
        self.announcing = False
        self.handing_over = False
        self.asks_since_ms: int | None = None  # what the store holds
        try:
            for entry in self.log.recover():
                if entry.kind == epoch.KIND:
                    self.epochs.note(epoch.decode(entry.body).epoch, entry.position)
        except CorruptLog as error:
            raise Violation(f"{self.me} refuses to start: {error}") from error
        self.epochs.truncate(self.log.end_position)
        self.committed = self.log.committed_floor
        self.verified = 0  # its log is the committed history up to there
        if self.log.end_position < self.log.was_durable_to:
            self.new_disk_id()
        self.election = Election(self.me, self.random.random, TIMES, self.name)
        self.election.saw(self.store.read(), now_ms)

    def stop(self) -> None:
        """However it ends: what it asked for may still be done, and nobody hears the answer."""
        self.up = False
        self.life += 1
        self.leave()
        for stream in [each for each in self.streams.values() if each.leader is self]:
            self.hang_up(stream)

    def kill(self) -> None:
        self.stop()
        self.disk = self.disk.after_kill()

    def cut_power(self) -> None:
        self.stop()
        self.disk = self.disk.after_power_cut(Random(self.random.random()))

    def empty_directory(self) -> None:
        if self.up:
            self.stop()
        self.disk = FaultyDisk()
        self.new_disk_id()

    def reopen(self, now_ms: int) -> None:
        """A deposed leader: its tables may hold what was never committed."""
        self.kill()
        self.start(now_ms)

    # -- the store

    def ask(
        self,
        swap: Swap,
        won: Callable[[str], None],
        lost: Callable[[HeldRecord | None], None],
        gave_up: Callable[[], None],
    ) -> None:
        life = self.life

        def answer(version: str | None, found: HeldRecord | None) -> None:
            if self.life == life:
                won(version) if version is not None else lost(found)

        def silence() -> None:
            if self.life == life:
                gave_up()

        self.store.ask(Request(swap.version, swap.record, answer, silence))

    def adopt(self) -> None:
        """An operator says that this log is the group's: while nobody leads."""
        found = self.store.read()
        record = records.adopted(
            found.record if found else None,
            group="g",
            members=self.members,
            me=self.me,
            store_id=1,
            last_epoch=self.epochs.last,
            leap=records.LEAP_MIN + self.random.randrange(records.LEAP_MIN),
        )
        self.store.ask(Request(found.version if found else None, record, None, None))

    def announce(self) -> None:
        """Rule 7."""
        found = self.store.read()
        if self.announcing:
            return
        try:
            record = records.announced(
                found.record if found else None,
                group="g",
                members=self.members,
                me=self.me,
                store_id=1,
                log_end=self.log.end_position,
            )
        except Refused:
            return  # the record is gone: an operator decides
        if record is not None:
            self.announcing = True

            def done(*_: object) -> None:
                self.announcing = False

            self.ask(Swap(0, found.version if found else None, record), done, done, done)

    def stand(self, now_ms: int) -> None:
        found = self.store.read()
        if self.standing or self.leader is not None or found is None:
            return
        try:
            record = records.taken_over(
                found.record,
                self.me,
                address=self.name,
                last_epoch=self.epochs.last,
                min_insync=self.min_insync,
                now_ms=now_ms,
            )
        except Refused:
            return
        self.standing = True
        self.store.renew(self.me)

        def won(version: str) -> None:
            self.standing = False
            self.lead(HeldRecord(version, record), now_ms)

        def over(*_: object) -> None:
            self.standing = False

        self.ask(Swap(0, found.version, record), won, over, over)

    # -- leading

    def lead(self, found: HeldRecord, now_ms: int) -> None:
        self.leave()
        start = self.log.end_position
        try:
            self.leader = Leader(
                self.me,
                found,
                self.epochs,
                start=start,
                committed=self.committed,
                min_insync=self.min_insync,
                now_ms=now_ms,
                times=TIMES,
            )
        except Refused:
            return
        self.takeovers += 1
        leader = self.leader
        self.log.committed = lambda: leader.high_watermark
        body = epoch.encode(leader.epoch, bytes.fromhex(self.me.disk), now_ms)
        self.log.append(epoch.KIND, [body])

    def append(self, body: bytes) -> None:
        self.log.append(1, [body])

    def write(self) -> None:
        self.log.write_group()

    def sync(self) -> None:
        self.log.sync()
        if self.leader is not None:
            self.leader.synced(self.log.durable_position)
            self.note_commits()
        elif self.follower is not None:
            self.follower.synced(self.log.durable_position)
            self.note_caught_up(self.follower)

    def note_commits(self) -> None:
        if self.leader is not None and self.leader.high_watermark > self.committed:
            self.committed = self.leader.high_watermark
            self.on_commit(self)

    def send(self, stream: Stream, now_ms: int, *, heartbeat: bool = False) -> None:
        leader = self.leader
        if leader is None or stream.number not in leader.followers:
            return
        data: bytes | memoryview = b""
        wanted = leader.to_read(stream.number, self.log.written_position)
        if wanted is not None and not heartbeat:
            position, most = wanted
            data = self.log.read_run(position, min(most, self.random.choice((64, 400, 5_000))))
        stream.to_follower.append(leader.chunk(stream.number, data, now_ms))

    def hand_over(self, now_ms: int) -> None:
        """To whoever has all, as soon as somebody has."""
        leader = self.leader
        if leader is None:
            return
        self.handing_over = True
        leader.resign()
        successor = leader.successor(self.log.end_position)
        for number, progress in leader.followers.items():
            stream = self.streams.get(number)
            if stream is not None and progress.replica == successor:
                chunk = leader.chunk(stream.number, b"", now_ms, take_over=True)
                stream.to_follower.append(chunk)

    def change_set(self, now_ms: int) -> None:
        leader = self.leader
        if leader is None:
            return
        if leader.set.state is InSyncState.UNKNOWN:
            swap = leader.read(self.store.read())
        else:
            swap = leader.change(now_ms)
        self.ask_for(swap)

    def change_members(self, change: MemberChange) -> None:
        """An operator asks for it."""
        if self.leader is not None:
            with suppress(Refused):
                self.ask_for(self.leader.change_members(change))

    def ask_for(self, swap: Swap | None) -> None:
        leader = self.leader
        if swap is None or leader is None:
            return

        def won(version: str) -> None:
            followed = leader.followers
            leader.won(swap.number, version)
            for number in followed.keys() - leader.followers.keys():
                if number in self.streams:
                    self.hang_up(self.streams[number])
            self.note_commits()

        def lost(found: HeldRecord | None) -> None:
            self.ask_for(leader.lost(swap.number, found))

        self.ask(swap, won, lost, lambda: leader.unanswered(swap.number))

    # -- following

    def look_up(self) -> None:
        """Rule 6, while it follows: another leader, another stream."""
        found = self.store.read()
        followed = self.follower.record if self.follower is not None else None
        if followed is not None and found is not None and found.record.epoch > followed.epoch:
            self.leave()

    def follow(self, nodes: dict[str, Node]) -> None:
        """Rule 6: whom the record names."""
        found = self.store.read()
        if self.stream is not None or self.standing or self.leader is not None:
            return
        if found is None or found.record.leader is None:
            return
        try:
            self.follower = Follower(
                self.me,
                found.record,
                self.epochs,
                start=self.log.start_position,
                end=self.log.end_position,
                durable=self.log.durable_position,
                committed=self.committed,
            )
        except Refused:
            return
        number = next(NUMBERS)
        self.stream = Stream(number, self, nodes[found.record.leader.name])
        self.streams[number] = self.stream
        self.stream.to_leader.append(self.follower.hello())

    def leave(self) -> None:
        """Answers nobody any more."""
        if self.stream is not None:
            self.hang_up(self.stream)
        self.follower = None

    def hang_up(self, stream: Stream) -> None:
        self.streams.pop(stream.number, None)
        follower = stream.follower
        if follower.stream is stream:
            follower.stream = follower.follower = None
        self.on_break(stream)

    def deliver_to_leader(self, stream: Stream, now_ms: int) -> None:
        message = stream.to_leader.popleft()
        if not self.up or self.leader is None:
            return self.hang_up(stream)
        if isinstance(message, Answer):
            self.leader.answered(stream.number, message, self.log.written_position, now_ms)
            return self.note_commits()
        assert isinstance(message, Hello)
        answer = self.leader.hello(stream.number, message, self.log.end_position, now_ms)
        if isinstance(answer, Refusal) and answer.reason is Reason.LOST:
            raise Violation(answer.text)
        if not isinstance(answer, Welcome):
            return self.hang_up(stream)
        stream.to_follower.append(answer)
        return None

    def deliver_to_follower(self, stream: Stream, now_ms: int) -> None:
        message = stream.to_follower.popleft()
        follower = self.follower
        if not self.up or follower is None or self.stream is not stream:
            return
        try:
            if isinstance(message, Chunk):
                self.election.heard(now_ms)
                extend = follower.chunk(message)
                if extend is not None:
                    self.extend(follower, extend)
                self.committed = max(self.committed, follower.committed)
                if follower.asked_to_lead:
                    self.election.asked()
            else:
                self.truncate(follower, follower.welcome(message))
        except StreamBroken:
            self.leave()
        except LogFull:
            # What it had heard by then is known, as where a process leaves a stream.
            self.committed = max(self.committed, follower.committed)
            self.leave()
        except Refused as refused:
            raise Violation(f"{self.me}: {refused}") from refused

    def extend(self, follower: Follower, extend: Extend) -> None:
        """Raises LogFull: as a process does, it tells its core."""
        try:
            self.check_room()
            self.log.extend(extend.position, [extend.data])
        except BaseException:
            follower.not_taken(extend)
            raise

    def check_room(self) -> None:
        """Raises LogFull now and then."""
        if self.refuses and self.random.random() < self.refuses:
            self.refused += 1
            raise LogFull("too much waits for the disk")

    def truncate(self, follower: Follower, position: int | None) -> None:
        """Raises LogFull."""
        if position is not None:
            self.check_room()
            self.truncated += 1
            self.log.truncate(position)
            follower.truncated(position)
            self.verified = min(self.verified, position)

    def note_caught_up(self, follower: Follower) -> None:
        if self.log.catching_up and follower.covers_claims:
            self.log.caught_up()
            self.caught_up += 1

    def answer(self) -> None:
        if self.follower is None or self.stream is None:
            return
        answer = self.follower.answer()
        if answer is not None:
            self.stream.to_leader.append(answer)

    def vote(self, now_ms: int, *, slowness: float = 0.0) -> None:
        """By the clock, as a process does; `slowness`: how often the store makes it wait on."""
        if self.asks_since_ms is None:
            self.asks_since_ms = now_ms
        if slowness and self.random.random() < slowness:
            return
        began_ms, self.asks_since_ms = self.asks_since_ms, None
        self.saw(began_ms, now_ms)
        if self.election.decide(began_ms) is Decision.STAND:
            self.leave()
            self.stand(now_ms)

    def saw(self, began_ms: int, ended_ms: int) -> None:
        """Of a read that took so long: what is in the store at its end."""
        self.election.saw(self.store.read(), ended_ms)
