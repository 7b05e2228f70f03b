"""A timer shard with replicas: one that is new gets a snapshot, and can lead."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from duemq.errors import FencedTimer
from duemq.transport import channel
from duemq.v1 import nameserver_pb2, stubs
from duemq_server.replication.running.leading.roster import SNAPSHOT
from duemq_server.replication.running.process import Replica
from duemq_server.replication.running.v1 import replication_pb2
from duemq_server.replication.running.v1.stubs import ReplicationStub
from duemq_server.serving.clock import now_ms
from duemq_server.serving.process import BeginAnew
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.data_directory import load_checkpoint
from duemq_server.timer_service.disk.snapshots import snapshot
from duemq_server.timer_service.disk.snapshots.arriving import Arriving
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.process import TimerService
from duemq_server.timer_service.replica import TimerReplica
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.timers.limits import Limits
from tests.service.replica_group import Group, Member, moved, patient_hand_overs
from tests.service.running_cluster import HEARTBEAT_S, Cluster, running_cluster, until
from tests.service.test_timer_service import TOPIC, delivered, running_shard, send

NAMES = ("a", "b", "c")
SMALL = Limits(
    log_segment_bytes=4 << 10,
    log_kept_bytes=1 << 10,
    log_held_max=8 << 10,
    checkpoint_interval_ms=50,
    memtable_rows_max=20,
)


class SmallReplica(TimerReplica):
    """Its log is cut, and its timers go to files, all the time."""

    term: TimerService | None = None

    def open(self) -> Standby:
        super().open().close()
        return Standby.open(self._settings.data_dir, self._disk, SMALL, clock=now_ms)

    def lead(self, *what: Any) -> TimerService:
        self.term = super().lead(*what)
        return self.term


class TimerMember(Member):
    """One replica of the shard."""

    async def _live(self) -> None:
        assert isinstance(self.settings, Settings)
        while True:
            self.service = SmallReplica(self.settings)
            self.replica = Replica(self.settings, self.service)
            await self.replica.start()
            try:
                await self.replica.run(self.stopping)
            except BeginAnew:
                await self._vanish()
                continue
            await self.replica.stop()
            return


class TimerGroup(Group):
    """All of them."""

    def __init__(self, root: Path, nameserver: str, **settings: Any) -> None:
        super().__init__(root, len(NAMES))
        for name, member in self.members.items():
            member.__class__ = TimerMember
            given = {
                field.name: getattr(member.settings, field.name)
                for field in dataclasses.fields(member.settings)
            }
            given |= {"name": "t0", "replica": name, "nameservers": (nameserver,)}
            given |= {"heartbeat_period": HEARTBEAT_S, "drain_timeout": 0.1}
            member.settings = Settings(**given | settings)

    async def start_with(self, **settings: Any) -> None:
        """All anew."""
        for member in self.members.values():
            if member.task is not None:
                await member.kill()
            member.settings = dataclasses.replace(member.settings, **settings)
        self.start()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def bodies(cluster: Cluster) -> list[bytes]:
    """All that was delivered, sorted."""
    found = await delivered(cluster)
    return sorted(each.body for records in found.values() for each in records)


async def gets_a_new_disk(other: Any, leader: Any) -> None:
    """Returns when it is in sync again."""
    await other.kill()
    shutil.rmtree(other.directory)
    killed = other.replica.me
    other.start()
    await until(lambda: getattr(other.replica, "me", killed) != killed)
    leads = leader.replica.leading.leader
    await until(lambda: other.replica.me in leads.record.in_sync)


async def test_a_replica_that_is_new_gets_a_snapshot_and_can_lead(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_hand_overs(monkeypatch)
    group = TimerGroup(tmp_path / "t0", cluster.nameserver)
    group.start()
    try:
        leader = await group.in_sync(3)
        sent = [b"%03d" % n for n in range(120)]
        for first in range(0, 120, 10):
            now = first % 20 == 0
            some = sent[first : first + 10]
            await send(cluster, some, [0 if now else 3_600_000] * 10)
        log = leader.replica.state.log
        await until(lambda: log.start_position > 0)
        other = next(each for each in group.members.values() if each is not leader)
        await gets_a_new_disk(other, leader)
        leads = leader.replica.leading.leader
        assert other.replica.state.log.start_position > 0
        segments = other.directory / "segments"
        assert any(each.suffix == ".due" for each in segments.iterdir())

        heads = {name: await snapshot_head(leader, name) for name in ("x", "")}
        assert heads["x"].startswith(snapshot.MAGIC)
        assert heads[""][4:].startswith(snapshot.MAGIC)  # as who names nobody can read it
        claimants = cluster.brokers["b0"].store.timer_owners._claimants
        assert [each.epoch for each in claimants.values()] == [leads.epoch]

        assert (await moved(leader, other.name)).leader == other.name
        leader = await group.leader()
        assert leader is other
        await until(lambda: [each.epoch for each in claimants.values()] == [leads.epoch + 1])
        await until(lambda: leader.replica.campaign.role == "leader")
        ledger = leader.term.shard.scheduler.ledger
        assert (ledger.accepted, ledger.pending) == (120, 60)
        due_now = [body for n, body in enumerate(sent) if n // 10 % 2 == 0]

        async def all_due_came() -> bool:
            return await bodies(cluster) == due_now

        await until(all_due_came)
        handles = await send(cluster, [b"more"], [0])
        assert handles

        async def more_came() -> bool:
            return await bodies(cluster) == sorted([*due_now, b"more"])

        await until(more_came)
        await group.in_sync(3)
    finally:
        await group.stop()


async def test_a_replica_of_a_shard_that_leaves_gets_a_new_disk_and_can_lead(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_hand_overs(monkeypatch)
    group = TimerGroup(tmp_path / "t1", cluster.nameserver, name="t1", shard=1, shards=2)
    async with running_shard(cluster, tmp_path, name="t0", shard=0, shards=2):
        group.start()
        try:
            leader = await group.in_sync(3)
            place = leader.replica.service.term.place
            await until(lambda: place.key_shards == 2)
            pending = 0
            while not pending:
                await send(cluster, [b"x"], [3_600_000], producer_id=0, queue_id=-1)
                pending = leader.replica.service.term.shard.scheduler.ledger.pending
            await group.start_with(shards=1)
            leader = await group.in_sync(3)
            other = next(each for each in group.members.values() if each is not leader)
            await gets_a_new_disk(other, leader)

            assert (await moved(leader, other.name)).leader == other.name
            assert await group.leader() is other
            term = other.replica.service.term
            await until(lambda: term.place.key_shards == 2)
            assert term.place.leaves
            assert term.shard.scheduler.ledger.pending >= pending
        finally:
            await group.stop()


async def test_a_shard_that_leaves_does_not_begin_as_a_new_group(
    cluster: Cluster, tmp_path: Path
) -> None:
    group = TimerGroup(tmp_path / "t1", cluster.nameserver, name="t1", shard=1, shards=1)
    group.start()
    members = group.members.values()
    try:
        await until(lambda: all("only one that has timers can leave" in m.reason for m in members))
        assert all(each.replica.record is None for each in members)
        await group.start_with(shards=2)
        await group.in_sync(3)
    finally:
        await group.stop()


async def snapshot_head(leader: Member, name: str) -> bytes:
    """The beginning of what a leader sends to a replica of that name."""
    record = leader.replica.leading.leader.record
    request = replication_pb2.GetSnapshotRequest(
        group=record.group, store_id=record.store_id, epoch=record.epoch, replica=name
    )
    async with channel.connect(leader.replica.server.advertised) as connection:
        stub = ReplicationStub(connection)
        return b"".join([part.data async for part in stub.GetSnapshot(request)])[:8]


def told_of(leader: Member, other: Member) -> tuple[int, str]:
    """Role and reason, as nameservers are told."""
    found = {each.name: each for each in leader.replica.leading.replicas()}
    return found[other.name].role, found[other.name].reason


async def test_the_log_that_goes_with_a_snapshot_is_kept_however_long_that_takes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on, taken = threading.Event(), threading.Event(), []
    receive, write = Standby.receive, Arriving.write

    def noted(standby: Standby) -> Arriving:
        taken.append(standby)
        return receive(standby)

    def slowly(arriving: Arriving, part: bytes) -> None:
        began.set()
        assert may_go_on.wait(60)
        write(arriving, part)

    monkeypatch.setattr(Standby, "receive", noted)
    monkeypatch.setattr(Arriving, "write", slowly)
    group = TimerGroup(tmp_path / "t0", cluster.nameserver)
    group.start()
    try:
        leader = await group.in_sync(3)
        log = leader.replica.state.log

        async def grows() -> bool:
            await send(cluster, [b"x"] * 10, [3_600_000] * 10)
            found = load_checkpoint(str(leader.directory), RealDisk())
            return found is not None and found.log_needed_from > cut + 4 * SMALL.log_segment_bytes

        cut = 0
        await until(grows)
        await until(lambda: log.start_position > 0)
        other = next(each for each in group.members.values() if each is not leader)
        await other.kill()
        shutil.rmtree(other.directory)
        other.start()
        await until(began.is_set)
        cut = log.start_position
        await until(lambda: told_of(leader, other) == (nameserver_pb2.LEARNER, SNAPSHOT))
        await until(grows)
        assert log.start_position == cut
        may_go_on.set()
        leads = leader.replica.leading.leader
        await until(lambda: other.replica.me in leads.record.in_sync)
        assert len(taken) == 1
    finally:
        may_go_on.set()
        await group.stop()


async def test_who_is_let_in_again_in_its_term_is_registered_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nameservers take the reports of who left for overtaken."""
    refused: set[str] = set()
    granted = BrokerLinks.granted.fget
    monkeypatch.setattr(
        BrokerLinks, "granted", property(lambda links: not refused and granted(links))
    )
    monkeypatch.setattr(
        BrokerLinks,
        "refusals",
        property(lambda links: {each: FencedTimer("another's") for each in refused}),
    )

    async def registered() -> bool:
        async with grpc.aio.insecure_channel(cluster.nameserver) as channel:
            stub = stubs.NameserverStub(channel)
            found = await stub.GetCluster(nameserver_pb2.GetClusterRequest())
        return [each.name for each in found.timers] == ["t0"]

    async def left() -> bool:
        return not await registered()

    group = TimerGroup(tmp_path / "t0", cluster.nameserver)
    group.start()
    try:
        leader = await group.in_sync(3)
        await until(registered)
        refused.add("b0")
        leader.term._claims_changed.set()
        await until(left)
        refused.clear()
        leader.term._claims_changed.set()
        await until(registered)
    finally:
        await group.stop()
