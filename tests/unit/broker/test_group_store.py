"""Where a coordinator's groups are kept where its log has replicas: on a disk in memory."""

from __future__ import annotations

import asyncio

import pytest

from duemq.protocol.balance import MessageQueue
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.group_store import GROUPS_FILE, GroupFile, GroupLog
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from duemq_server.broker.store import journal
from duemq_server.storage import checkpoint
from duemq_server.storage.errors import UnknownVersion
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.groups.stepping import SteppingCoordinator
from tests.unit.broker.leading import DATA, NOW_MS, Leader, extend, opened

QUEUES = tuple(MessageQueue("orders", "b1", number) for number in range(4))


class HeldCommits(Commits):
    """Tells when somebody waits."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.waiting = asyncio.Event()

    async def wait(self, position: int) -> None:
        self.waiting.set()
        await super().wait(position)


class World:
    """A coordinator on a store that leads; what is appended is committed soon, or held."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.leader.log.on_append = self._appended
        self.commits_at_once = True
        self.commits = HeldCommits(self.leader.committed)
        self.coordinator = empty()
        self.groups = self.group_log()

    def group_log(self) -> GroupLog:
        return GroupLog(self.leader.store, self.commits, DATA, self.leader.disk)

    def join(self, group: str, member_id: str, **fields: int | str) -> None:
        self.coordinator.join(Hello(group, member_id, {"orders": TopicFilter()}, **fields), NOW_MS)

    def _appended(self) -> None:
        if self.commits_at_once:
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        self.leader.settle()
        self.commits.advance(self.leader.committed)

    async def save(self) -> set[str]:
        return set(await self.groups.save(self.coordinator.table))

    @property
    def kept(self) -> list[tuple[str, bool]]:
        """The groups that the log's entries are of, and whether they are there."""
        entries = [e for e in self.leader.log.entries(0) if e.kind == journal.MEMBERSHIP]
        kept = [journal.read_membership(each.body) for each in entries]
        return [(group, state is not None) for group, state in kept]


def empty() -> SteppingCoordinator:
    made = SteppingCoordinator("b1")
    made.routes_changed({"orders": QUEUES}, ["b1"], NOW_MS)
    return made


@pytest.fixture
def world() -> World:
    return World()


async def test_each_group_that_has_changed_is_an_entry(world: World) -> None:
    world.join("g", "m1")
    world.join("h", "m1")
    assert await world.save() == set()
    assert sorted(world.kept) == [("g", True), ("h", True)]
    world.join("g", "m2")
    await world.save()
    assert world.kept[2:] == [("g", True)]
    world.coordinator.leave("h", "m1", NOW_MS)
    world.coordinator.forget("h")
    await world.save()
    assert world.kept[3:] == [("h", False)]


async def test_it_is_saved_when_it_is_committed_and_not_before(world: World) -> None:
    world.join("g", "m1")
    world.commits_at_once = False
    saving = asyncio.create_task(world.save())
    waiting = asyncio.create_task(world.commits.waiting.wait())
    await asyncio.wait({saving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    world.leader.write()
    assert world.kept == [("g", True)]
    assert world.leader.log.durable_position > world.commits.position
    assert not saving.done()
    world.settle()
    assert await saving == set()


@pytest.mark.parametrize("strategy", ["average", "sticky"])
async def test_who_leads_next_has_the_same_groups(world: World, strategy: str) -> None:
    world.join("g", "m1", strategy=strategy)
    world.join("g", "m2", strategy=strategy, incarnation=5)
    await world.save()
    standby = opened(FaultyDisk())
    extend(standby, world.leader.log)
    standby.apply(world.leader.committed)
    store = standby.promote().store
    next_one = empty()
    GroupLog(store, Commits(0), DATA, FaultyDisk()).restore(next_one.table, NOW_MS)
    before, after = world.coordinator.group("g"), next_one.group("g")
    assert (after.generation, after.incarnations) == (before.generation, {"m2": 5})
    assert after.absent is not None
    assert after.absent.keys() == before.members.keys()
    assert after.allocated == (before.allocated if strategy == "sticky" else {})
    assert not next_one.table.changed


async def test_a_file_from_before_there_were_replicas_goes_into_the_log(world: World) -> None:
    path, disk = f"{DATA}/{GROUPS_FILE}", world.leader.disk
    world.join("g", "m1")
    world.join("h", "m1")
    await GroupFile(DATA, disk).save(world.coordinator.table)
    assert disk.exists(path)
    world.coordinator, world.groups = empty(), world.group_log()
    world.groups.restore(world.coordinator.table, NOW_MS)
    assert {group.name for group in world.coordinator.groups()} == {"g", "h"}
    await world.save()
    assert sorted(world.kept) == [("g", True), ("h", True)]
    assert not disk.exists(path)


async def test_a_damaged_file_keeps_no_broker_from_its_start(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The groups have moved here, as it were: nobody's queues are given away before all is told."""
    disk, file = world.leader.disk, GroupFile(DATA, world.leader.disk)
    world.join("g", "m1")
    await file.save(world.coordinator.table)
    disk.flip(f"{DATA}/{GROUPS_FILE}", 30)
    again = empty()
    file.restore(again.table, NOW_MS)
    assert f"{DATA}/{GROUPS_FILE}" in caplog.text
    assert "Nothing is to be done" in caplog.text  # a copy would lack what came since
    again.join(Hello("g", "m2", {"orders": TopicFilter()}, generation=7), NOW_MS)
    assert (
        again.group("g").hold_until_ms == NOW_MS + again.group("g").members["m2"].session_timeout_ms
    )
    await file.save(again.table)
    restored = empty()
    file.restore(restored.table, NOW_MS)
    assert (restored.group("g").absent or {}).keys() == {"m2"}


async def test_what_a_full_disk_refused_is_saved_when_there_is_space(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    disk, file = world.leader.disk, GroupFile(DATA, world.leader.disk)
    await file.save(world.coordinator.table)
    world.join("g", "m1")
    disk.capacity_bytes = disk.used_bytes()
    for _ in range(2):
        assert await file.save(world.coordinator.table) == ()
        assert world.coordinator.table.changed
    assert caplog.text.count("could not be saved") == 1
    assert "Traceback" not in caplog.text
    disk.capacity_bytes = None
    await file.save(world.coordinator.table)
    assert not world.coordinator.table.changed
    restored = empty()
    file.restore(restored.table, NOW_MS)
    assert (restored.group("g").absent or {}).keys() == {"m1"}


async def test_what_the_log_says_counts_and_not_an_old_file(world: World) -> None:
    world.join("old", "m1")
    await GroupFile(DATA, world.leader.disk).save(world.coordinator.table)
    world.coordinator = empty()
    world.join("g", "m1")
    await world.save()
    restored = empty()
    world.group_log().restore(restored.table, NOW_MS)
    assert [group.name for group in restored.groups()] == ["g"]


async def test_what_the_log_refuses_is_told_to_nobody_and_saved_with_the_next(world: World) -> None:
    world.join("g", "m1")
    world.leader.log.disk_full = True
    assert await world.save() == {"g"}
    assert world.coordinator.table.changed
    world.leader.log.disk_full = False
    assert await world.save() == set()
    assert world.kept == [("g", True)]
    assert not world.coordinator.table.changed


@pytest.mark.parametrize("payload", [b'{"version": 2}', b"another encoding"])
def test_a_file_of_a_newer_release_is_refused_by_its_name(payload: bytes) -> None:
    disk = Leader().disk
    path = f"{DATA}/{GROUPS_FILE}"
    checkpoint.save(path, payload, disk)
    with pytest.raises(UnknownVersion, match=path) as raised:
        GroupFile(DATA, disk).restore(empty().table, NOW_MS)
    if payload.startswith(b"{"):
        assert str(raised.value) == f"{path} has version 2, this release reads 1"
