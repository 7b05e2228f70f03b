"""One trouble at a time with the disks of replicas: full, short of space, failed."""

import asyncio
import threading

import pytest

from duemq.errors import Internal
from duemq_server.replication import disk_id
from duemq_server.replication.running import process
from duemq_server.replication.running.leading import term
from duemq_server.replication.running.leading.term import FULL_MS, Leading
from duemq_server.replication.stores.file import FileStore
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.errors import DiskFailed, DiskFull, LogFull
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.service.replica_group import LinesService, SmallFile
from tests.service.replica_network import LASTING_S, others_of, running
from tests.service.running_cluster import until

__all__ = ["running"]


async def until_it_has_looked(member, times):
    """At the record, so often from now on."""
    campaign, looked = member.replica.campaign, set()

    def looks():
        looked.add(campaign._looked_ms)
        return len(looked) > times

    await until(looks)


async def test_a_follower_whose_disk_is_full_is_out_until_there_is_space(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        full, _ = others_of(group, leader)
        full.disk.full = True
        await leader.term.write(b"one")
        await until(lambda: full.role == ("joining", "its disk is full"))
        record = leader.replica.leading.leader
        await until(lambda: full.replica.me not in record.record.in_sync)
        await leader.term.write(b"two")
        full.disk.full = False
        await until(lambda: full.replica.me in record.record.in_sync)
        await until(lambda: full.lines == [b"one", b"two"])


async def test_who_could_not_take_what_is_committed_long_since_is_sent_it_again(
    running, monkeypatch
):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        slow, _ = others_of(group, leader)
        await slow.kill()
        await group.write(b"one")  # committed without it
        refused = []

        def extend(log, position, runs, extend=ReplicaLog.extend):
            if log.directory.startswith(str(slow.directory)) and not refused:
                refused.append(position)
                raise LogFull("too much waits for the disk")
            return extend(log, position, runs)

        monkeypatch.setattr(ReplicaLog, "extend", extend)
        slow.start()
        await until(lambda: bool(refused))
        await until(lambda: slow.lines == [b"one"])
        await group.in_sync(3)


async def test_who_follows_with_a_disk_that_failed_ends(running, monkeypatch):
    """By itself it would try one stream after the other, for ever: a start looks at the disk."""
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, _ = others_of(group, leader)
        await late.kill()
        for number in range(3):  # what it gets at once claims more than it has
            await group.write(b"%d" % number)

        def unlink(path):
            raise DiskFailed(f"remove {path}: Input/output error")

        monkeypatch.setattr(late.disk, "unlink", unlink)
        late.start()
        with pytest.raises(Internal, match=r"the disk failed: remove .*catching-up: Input/output"):
            async with asyncio.timeout(LASTING_S):
                await late.task
        late.task = None
        await late._vanish()


async def test_a_leader_whose_disk_is_full_lets_another_one_lead(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"one")
        leader.disk.full = True
        refused = asyncio.create_task(leader.term.write(b"nowhere"))
        await until(lambda: any(each.term is not None for each in others_of(group, leader)))
        refused.cancel()
        await group.write(b"two")
        leader.disk.full = False
        await until(lambda: leader.lines == [b"one", b"two"])


@pytest.fixture
def stall(monkeypatch):
    """Has a member's disk end no sync until what it answers is set."""

    def begin(member):
        goes_on = threading.Event()

        def fdatasync(file):
            if file._disk is member.disk:
                goes_on.wait(120)
            file._file.fdatasync()

        monkeypatch.setattr(SmallFile, "fdatasync", fdatasync, raising=False)
        return goes_on

    return begin


@pytest.fixture(params=[True, False], ids=["kernel", "silence"])
def known_by(request, monkeypatch):
    """By what others know that a lease has ended: a kernel's word, or as of etcd and Kubernetes."""
    lease_of = FileStore._lease_of

    def without_the_kernel(store, leader):
        return lease_of(store, leader)[0], False

    if not request.param:
        monkeypatch.setattr(FileStore, "_lease_of", without_the_kernel)


async def written_only(member):
    """What is on its way to the disk by now."""
    log = member.replica.state.log
    waits = asyncio.create_task(member.term.write(b"one"))
    await until(lambda: log.durable_position < log.written_position == log.end_position)
    return waits


async def test_a_leader_that_stops_while_its_disk_stalls_lets_another_one_lead(
    running, stall, known_by, monkeypatch
):
    """It cannot hand over, and cannot end before its last sync does."""
    monkeypatch.setattr(process, "HAND_OVER_S", 0.2)
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        goes_on = stall(leader)
        waits = await written_only(leader)
        stopping = asyncio.create_task(leader.stop())
        await until(lambda: any(each.term is not None for each in others_of(group, leader)))
        assert not stopping.done()
        goes_on.set()
        await stopping
        waits.cancel()
        await group.write(b"two")


async def test_a_leader_whose_disk_stalls_lets_another_one_lead(
    running, stall, known_by, monkeypatch
):
    monkeypatch.setattr(term, "STALL_MS", 300)
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        goes_on = stall(leader)
        waits = await written_only(leader)
        await until(lambda: any(each.term is not None for each in others_of(group, leader)))
        assert not goes_on.is_set()
        goes_on.set()
        waits.cancel()
        await group.write(b"two")
        await until(lambda: leader.lines == [b"one", b"two"])


async def test_where_no_other_disk_goes_on_a_leader_whose_disk_stalls_leads_on(
    running, stall, monkeypatch
):
    monkeypatch.setattr(term, "STALL_MS", 0)
    async with running(1) as (_, _, leader):
        goes_on = stall(leader)
        waits = await written_only(leader)
        looked = []
        look = leader.replica.leading._show
        monkeypatch.setattr(leader.replica.leading, "_show", lambda: looked.append(look()))
        await until(lambda: len(looked) > 3)
        assert leader.term is not None
        goes_on.set()
        await waits


async def test_who_survives_with_a_full_disk_leads_when_there_is_space(running):
    async with running(2) as (group, _, leader):
        [survivor] = others_of(group, leader)
        survivor.disk.full = True
        refused = asyncio.create_task(leader.term.write(b"one"))
        await until(lambda: survivor.role == ("joining", "its disk is full"))
        refused.cancel()
        await leader.kill()
        record = survivor.replica.campaign._store.blocking.read
        await until(lambda: record().dead)
        await until_it_has_looked(survivor, 10)
        assert not survivor.task.done()
        assert survivor.role == ("joining", "its disk is full")
        survivor.disk.full = False
        await until(lambda: survivor.role[0] == "preparing")
        leader.start()
        await group.write(b"two")


async def test_a_leader_that_is_started_anew_with_a_full_disk_lets_another_one_lead(running):
    """It takes over at once, for the record is in its name, and cannot write that it does."""
    async with running(3) as (group, net, leader):
        await leader.term.write(b"one")
        others = others_of(group, leader)
        for each in others:
            net.stores[each.name].away = True
        await leader.kill()
        leader.disk.full = True
        leader.start()
        epochs: set[int] = set()

        def prepares() -> bool:
            term = leader.replica and leader.replica.leading
            if term:  # it gives each up after a moment
                epochs.add(term.leader.epoch)
            return bool(epochs)

        await until(prepares)
        [epoch] = epochs
        for each in others:
            net.stores[each.name].away = False
        await group.write(b"two")
        assert (await group.leader()).replica.leading.leader.epoch > epoch
        leader.disk.full = False
        await until(lambda: leader.lines == [b"one", b"two"])


@pytest.mark.parametrize(
    ("owner", "method"), [(Leading, "start"), (LinesService, "lead")], ids=["epoch", "tables"]
)
async def test_who_has_no_space_any_more_when_it_has_won_does_not_end(
    running, monkeypatch, owner, method
):
    async with running(2) as (group, _, leader):
        await leader.term.write(b"one")
        do, refused = getattr(owner, method), []

        def full_once(owned, *arguments):
            if not refused:
                refused.append(owned)
                raise DiskFull("no space left")
            return do(owned, *arguments)

        monkeypatch.setattr(owner, method, full_once)
        await leader.kill()
        leader.start()
        await group.write(b"two")
        assert refused
        assert not any(member.task.done() for member in group.members.values())


async def test_who_has_no_space_for_its_tables_when_it_has_won_hands_over(running, monkeypatch):
    """The record is in its name: else it would win again and again, and lead never."""
    lead, hand_over, asked = LinesService.lead, Leading.hand_over, []
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"one")
        [other] = others_of(group, leader)

        def full_there(service, *arguments):
            if service.disk is leader.disk:
                raise DiskFull("no space left")
            return lead(service, *arguments)

        async def noted(leading, timeout_s, to=""):
            asked.append(leading.leader.me.name)
            return await hand_over(leading, timeout_s, to)

        monkeypatch.setattr(LinesService, "lead", full_there)
        monkeypatch.setattr(Leading, "hand_over", noted)
        await other.kill()
        await leader.kill()
        leader.start()
        await until(lambda: leader.role[0] == "preparing")  # it waits for the other one
        other.start()
        await group.write(b"two")
        assert await group.leader() is other
        assert asked[:1] == [leader.name]


async def test_a_leader_without_space_to_note_its_epoch_leads(running, monkeypatch):
    """Its log holds the epoch; who ended here would be started, take over, and end again."""
    save = disk_id.save

    def save_if_it_fits(data_dir, disk, known):
        if known.epoch:
            raise DiskFull("no space left")
        return save(data_dir, disk, known)

    monkeypatch.setattr(disk_id, "save", save_if_it_fits)
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"one")
        [follower] = others_of(group, leader)
        await until(lambda: follower.lines == [b"one"])


async def test_a_leader_that_is_short_of_space_lets_one_lead_that_is_not(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"one")
        short, spare = others_of(group, leader)
        short.disk.short = leader.disk.short = True
        await until(lambda: spare.term is not None)
        await group.write(b"two")
        assert spare.replica.leading.leader.epoch == 2


async def test_where_all_are_short_of_space_nobody_relieves_anybody(running):
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        (other,) = others_of(group, leader)
        other.disk.short = True
        term = leader.replica.leading
        followers = term.leader.followers  # by stream
        await until(lambda: [each.short_of_space for each in followers.values()] == [True])
        leader.disk.short = True
        await until(lambda: term._full_ms is not None and steady_ms() - term._full_ms > FULL_MS)
        assert not term.no_space.done()
        other.disk.short = False
        await until(lambda: other.term is not None)


async def test_when_disks_are_full_one_after_the_other_who_has_space_leads(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        full, spare = others_of(group, leader)
        full.disk.full = True
        await group.write(b"one")
        leads = leader.replica.leading.leader
        await until(lambda: full.replica.me not in leads.record.in_sync)
        await group.write(b"two")
        leader.disk.full = True
        refused = asyncio.create_task(leader.term.write(b"nowhere"))
        # Not the one that lacks line two; alone it commits nothing.
        await until(lambda: spare.replica.leading is not None)
        refused.cancel()
        assert spare.term is None
        assert not full.lines[2:]
        full.disk.full = False
        await group.write(b"three")  # by two, of which one has caught up
        leader.disk.full = False
        await group.in_sync(3)
        histories = await group.histories(b"three")
        assert set(map(tuple, histories.values())) == {(b"one", b"two", b"three")}


@pytest.mark.parametrize("error", [DiskFull, DiskFailed])
async def test_a_follower_stops_cleanly_without_a_checkpoint(running, monkeypatch, error):
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        [follower] = others_of(group, leader)

        def checkpoint():
            raise error("as it happens")

        monkeypatch.setattr(follower.replica.state, "checkpoint", checkpoint)
        await follower.stop()
        assert not leader.task.done()
