"""One trouble at a time: a snapshot, a directory, the store, a leader that is cut off."""

import asyncio
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.replication.stores.store import StoreError
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.replicas import DISK_ID_FILE
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.service.replica_group import (
    KIND,
    SEGMENT_BYTES,
    Group,
    Lines,
    Member,
    moved,
    patient_hand_overs,
)
from tests.service.replica_network import FAST, LASTING_S, others_of, running
from tests.service.running_cluster import until

__all__ = ["running"]

LINE = b"x" * 1000


async def fill_a_segment(group):
    for number in range(SEGMENT_BYTES // len(LINE) + 5):
        await group.write(b"%d " % number + LINE)


async def test_who_is_behind_what_the_leader_keeps_gets_a_snapshot_in_the_same_term(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, _ = others_of(group, leader)
        await leader.term.write(b"first")
        await late.kill()
        await fill_a_segment(group)
        leader.forget()
        assert leader.replica.state.log.start_position > 0
        epoch = leader.replica.leading.leader.epoch
        late.start()
        await until(lambda: late.role[0] == "follower")
        await leader.term.write(b"last")
        await until(lambda: late.lines[-1:] == [b"last"])
        assert late.lines[0] == b"first"
        assert len(late.lines) == len(set(late.lines))
        assert leader.replica.leading.leader.epoch == epoch


async def test_who_has_what_its_leader_lost_takes_no_snapshot(running, tmp_path):
    """The leader's disk was put back from a copy, and the log here begins behind that."""
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, _ = others_of(group, leader)
        await leader.term.write(b"first")
        shutil.copytree(leader.directory, tmp_path / "copy")
        await late.kill()
        await fill_a_segment(group)
        leader.forget()
        late.start()
        await until(lambda: late.role[0] == "follower")
        await leader.term.write(b"last")
        await until(lambda: late.lines[-1:] == [b"last"])
        end = late.replica.state.log.end_position
        for member in group.members.values():
            await member.kill()
        shutil.rmtree(leader.directory)
        shutil.copytree(tmp_path / "copy", leader.directory)
        leader.start()
        await until(lambda: leader.replica is not None and leader.replica.leading is not None)
        late.start()
        await until(lambda: "lacks what is committed here" in late.reason)
        assert not late.installing
        assert late.replica.state.log.end_position == end


async def elect(member: Member) -> None:
    await member.replica.operators.elect(confirmed=True)


def lose_record(member: Member) -> None:
    leases = Path(member.settings.lease_store.removeprefix("file:"))
    (leases / f"{member.settings.name}.record").unlink()


async def adopt(member: Member) -> None:
    """Where the record is gone."""
    lose_record(member)
    await member.replica.operators.adopt(confirmed=True, accept_loss=True)


decisions = pytest.mark.parametrize("accept_loss", [elect, adopt])


@decisions
async def test_who_has_what_an_operator_gave_up_gives_it_up_and_is_no_exception_then(
    running, accept_loss
):
    async with running(3, lease_duration=LASTING_S, min_insync=1) as (group, _, leader):
        late, _ = others_of(group, leader)
        await leader.term.write(b"kept")
        await until(lambda: late.lines == [b"kept"])
        await late.kill()
        for line in (b"lost", b"lost, too"):
            await leader.term.write(line)
        for member in group.members.values():
            await member.kill()
        late.start()
        await until(lambda: bool(late.reason))
        await accept_loss(late)
        await until(lambda: late.term is not None)
        await late.term.write(b"new")
        leader.start()
        await until(lambda: leader.lines == [b"kept", b"new"])
        record = late.replica.leading.leader.record
        assert record.formers
        await until(lambda: leader.replica.campaign.copy.former_to(record) is None)
        for member in group.members.values():
            await member.kill()
        lose_record(late)
        late.start()
        await until(lambda: "duemq replica adopt" in late.reason)
        await late.replica.operators.adopt(confirmed=True)
        await until(lambda: late.term is not None)
        found = late.replica.leading.leader.record
        assert (found.store_id, found.formers) == (record.store_id, record.formers)


@decisions
async def test_who_has_a_snapshot_of_what_an_operator_gave_up_takes_another_one(
    running, accept_loss
):
    """Its log ends where both have all, and is not all that it has."""
    async with running(3, lease_duration=LASTING_S, min_insync=1) as (group, _, leader):
        late, other = others_of(group, leader)
        await late.kill()
        await fill_a_segment(group)
        await until(lambda: other.lines == leader.lines)
        await other.kill()
        await leader.term.write(b"lost")
        leader.forget()
        arrived = Lines(late.directory, 0, late.disk)
        snapshot = leader.replica.service.snapshot(older=False)
        arrived.install(snapshot.read(), leader.replica.state.log.start_position)
        arrived.close()
        await leader.kill()
        other.start()
        await until(lambda: bool(other.reason))
        await accept_loss(other)
        await until(lambda: other.term is not None)
        late.start()
        await until(lambda: late.role[0] == "follower")
        await other.term.write(b"new")
        await until(lambda: late.lines[-1:] == [b"new"])
        assert b"lost" not in late.lines


async def test_a_snapshot_is_installed_to_its_end_whoever_leads_meanwhile(running):
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, third = others_of(group, leader)
        await late.kill()
        await fill_a_segment(group)
        leader.forget()
        shutil.rmtree(late.directory)
        late.disk.may_install.clear()
        late.start()
        await until(lambda: late.role[0] == "learner" and bool(late.installing))
        replica = late.replica
        await leader.kill()
        leader.start()
        await until(lambda: third.term is not None or leader.term is not None)
        await group.write(b"meanwhile")
        epoch = (await group.leader()).replica.leading.leader.epoch
        await until(lambda: replica.campaign.found.record.epoch == epoch)
        assert replica.campaign.streams.installing is not None
        assert not late.task.done()
        late.disk.may_install.set()
        await group.write(b"last")
        await until(lambda: late.lines[-1:] == [b"last"])
        assert late.replica is replica
        assert b"meanwhile" in late.lines


def write_alone(directory: Path, line: bytes) -> None:
    """As a process without replicas whose `disk_id` somebody removed."""
    (directory / DISK_ID_FILE).unlink()
    log = ReplicaLog.open(str(directory / "log"), RealDisk(), segment_bytes=SEGMENT_BYTES)
    list(log.recover())
    log.append(KIND, [line])
    log.write_pending()
    log.close()


@pytest.mark.parametrize("alone", [LINE, 3 * LINE], ids=["shorter", "longer"])
async def test_a_log_that_something_else_wrote_to_is_refused(running, alone):
    """It has the leader's epoch, in which it would pass for the leader's own."""
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, _ = others_of(group, leader)
        await leader.term.write(b"first")
        await until(lambda: late.lines == [b"first"])
        await late.kill()
        write_alone(late.directory, alone)
        await leader.term.write(2 * LINE)
        late.start()
        await until(lambda: "something else wrote to it" in late.role[1])
        assert late.role[0] == "joining"
        assert late.lines == [b"first"]
        await late.kill()
        shutil.rmtree(late.directory)
        late.start()
        await until(lambda: late.lines == [b"first", 2 * LINE])


def damage(log: ReplicaLog) -> None:
    """In the middle of the last line."""
    segment = log.segments[-1]
    with open(segment.path, "r+b") as file:
        file.seek(log.written_position - segment.start - len(LINE) // 2)
        file.write(b"other")


async def test_who_has_a_whole_copy_of_what_is_damaged_at_the_leader_follows(running, caplog):
    """All others would be refused, and it alone be left in sync."""
    async with running(3, lease_duration=LASTING_S) as (group, _, leader):
        late, _ = others_of(group, leader)
        await leader.term.write(LINE)
        await until(lambda: late.lines == [LINE])
        await late.kill()
        damage(leader.replica.state.log)
        late.start()
        await until(lambda: late.role[0] == "follower")
        await leader.term.write(b"second")
        await until(lambda: late.lines == [LINE, b"second"])
    assert "is not compared" in caplog.text


async def test_a_log_of_another_group_is_refused_although_its_epochs_are_the_same(
    running, tmp_path
):
    other = Group(tmp_path / "other", 2, **FAST)
    other.start()
    await other.in_sync(2)
    await other.write(b"another group's")
    await other.stop()
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"ours")
        (follower,) = others_of(group, leader)
        await follower.kill()
        shutil.rmtree(follower.directory)
        shutil.copytree(tmp_path / "other" / "a", follower.directory)
        follower.start()
        await until(lambda: "another one's" in follower.role[1])
        assert follower.replica.state.store_id != leader.replica.state.store_id
        await follower.kill()
        shutil.rmtree(follower.directory)
        follower.start()
        await until(lambda: follower.lines == [b"ours"])


async def test_a_copy_of_a_data_directory_is_seen_and_takes_no_part(tmp_path):
    group = Group(tmp_path, 3, lease_duration=12.0)  # a copy waits so long for whom it copies
    group.start()
    copies = []
    try:
        leader = await group.in_sync(3)
        await group.write(b"one")
        names = tuple(group.members)
        for original in (leader, others_of(group, leader)[0]):
            root = tmp_path / f"copies of {original.name}"
            shutil.copytree(original.directory, root / original.name)
            leases = {"lease_store": original.settings.lease_store, "lease_duration": 12.0}
            copies.append(Member(root, original.name, names, **leases))
        of_the_leader, of_another = copies
        epoch = leader.replica.leading.leader.epoch
        for copy in copies:
            copy.start()
        await until(lambda: "which follows: the data directory" in of_another.reason)
        await until(lambda: "leads with the disk of this one" in of_the_leader.reason)
        await group.write(b"two")
        assert leader.replica.leading.leader.epoch == epoch
        assert not any(copy.lines[1:] for copy in copies)
        await of_another.kill()
        shutil.rmtree(of_another.directory)
        of_another.start()  # with a disk of its own, and still of another one's name
        await until(lambda: "two processes have one name" in of_another.reason)
    finally:
        for member in copies:
            await member.kill()
            member.port.close()
        await group.stop()


async def test_a_leader_whose_lease_had_ended_serves_only_when_the_record_says_so(running):
    async with running(3) as (group, net, leader):
        await leader.term.write(b"one")
        deposed = leader.replica.leading
        net.isolate(leader.name)
        net.stores[leader.name].away = True
        deposed._is_cut_off = lambda: False  # as if it were stopped
        await until(lambda: any(each.term is not None for each in others_of(group, leader)))
        assert not deposed.serves()
        net.stores[leader.name].away = False  # it renews its lease, and that is answered
        while not deposed.deposed.done():
            assert not deposed.serves()
            await asyncio.sleep(0)
        net.heal()
        await group.write(b"two")


async def test_a_leader_that_reaches_nobody_gives_up(running):
    async with running(3) as (group, net, leader):
        replica = leader.replica
        net.isolate(leader.name)
        net.stores[leader.name].away = True
        await until(lambda: leader.replica is not replica)
        await until(lambda: "cannot be read" in leader.role[1])
        await group.write(b"by another one")
        net.heal()
        await until(lambda: leader.lines == [b"by another one"])


async def test_while_the_store_is_away_a_moments_silence_ends_no_term(running):
    """Who began anew would know of no record."""
    async with running(2, lease_duration=LASTING_S) as (group, net, leader):
        (follower,) = others_of(group, leader)
        term, looks = leader.replica.leading, []
        for store in net.stores.values():
            store.away = True
        term._lease._reached_ms -= 2_000 * LASTING_S  # as if it were away for long
        term.leader._renewed_ms = None
        show = term._show
        term._show = lambda: (looks.append(term.serves()), show())
        link = net.link(follower.name, leader.name)
        link.swallow(back=False)
        await until(lambda: term.deposed.done() or False in looks[:-1])
        assert not term.deposed.done()
        link.heal()
        await until(term.serves)
        await leader.term.write(b"after")


async def test_while_the_store_is_away_a_follower_comes_back_to_whom_it_knows(running):
    async with running(2, lease_duration=LASTING_S) as (group, net, leader):
        (follower,) = others_of(group, leader)
        await leader.term.write(b"before")
        for store in net.stores.values():
            store.away = True
        link = net.link(follower.name, leader.name)
        link.cut()
        await until(lambda: bool(leader.replica.leading.blocked))
        link.heal()
        await leader.term.write(b"after")
        await until(lambda: follower.lines == [b"before", b"after"])


async def test_a_directory_of_records_that_is_away_is_no_record_that_is_gone(running, tmp_path):
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        await leader.term.write(b"one")
        (tmp_path / "leases").rename(tmp_path / "elsewhere")
        (follower,) = others_of(group, leader)
        await until(lambda: "cannot be read" in follower.role[1])
        await leader.term.write(b"two")
        (tmp_path / "elsewhere").rename(tmp_path / "leases")
        await until(lambda: follower.role == ("follower", ""))
        await leader.term.write(b"three")
        assert leader.term is not None


async def test_a_record_that_was_set_back_is_written_again_by_its_leader(running, caplog):
    """By a backup of the store, say: who was in sync in that lacks what came since."""
    async with running(3, lease_duration=LASTING_S) as (group, net, leader):
        late, _ = others_of(group, leader)
        store, me = net.stores[leader.name], late.replica.me
        backup = store.read().record
        await late.kill()
        await until(lambda: me not in store.read().record.in_sync)
        epoch = leader.replica.leading.leader.epoch
        store.swap(store.read().version, backup)
        assert me in store.read().record.in_sync
        await until(lambda: me not in store.read().record.in_sync)
        assert leader.replica.leading.leader.epoch == epoch == store.read().record.epoch
        assert "not what this leader wrote last" in caplog.text


async def test_a_store_that_takes_no_changes_is_told_of_once(running, monkeypatch, caplog):
    """It answers reads: the leader asks again and again."""
    async with running(3, lease_duration=LASTING_S) as (group, net, leader):
        late, _ = others_of(group, leader)
        store, me = net.stores[leader.name], late.replica.me
        refused = []

        def swap(version, wanted):
            refused.append(wanted)
            raise StoreError("its disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "swap", swap)
            await late.kill()
            await until(lambda: len(refused) >= 5)
        await until(lambda: me not in store.read().record.in_sync)
        assert caplog.text.count("a change of who is in sync is not answered") == 1


async def test_who_is_away_is_not_asked_to_lead(running):
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        (follower,) = others_of(group, leader)
        await follower.kill()
        term = leader.replica.leading
        await until(lambda: not term.leader.followers)
        assert follower.name in {each.name for each in term.leader.record.in_sync}
        with pytest.raises(InvalidArgument, match="cannot lead"):
            await leader.replica.operators.hand_over(follower.name)
        assert not term.leader.resigned


async def test_a_slow_catch_up_is_no_silence(running, monkeypatch):
    # Of the leader, not of a machine on which nobody gets anything done.
    times = ReplicaSettings.times
    patient = partial(replace, silent_ms=1_000 * LASTING_S)
    monkeypatch.setattr(ReplicaSettings, "times", lambda settings: patient(times(settings)))
    async with running(2, lease_duration=LASTING_S) as (group, _, leader):
        (follower,) = others_of(group, leader)
        await leader.term.write(LINE)
        leader.replica.leading._shipping.rate = 1  # byte a second
        await follower.kill()
        shutil.rmtree(follower.directory)
        follower.start()
        await leader.term.write(b"with the new disk")
        await until(lambda: follower.lines == [LINE, b"with the new disk"])
        reasons = [change.reason for change in follower.replica.campaign.history.changes]
        assert not any("silent" in reason for reason in reasons)


@pytest.mark.parametrize("byte", [4, 60])
async def test_a_leader_whose_log_is_damaged_is_said_to_be(tmp_path, byte, monkeypatch):
    """Nobody can follow it from there: another one has its own copy."""
    patient_hand_overs(monkeypatch)
    lines = Group(tmp_path, 3)
    lines.start()
    try:
        leader = await lines.in_sync(3)
        for number in range(30):
            await leader.term.write(b"line %d " % number + bytes(100))
        other, third = (each for each in lines.members.values() if each is not leader)
        await other.kill()
        shutil.rmtree(other.directory)
        entries = leader.term.state.log.entries(0)
        at = next(entry.position for entry in entries if entry.kind == KIND)
        segment = leader.directory / "log" / ("0" * 20)
        flip(segment, at + byte)
        other.start()
        await until(lambda: "let another replica lead" in other.reason)
        flip(segment, at + byte)  # else it would not start as a follower here, which reads all
        await moved(leader, third.name)
        await until(lambda: len(other.lines) == 30)
    finally:
        await lines.stop()


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 255]))
