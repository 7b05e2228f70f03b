"""A group of replicas of a plain log, in one event loop: real streams, real stores, real files."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import threading
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import pytest

from duemq_server.local_cluster.layout import bind_port
from duemq_server.replication.running import operators, process
from duemq_server.replication.running.leading import handing_over
from duemq_server.replication.running.process import Replica
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.serving.process import BeginAnew
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.storage.writer import LogWriter
from tests.service.running_cluster import WAIT_S, until

WHO: ContextVar[str] = ContextVar("replica")
"""Whose code runs; each task has it from who began it."""
KIND = 1
SEGMENT_BYTES = 1 << 16


def patient_hand_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is given up is not begun again: a successor may be slow."""
    for owner in (process, operators):
        monkeypatch.setattr(owner, "HAND_OVER_S", WAIT_S)
    monkeypatch.setattr(handing_over, "ASKED_MS", 1_000 * WAIT_S)


async def moved(leader, to: str):
    """An operator moves the leader, once the other one follows: a stream may just be a new one."""
    await until(lambda: to in leader.replica.leading.followers())
    return await leader.replica.operators.hand_over(to)


class SmallDisk(RealDisk):
    """A disk that is full, short of space, or slow to take a snapshot, while a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.full = self.short = False
        self.may_install = threading.Event()
        self.may_install.set()

    def open(self, path: str, *, create: bool = False):
        return SmallFile(self, super().open(path, create=create))


class SmallFile:
    """One of its files."""

    def __init__(self, disk: SmallDisk, file) -> None:
        self._disk = disk
        self._file = file

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def pwritev(self, buffers, offset: int) -> int:
        if self._disk.full:
            raise DiskFull("no space left")
        return self._file.pwritev(buffers, offset)


class Lines:
    """A state whose tables are the bodies of its log's entries."""

    unfit = ""

    def __init__(self, directory: Path, store_id: int, disk: SmallDisk) -> None:
        self.may_install = disk.may_install
        self.log = ReplicaLog.open(str(directory / "log"), disk, segment_bytes=SEGMENT_BYTES)
        self.base_path = directory / "base"
        self.lines: list[bytes] = []
        self.known_to = 0
        self.epochs: tuple[tuple[int, int], ...] = ()
        self._read_base()
        met = [
            (epoch.decode(entry.body).epoch, entry.position)
            for entry in self.log.recover()
            if entry.kind == epoch.KIND
        ]
        self.epochs += tuple(each for each in met if each not in self.epochs)
        self.committed = self.log.committed_floor
        self.applied = self.log.start_position
        self.lost = self.log.end_position < self.log.was_durable_to
        self.path = directory / "store_id"
        if not self.path.exists():
            self.path.write_text(str(store_id))
        self.store_id = int(self.path.read_text())
        self.apply(self.committed)

    def apply(self, committed: int, entries_max: int = 1 << 30) -> None:
        for entry in self.log.entries(self.applied, committed):
            if entry.kind == KIND and entry.position >= self.known_to:
                self.lines.append(bytes(entry.body))
            self.applied = entry.end
            entries_max -= 1
            if not entries_max:
                return

    def checkpoint(self) -> None:
        pass

    def drop_before(self, log_start: int) -> None:
        pass

    def rename(self, store_id: int) -> None:
        self.path.write_text(str(store_id))
        self.store_id = store_id

    def snapshot(self, epochs) -> bytes:
        known = {"to": self.applied, "epochs": epochs, "lines": [x.decode() for x in self.lines]}
        return json.dumps(known).encode()

    def receive(self):
        return Received(self)

    def install(self, snapshot: bytes, log_start: int) -> None:
        assert self.may_install.wait(60)
        self.log.begin_at(log_start)
        self.base_path.write_bytes(snapshot)
        self._read_base()
        self.applied = self.committed = log_start
        self.lost = False

    def _read_base(self) -> None:
        if not self.base_path.exists():
            return
        known = json.loads(self.base_path.read_bytes())
        self.lines = [line.encode() for line in known["lines"]]
        self.known_to = known["to"]
        self.epochs = tuple(
            (number, start) for number, start in known["epochs"] if start < self.log.start_position
        )

    def close(self) -> None:
        self.log.close()


class Received:
    """A snapshot that arrives."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.data = b""

    def write(self, part: bytes) -> None:
        self.data += part

    def install(self, log_start: int) -> None:
        self.lines.install(self.data, log_start)

    def close(self) -> None:
        pass


class LinesTerm:
    """A leader that appends lines; told which of them are committed."""

    def __init__(self, state: Lines, leading) -> None:
        self.state = state
        self.leading = leading
        self.quiet = False
        self.committed = state.applied
        self.moved = asyncio.Event()
        self.handed_over: bool | None = None
        loop = asyncio.get_running_loop()
        leading.advance = self._advance
        self._writer = LogWriter(
            state.log,
            lambda position: loop.call_soon_threadsafe(leading.synced, position),
            lambda error: None,
        )

    def _advance(self, position: int) -> None:
        self.committed = position
        self.moved.set()

    async def start(self) -> None:
        self._writer.start()

    async def run(self, stop: asyncio.Event) -> None:
        await stop.wait()

    def quiesce(self) -> None:
        self.quiet = True

    async def stop(self, *, handed_over: bool) -> None:
        self.handed_over = handed_over
        await asyncio.to_thread(self._writer.stop)

    async def write(self, line: bytes) -> None:
        """Returns when it is committed."""
        _, end = self.state.log.append(KIND, [line])
        while self.committed < end:
            self.moved.clear()
            await self.moved.wait()


class LinesService:
    kind = "broker"
    services = ()

    def __init__(self, directory: Path, disk: SmallDisk) -> None:
        self.directory = directory
        self.disk = disk
        self.term: LinesTerm | None = None

    def open(self) -> Lines:
        self.directory.mkdir(parents=True, exist_ok=True)
        return Lines(self.directory, secrets.randbits(63), self.disk)

    def not_to_found(self) -> str:
        return ""

    def after_loss(self) -> str:
        return ""

    def lead(self, state, leading, server) -> LinesTerm:
        self.term = LinesTerm(state, leading)
        return self.term

    def short_of_space(self) -> bool:
        return self.disk.short

    def snapshot(self, older: bool) -> io.BytesIO:
        term = self.term
        term.state.apply(term.committed)
        return io.BytesIO(term.state.snapshot(term.leading.leader.epochs.begins))


class Member:
    """One name of the group; its process may come and go."""

    def __init__(self, root: Path, own: str, names: tuple[str, ...], **settings) -> None:
        self.directory = root / own
        self.name = own
        self.disk = SmallDisk()
        self.port = bind_port(0)  # held, so that nobody else gets it
        self.settings = ReplicaSettings(
            data_dir=str(self.directory),
            replica=own,
            replicas=names,
            listen=f"127.0.0.1:{self.port.getsockname()[1]}",
            nameservers=settings.pop("nameservers", ("127.0.0.1:1",)),
            **{"name": "lines", "lease_store": f"file:{root / 'leases'}", **settings},
        )
        self.task: asyncio.Task[None] | None = None
        self.replica: Replica | None = None

    def start(self) -> None:
        self.replica = None  # of an earlier life
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self._live(), name=f"replica {self.name}")

    async def _live(self) -> None:
        WHO.set(self.name)
        while True:
            self.service = LinesService(self.directory, self.disk)
            self.replica = Replica(self.settings, self.service)
            await self._start(self.replica)
            try:
                await self.replica.run(self.stopping)
            except BeginAnew:
                await self._vanish()
                continue
            await self.replica.stop()
            return

    async def _start(self, replica: Replica) -> None:
        """To its end, even when killed: gRPC cannot stop what was cancelled in its start."""
        starting = asyncio.create_task(replica.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def _vanish(self) -> None:
        """As a process that executes itself anew, or is killed: its files are just closed."""
        replica = self.replica
        if replica is None:
            return
        replica.term = None
        leading = replica.leading
        campaign = replica.campaign
        if self.service.term is not None:
            await self.service.term.stop(handed_over=False)
        if leading is not None:
            await leading.stop()
        await campaign.end()
        for server in replica.server._servers():
            await server.stop(0)
        replica.state.close()
        replica.store.close()

    async def stop(self) -> None:
        """A clean stop."""
        self.stopping.set()
        if self.task is not None:
            await self.task
            self.task = None

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
            self.task = None
            await self._vanish()

    @property
    def installing(self) -> bool:
        """A thread replaces its log and tables."""
        return self._campaign is not None and self._campaign.streams.installing is not None

    @property
    def role(self) -> tuple[str, str]:
        """And the reason for it."""
        return (self._campaign.role, self._campaign.reason) if self._campaign else ("", "")

    @property
    def _campaign(self):
        return getattr(self.replica, "campaign", None)

    def forget(self) -> None:
        """The leader keeps no segment that ends before what is committed."""
        state = self.term.state
        state.base_path.write_bytes(self.service.snapshot(older=False).read())
        state.log.delete_before(state.applied)

    @property
    def term(self) -> LinesTerm | None:
        """While it leads, and may."""
        replica = self.replica
        if self.task is None or replica is None or replica.term is None:
            return None
        return replica.term if replica.leading.serves() else None

    @property
    def lines(self) -> list[bytes]:
        """What it follows has told it; a leader applies nothing any more."""
        state = getattr(self.replica, "state", None)
        return state.lines if state is not None else []

    @property
    def reason(self) -> str:
        """Why it takes no part, once it has started."""
        campaign = getattr(getattr(self, "replica", None), "campaign", None)
        return campaign.reason if campaign is not None else ""


class Group:
    """All of them."""

    def __init__(self, root: Path, count: int, **settings) -> None:
        names = tuple("abcdefg"[:count])
        self.settings = settings
        self.members = {name: Member(root, name, names, **settings) for name in names}

    def add(self, name: str) -> Member:
        """One more, whose settings name all; it starts."""
        first = next(iter(self.members.values()))
        names = (*self.members, name)
        member = Member(first.directory.parent, name, names, **self.settings)
        self.members[name] = member
        member.start()
        return member

    def start(self) -> None:
        for member in self.members.values():
            member.start()

    async def leader(self) -> Member:
        """Waits for one."""
        while True:
            for member in self.members.values():
                if member.task is not None and member.task.done():
                    member.task.result()
                if member.term is not None:
                    return member
            await asyncio.sleep(0.01)

    async def in_sync(self, count: int) -> Member:
        """The leader, when so many are."""
        while True:
            leader = await self.leader()
            record = leader.replica.leading.leader.record
            if len(record.in_sync) >= count:
                return leader
            await asyncio.sleep(0.01)

    async def write(self, line: bytes) -> None:
        """Like a client: whoever leads; of the next one only what that one does not have."""
        while True:
            leader = await self.leader()
            term = leader.term
            term.state.apply(term.committed)  # all that it was left
            if line in term.state.lines or await self._written(leader, term, line):
                return

    async def _written(self, leader: Member, term: LinesTerm, line: bytes) -> bool:
        """False: the term was over before."""
        writing = asyncio.create_task(term.write(line))
        try:
            await until(lambda: writing.done() or getattr(leader.replica, "term", None) is not term)
            if writing.done():
                writing.result()
            return writing.done()
        finally:
            writing.cancel()

    async def histories(self, last: bytes) -> dict[str, list[bytes]]:
        """What each holds up to a line, once all hold that."""
        while True:
            found = {}
            for name, member in self.members.items():
                term = member.service.term
                if term is not None:
                    term.state.apply(term.committed)
                found[name] = list(member.lines)
            if all(last in lines for lines in found.values()):
                return {name: held[: held.index(last) + 1] for name, held in found.items()}
            await asyncio.sleep(0.01)

    def states(self) -> list[tuple[str, str, str]]:
        """For whoever looks for why."""
        return [(each.name, *each.role) for each in self.members.values()]

    async def stop(self) -> None:
        for member in self.members.values():
            await member.kill()
            member.port.close()
