"""A replica that does not lead, by itself: what it takes for granted, and what it waits for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import Follower, StreamBroken
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.protocol.times import Times
from duemq_server.replication.running import servicer
from duemq_server.replication.running.following import campaign
from duemq_server.replication.running.following.campaign import Campaign
from duemq_server.replication.running.following.stream import Following
from duemq_server.replication.running.record_store import RecordStore
from duemq_server.serving.server import Server
from duemq_server.serving.settings import ProcessSettings
from duemq_server.storage.errors import DiskFull
from tests.service.replica_group import Lines, SmallDisk
from tests.service.running_cluster import until

A, B = (ReplicaId(name, name * 32) for name in "ab")
STORE_ID = 7
STOPPED_MS = 60_000
WAIT_S = 30.0
TIMES, SOON = Times(), Times(silent_ms=120)
OWN_ADDRESS = "127.0.0.1:2"


def record(address: str = "127.0.0.1:1") -> Record:
    """A leads, both are in sync."""
    return Record("lines", STORE_ID, frozenset("ab"), frozenset({A, B}), 1, A, address)


class Store:
    """Notes what is asked of it; its clock goes on with each read."""

    look_s = 0.0

    def __init__(self) -> None:
        self.now_ms = self.began_ms = 1_000_000
        self.reads = 0
        self.changes: list[str] = []

    def read(self) -> HeldRecord:
        raise AssertionError("nobody reads it here")

    def swap(self, version: str | None, wanted: Record) -> str:
        self.changes.append(f"swap {wanted.epoch}")
        return "v2"

    def renew(self, leader: ReplicaId) -> None:
        self.changes.append(f"renew {leader.name}")

    def release(self, leader: ReplicaId) -> None:
        pass

    def close(self) -> None:
        pass


class RenewedStore(Store):
    """The leader renews its lease before each read; the reader is stopped after it."""

    def read(self) -> HeldRecord:
        self.reads += 1
        found = HeldRecord("v1", record(), str(self.reads))
        self.now_ms += STOPPED_MS
        return found


class OwnStore(Store):
    """The lease of a leader that has died: nobody renews it."""

    step_ms = TIMES.jitter_ms

    def read(self) -> HeldRecord:
        self.reads += 1
        self.now_ms += self.step_ms
        return HeldRecord("v1", record(OWN_ADDRESS), "1")


class SlowStore(Store):
    """Its first answer is late; just before it the leader renewed its lease, for the last time."""

    renewed_ms = stood_ms = 0

    def read(self) -> HeldRecord:
        self.reads += 1
        if self.reads == 1:
            self.now_ms += TIMES.serve_ms
            self.renewed_ms = self.now_ms
        else:
            self.now_ms += 500
        return HeldRecord("v1", record(), "1")

    def renew(self, leader: ReplicaId) -> None:
        super().renew(leader)
        self.stood_ms = self.now_ms


class Left:
    """A stream that answers once more while it is left: something came at that moment."""

    def __init__(self, made: Campaign) -> None:
        self._made = made
        self.times = 0

    async def leave(self) -> None:
        self.times += 1
        self._made.heard()


class Standing(NamedTuple):
    """A replica that looks at the store, and stands if it may."""

    campaign: Campaign
    state: Lines
    won: asyncio.Task[HeldRecord]


@asynccontextmanager
async def standing(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    me: ReplicaId,
    store: Store,
    store_id: int = STORE_ID,
) -> AsyncIterator[Standing]:
    """Nothing of it has run before the caller waits for something."""
    monkeypatch.setattr(campaign, "steady_ms", lambda: store.now_ms)
    state = Lines(directory, store_id, SmallDisk())
    records = RecordStore(store)
    made = Campaign(me, "lines", frozenset("ab"), 1, TIMES, state, records, OWN_ADDRESS)
    won = asyncio.create_task(made.won())
    try:
        async with asyncio.timeout(WAIT_S):
            yield Standing(made, state, won)
    finally:
        won.cancel()
        await asyncio.gather(won, return_exceptions=True)
        await made.end()
        records.close()
        state.close()


async def test_who_was_stopped_after_its_read_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its clock the lease that it has read is long over: it was renewed meanwhile."""
    store = RenewedStore()
    async with standing(monkeypatch, tmp_path, B, store) as it:
        await until(lambda: store.reads >= 5 or it.won.done())
        assert not it.won.done()
        assert store.changes == []


async def test_a_leader_that_is_started_anew_does_not_wait_for_its_own_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = OwnStore()
    async with standing(monkeypatch, tmp_path, A, store) as it:
        assert (await it.won).record.leader == A
    assert store.changes == ["renew a", "swap 2"]
    assert store.now_ms - store.began_ms < TIMES.lease_ms


async def test_who_is_refused_looks_at_the_record_no_more_often_than_the_store_likes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who was removed is refused for ever; Kubernetes would be asked ten times a second."""
    store = RenewedStore()
    async with standing(monkeypatch, tmp_path, B, store) as it:
        it.campaign.left(followed=False)
        assert it.campaign._hurried_ms <= store.now_ms
        it.campaign.left(followed=True)
        assert it.campaign._hurried_ms > store.now_ms


async def test_a_lease_that_a_slow_read_tells_of_is_not_older_than_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counted from when that read began it would end while its leader serves."""
    store = SlowStore()
    async with standing(monkeypatch, tmp_path, B, store) as it:
        await it.won
    assert store.stood_ms - store.renewed_ms >= TIMES.lease_ms


async def test_who_answers_its_leader_while_it_leaves_it_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its leader serves by that answer for a while."""
    store = OwnStore()
    store.step_ms = TIMES.heard_ms
    async with standing(monkeypatch, tmp_path, B, store) as it:
        left = Left(it.campaign)
        with monkeypatch.context() as patch:  # at the end it really leaves
            patch.setattr(it.campaign.streams, "leave", left.leave)
            await until(lambda: left.times >= 2 or it.won.done())
            assert not it.won.done()
            assert store.changes == []
            it.won.cancel()


@pytest.mark.parametrize("me", [A, B])
async def test_without_space_for_the_groups_store_id_it_waits_for_some(
    me: ReplicaId, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A would lead, B would follow; an operator's election has given the group another id."""
    full = True
    async with standing(monkeypatch, tmp_path, me, OwnStore(), STORE_ID + 1) as it:
        rename = it.state.rename

        def rename_if_it_fits(store_id: int) -> None:
            if full:
                raise DiskFull("no space for the store id")
            rename(store_id)

        monkeypatch.setattr(it.state, "rename", rename_if_it_fits)
        await until(lambda: it.campaign.reason == "no space for the store id" or it.won.done())
        assert not it.won.done()
        full = False
        await until(lambda: it.state.store_id == STORE_ID)


async def test_who_has_a_snapshot_without_its_log_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was installed while an operator had it elected; it would end as soon as it led."""
    store = OwnStore()
    async with standing(monkeypatch, tmp_path, A, store) as it:
        monkeypatch.setattr(it.state, "unfit", "its log ends before")
        await until(lambda: it.campaign.reason == "its log ends before" or it.won.done())
        assert not it.won.done()
        assert store.changes == []
        it.state.unfit = ""
        await it.won


async def test_whose_disk_is_full_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It could not write that it leads; nor does an operator make it lead (`unfit`)."""
    async with standing(monkeypatch, tmp_path, A, OwnStore()) as it:
        it.state.log.disk_full = True
        await until(lambda: it.campaign.reason == campaign.DISK_FULL or it.won.done())
        assert not it.won.done()
        assert it.campaign.unfit == campaign.DISK_FULL
        it.state.log.disk_full = False
        await it.won


class NoLog:
    """Nothing comes to it."""

    durable_position = 0
    catching_up = False
    on_durable = None


async def follow(address: str) -> None:
    """One stream, to its end."""
    follower = Follower(B, record(address), Epochs(()), start=0, end=0, durable=0, committed=0)
    nothing: Any = NoLog()
    told = [lambda: None] * 3
    following = Following(follower, nothing, nothing, nothing, SOON, OWN_ADDRESS, *told)
    async with asyncio.timeout(WAIT_S):
        await following.run(address)


async def test_a_leader_that_takes_a_connection_and_says_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(StreamBroken, match=f"the leader at {address} is silent"):
            await follow(address)


class Silent:
    """Takes a greeting, and gives none."""

    def __init__(self) -> None:
        self.greeted = asyncio.Event()
        self.left = asyncio.Event()

    async def Follow(self, requests: Any, context: Any) -> None:
        try:
            async for _ in requests:
                self.greeted.set()
        finally:
            self.left.set()

    async def _unused(self, request: Any, context: Any) -> None:
        raise AssertionError

    GetSnapshot = GetStatus = HandOver = Adopt = Elect = ChangeMembers = _unused


@asynccontextmanager
async def serving(servicer_: object) -> AsyncIterator[str]:
    server = Server(ProcessSettings(listen="127.0.0.1:0", drain_timeout=0))
    server.add(servicer.SERVICE, servicer_)
    await server.start(announced=False)
    try:
        yield server.address
    finally:
        await server.stop()


async def test_a_leader_that_does_not_greet_is_left() -> None:
    silent = Silent()
    async with serving(silent) as address:
        async with asyncio.timeout(WAIT_S):
            while not silent.greeted.is_set():  # a slow machine may not get so far in time
                with pytest.raises(StreamBroken, match=f"the leader at {address} is silent"):
                    await follow(address)
            await silent.left.wait()
