"""Replicas that run: streams, roles, hand-over, over a real store in a directory."""

import asyncio
import os
import shutil

import pytest

from duemq.errors import InvalidArgument, Timeout, Unavailable
from duemq.transport import channel, status
from duemq.v1 import nameserver_pb2
from duemq.v1.stubs import NameserverStub
from duemq_server.nameserver.edge.servicer import SERVICE as NAMESERVER
from duemq_server.replication.protocol.follower import Follower, StreamBroken
from duemq_server.replication.protocol.record import MemberChange
from duemq_server.replication.running import process
from duemq_server.replication.running.leading import handing_over, members
from duemq_server.replication.running.leading import term as term_module
from duemq_server.replication.running.process import Replica
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1.stubs import ReplicationStub
from duemq_server.serving.process import live
from duemq_server.storage.errors import LogFull
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.service.replica_group import (
    KIND,
    Group,
    Lines,
    LinesService,
    LinesTerm,
    moved,
    patient_hand_overs,
)
from tests.service.replica_network import LASTING_S
from tests.service.running_cluster import WAIT_S, until


@pytest.fixture
async def group(tmp_path, monkeypatch):
    patient_hand_overs(monkeypatch)
    groups = []

    def make(count, *, started=True, **settings):
        made = Group(tmp_path, count, **settings)
        groups.append(made)
        if started:
            made.start()
        return made

    yield make
    for made in groups:
        await made.stop()


async def lines_of(member, count):
    """What it has applied, once that are so many."""
    await until(lambda: len(member.lines) >= count)
    return member.lines


def in_its_record(member):
    """How many are, as it saw it last."""
    record = member.replica.record if member.replica is not None else None
    return len(record.in_sync) if record is not None else 0


def log_end(member):
    """0 before it is opened."""
    state = getattr(member.replica, "state", None)
    return state.log.end_position if state is not None else 0


async def until_it_has_looked(leader):
    """Twice at its set, from now on: once for certain to the end."""
    term, looks = leader.replica.leading, []
    look = term._show
    term._show = lambda: looks.append(look())
    await until(lambda: len(looks) >= 2)


async def until_it_was_refused_again(member):
    """By a stream that began from now on."""
    for _ in range(2):
        before = member.replica.campaign.streams.retry_ms
        await until(lambda before=before: member.replica.campaign.streams.retry_ms > before)


async def test_two_replicas_found_a_group_and_hold_the_same(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    for number in range(100):
        await leader.term.write(b"line %d" % number)
    (other,) = [each for each in lines.members.values() if each is not leader]
    assert await lines_of(other, 100) == [b"line %d" % number for number in range(100)]
    assert other.replica.state.store_id == leader.replica.state.store_id


async def test_a_log_from_before_there_were_replicas_is_the_groups_also_if_it_comes_last(group):
    """Pods start side by side: empty replicas wait in the record by then."""
    lines = group(3, started=False)
    last = lines.members["c"]
    last.directory.mkdir(parents=True)
    before = Lines(last.directory, 77, last.disk)
    for number in range(10):
        before.log.append(KIND, [b"line %d" % number])
    before.log.write_pending()
    before.close()
    lines.members["a"].start()
    lines.members["b"].start()
    await until(lambda: in_its_record(lines.members["a"]) == 2)
    last.start()
    leader = await lines.in_sync(3)
    await leader.term.write(b"line 10")
    histories = await lines.histories(b"line 10")
    assert set(map(tuple, histories.values())) == {tuple(b"line %d" % n for n in range(11))}
    assert {each.replica.state.store_id for each in lines.members.values()} == {77}


async def test_part_of_a_log_from_before_there_were_replicas_is_no_groups_history(group, tmp_path):
    """Whoever has not come to its first EPOCH entry, and finds the record gone, has not all."""
    lines = group(2, started=False, catch_up_rate=1 << 16, lease_duration=LASTING_S)
    first, second = lines.members.values()
    first.directory.mkdir(parents=True)
    before = Lines(first.directory, 77, first.disk)
    for number in range(40):
        before.log.append(KIND, [b"%d " % number + b"x" * 10_000])
        before.log.write_pending()  # so that each claims what is before it
    whole = before.log.end_position
    before.close()
    first.start()
    await until(lambda: first.role[0] == "preparing")
    second.start()
    await until(lambda: log_end(second) > 0 and second.replica.state.log.catching_up)
    (tmp_path / "leases" / "lines.record").unlink()
    await first.kill()
    await until(lambda: "`duemq replica adopt`" in second.reason or bool(second.replica.leading))
    assert second.replica.leading is None
    assert log_end(second) < whole


async def test_a_clean_stop_hands_over_and_nothing_is_lost(group):
    lines = group(3)
    leader = await lines.in_sync(3)
    await leader.term.write(b"before")
    term = leader.term
    await leader.stop()
    assert term.quiet
    assert term.handed_over
    await lines.write(b"after")
    successor = await lines.leader()
    assert successor is not leader
    leader.start()
    assert await lines_of(leader, 2) == [b"before", b"after"]


async def test_a_deposed_leader_that_is_told_to_stop_does_not_begin_anew(group, monkeypatch):
    monkeypatch.setattr(process, "HAND_OVER_S", 3_600.0)
    lines = group(3)
    leader = await lines.in_sync(3)
    replica, term = leader.replica, leader.term
    replica.leading.give_up()
    await leader.stop()  # before it has begun
    assert leader.replica is replica
    assert term.handed_over
    await lines.write(b"after")


async def test_a_killed_leader_is_followed_by_one_that_has_all(group):
    lines = group(3)
    leader = await lines.in_sync(3)
    for number in range(50):
        await leader.term.write(b"%d" % number)
    await leader.kill()
    await lines.write(b"after")
    leader.start()
    expected = [b"%d" % number for number in range(50)] + [b"after"]
    for member in lines.members.values():
        if member.term is None:
            assert await lines_of(member, 51) == expected


async def test_of_two_nothing_is_accepted_while_one_is_away(group, caplog):
    lines = group(2)
    leader = await lines.in_sync(2)
    assert "all 2 replicas of lines must be there, for min_insync is 2" in caplog.text
    await leader.term.write(b"both")
    (other,) = [each for each in lines.members.values() if each is not leader]
    await other.kill()
    await until(lambda: bool(leader.replica.leading.blocked))
    assert leader.replica.leading.blocked == (other.name,)
    reason = leader.replica.operators.status().reason
    assert reason.startswith(f"nothing is committed: it waits for {other.name}; min_insync is 2")
    state, leads = leader.replica.state, leader.replica.leading.leader
    end = state.log.end_position
    waiting = asyncio.create_task(leader.term.write(b"alone"))
    await until(lambda: leads.durable == state.log.end_position > end)  # all that it can do alone
    await until_it_has_looked(leader)
    assert leads.high_watermark == end
    assert not waiting.done()
    other.start()
    await waiting
    assert await lines_of(other, 2) == [b"both", b"alone"]


async def test_of_two_the_survivor_goes_on_with_a_new_disk_in_place_of_the_leaders(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    await leader.term.write(b"one")
    (other,) = [each for each in lines.members.values() if each is not leader]
    await leader.kill()
    await until(lambda: other.role[0] == "preparing")
    await until(lambda: bool(other.replica.operators.status().reason))
    reason = other.replica.operators.status().reason
    assert reason.startswith(f"nothing is committed: it waits for {leader.name}; min_insync is 2")
    assert other.term is None
    assert str(other.replica.refusal()).endswith(f"it prepares to; {reason}")
    shutil.rmtree(leader.directory)
    leader.start()
    await lines.write(b"two")
    assert (await lines.leader()) is other
    assert await lines_of(leader, 2) == [b"one", b"two"]


async def test_an_emptied_directory_is_a_new_disk_and_gets_all(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    await leader.term.write(b"one")
    (other,) = [each for each in lines.members.values() if each is not leader]
    await other.kill()
    disk = other.replica.me
    shutil.rmtree(other.directory)
    other.start()
    await leader.term.write(b"two")  # only with the new disk in the old one's place
    assert other.replica.me != disk
    assert await lines_of(other, 2) == [b"one", b"two"]
    assert other.replica.me in leader.replica.leading.leader.record.in_sync


async def test_where_the_only_disk_in_sync_is_lost_all_say_what_helps(group):
    lines = group(2, min_insync=1, lease_duration=LASTING_S)
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await leader.term.write(b"both")
    await other.kill()
    await leader.term.write(b"alone")  # the other one is not waited for any more
    lost = leader.replica.me
    await leader.kill()
    shutil.rmtree(leader.directory)
    for each in (leader, other):
        each.start()
    for each in (leader, other):
        await until(lambda each=each: "`duemq replica elect`" in each.reason)
        assert f"that of before, {lost}, led" in each.reason


async def test_a_log_that_is_gone_while_its_disk_id_is_not_leads_nothing(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    await leader.term.write(b"one")
    disk = leader.replica.me
    (other,) = [each for each in lines.members.values() if each is not leader]
    await leader.kill()
    shutil.rmtree(leader.directory / "log")
    leader.start()  # the record says that it leads
    await lines.write(b"two")
    assert (await lines.leader()) is other
    assert leader.replica.me != disk
    assert await lines_of(leader, 2) == [b"one", b"two"]


async def test_an_operator_moves_the_leader(group):
    lines = group(3)
    leader = await lines.in_sync(3)
    await leader.term.write(b"one")
    to = next(name for name in lines.members if name != leader.name)
    answer = await moved(leader, to)
    assert answer.leader == to
    await lines.write(b"two")
    assert (await lines.leader()).name == to
    assert await lines_of(leader, 2) == [b"one", b"two"]


async def test_whoever_moves_the_leader_is_told_also_if_that_one_sees_it_by_itself(
    group, monkeypatch
):
    """Its look at the record once a second may come first."""
    lines = group(3)
    leader = await lines.in_sync(3)
    to = next(name for name in lines.members if name != leader.name)
    monkeypatch.setattr(handing_over, "LOOK_S", 1.0)
    monkeypatch.setattr(term_module, "READ_S", 0.0)
    async with channel.connect(leader.settings.listen) as connection:
        asked = ReplicationStub(connection).HandOver(pb.HandOverRequest(to=to), timeout=WAIT_S)
        assert (await asked).leader == to
    await lines.write(b"goes on")


def change(name, *, joins, accepted=False):
    return MemberChange(name, joins, accepted)


async def test_a_member_that_is_removed_takes_no_part_until_it_is_added_again(group):
    lines = group(3)
    leader = await lines.in_sync(3)
    await leader.term.write(b"one")
    gone, stays = [each for each in lines.members.values() if each is not leader]
    would = await leader.replica.operators.change_members(
        change(gone.name, joins=False), confirmed=False
    )
    assert f"members of lines are {', '.join(sorted((leader.name, stays.name)))}" in would
    assert len(leader.replica.leading.leader.record.members) == 3
    await leader.replica.operators.change_members(change(gone.name, joins=False), confirmed=True)
    record = leader.replica.leading.leader.record
    assert {each.name for each in record.in_sync} == record.members == {leader.name, stays.name}
    await until(lambda: "STRANGER" in gone.reason)
    await leader.term.write(b"two")
    await until_it_was_refused_again(gone)
    end = leader.replica.state.log.end_position
    assert b"two" not in gone.lines
    assert gone.replica.state.log.end_position < end
    assert {each.name for each in leader.replica.leading.replicas()} == record.members
    await leader.replica.operators.change_members(change(gone.name, joins=True), confirmed=True)
    await lines.in_sync(3)
    assert await lines_of(gone, 2) == [b"one", b"two"]


async def test_a_replica_of_another_name_joins_once_it_is_a_member(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    await leader.term.write(b"one")
    new = lines.add("c")
    await until(lambda: "STRANGER" in new.reason)
    await leader.replica.operators.change_members(change("c", joins=True), confirmed=True)
    await lines.in_sync(3)
    assert await lines_of(new, 1) == [b"one"]


async def test_a_change_of_members_that_may_not_be_changes_nothing(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    before = leader.replica.leading.leader.record
    for wanted in (
        change(leader.name, joins=False),
        change(other.name, joins=False),
        change(other.name, joins=True),
        change("z", joins=False),
    ):
        with pytest.raises(InvalidArgument):
            await leader.replica.operators.change_members(wanted, confirmed=True)
    with pytest.raises(Unavailable, match="does not lead"):
        await other.replica.operators.change_members(change("z", joins=True), confirmed=True)
    assert leader.replica.leading.leader.record == before
    alone = change(other.name, joins=False, accepted=True)
    assert "fewer than min_insync, 2" in await leader.replica.operators.change_members(
        alone, confirmed=True
    )
    assert not leader.replica.leading.leader.set.enough


async def test_while_the_store_is_away_members_and_the_leader_stay(group, tmp_path, monkeypatch):
    # On a busy machine, too: who is behind would have to be taken out of the set.
    lines = group(3, lag_max=60.0)
    leader = await lines.in_sync(3)
    gone = next(name for name in lines.members if name != leader.name)
    monkeypatch.setattr(members, "CHANGE_S", 0.3)
    os.rename(tmp_path / "leases", tmp_path / "away")
    with pytest.raises(Unavailable, match="the record cannot be read"):
        await leader.replica.operators.hand_over(gone)
    asked = change(gone, joins=False)
    waiting = asyncio.create_task(leader.replica.operators.change_members(asked, confirmed=True))
    await until(lambda: leader.replica.leading.members.busy)
    with pytest.raises(Unavailable, match="under way"):
        await leader.replica.operators.change_members(asked, confirmed=True)
    with pytest.raises(Timeout, match=f"whether {gone} is a member"):
        await waiting
    await until(lambda: "cannot be read" in leader.replica.operators.status().reason)
    await lines.write(b"one")
    os.rename(tmp_path / "away", tmp_path / "leases")
    await until(lambda: not leader.replica.operators.status().reason)
    await leader.replica.operators.change_members(asked, confirmed=True)
    assert gone not in leader.replica.leading.leader.record.members


async def test_who_hears_the_leader_is_not_elected(group):
    lines = group(2)
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await until(lambda: other.replica.operators.status().role == "follower")
    with pytest.raises(InvalidArgument, match="duemq replica lead"):
        await other.replica.operators.elect(confirmed=False)


async def test_one_that_catches_up_is_admitted_although_more_comes_meanwhile(group, monkeypatch):
    """What came while it noted that it had caught up claimed more than it had synced."""
    lines = group(2)
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await other.kill()
    shutil.rmtree(other.directory)
    refused = []
    caught_up = ReplicaLog.caught_up

    def overtaken(log):
        if not refused:
            refused.append(log)
            raise ValueError("it claims more than is durable")
        caught_up(log)

    monkeypatch.setattr(ReplicaLog, "caught_up", overtaken)
    other.start()
    await leader.term.write(b"one")  # only with the new disk
    assert await lines_of(other, 1) == [b"one"]
    assert refused


async def test_a_stream_whose_answers_fail_is_opened_again(group, monkeypatch):
    lines = group(2)
    leader = await lines.in_sync(2)
    failing = [StreamBroken("as it happens")]
    answer = Follower.answer

    def fails_once(follower):
        if failing:
            raise failing.pop()
        return answer(follower)

    monkeypatch.setattr(Follower, "answer", fails_once)
    await leader.term.write(b"one")
    (other,) = [each for each in lines.members.values() if each is not leader]
    assert await lines_of(other, 1) == [b"one"]
    assert not failing


async def test_a_leader_that_nobody_follows_stops_soon(group, monkeypatch, caplog):
    lines = group(2)
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await other.kill()
    monkeypatch.setattr(process, "HAND_OVER_S", 3_600.0)
    await leader.stop()
    assert "nobody follows" in caplog.text


async def test_who_wins_while_too_much_waits_for_its_disk_begins_anew(group, monkeypatch):
    """What a leader sent may be more than a timer shard's log takes of its own."""
    append, refused = ReplicaLog.append, []

    def append_later(log, *entry):
        if not refused:
            refused.append(log)
            raise LogFull("8 MiB wait for the disk, at most 4 may")
        return append(log, *entry)

    monkeypatch.setattr(ReplicaLog, "append", append_later)
    leader = await group(1).in_sync(1)
    assert refused
    await leader.term.write(b"one")


async def test_who_waits_for_the_others_to_found_a_group_says_so(group):
    lines = group(3, started=False)
    for name in "ac":
        lines.members[name].start()
    for name in "ac":
        await until(lambda name=name: lines.members[name].reason.endswith("it waits for b"))
    lines.members["b"].start()
    await lines.in_sync(3)


async def test_who_begins_its_term_tells_clients_to_ask_again(group, monkeypatch):
    """Its services may not be there yet: a call would be UNIMPLEMENTED, for good."""
    may_start = asyncio.Event()
    start = LinesTerm.start

    async def slow_start(term):
        await may_start.wait()
        await start(term)

    monkeypatch.setattr(LinesTerm, "start", slow_start)
    lines = group(1)
    (member,) = lines.members.values()
    await until(lambda: member.replica is not None and member.service.term is not None)
    assert isinstance(member.replica.refusal(), Unavailable)
    may_start.set()
    await until(lambda: member.replica.refusal() is None)


async def test_clients_outside_are_told_who_leads_and_no_address_that_they_cannot_reach(
    group, monkeypatch
):
    monkeypatch.setattr(LinesService, "services", (NAMESERVER,))  # any that clients use
    lines = group(2, external_listen="127.0.0.1:0")
    leader = await lines.in_sync(2)
    (other,) = [each for each in lines.members.values() if each is not leader]
    await until(lambda: other.replica.record is not None)
    server, address = other.replica.server, leader.replica.server.advertised
    for port, told, value in (
        (server.address, f"{leader.name} does, at {address}", address),
        (server.external_address, f"{leader.name} does", ""),
    ):
        async with channel.connect(port) as connection:
            call = NameserverStub(connection).GetCluster(nameserver_pb2.GetClusterRequest())
            with pytest.raises(Unavailable) as refused:
                await status.answer(call)
        assert str(refused.value).endswith(f"does not lead: {told}")
        assert (refused.value.field, refused.value.value) == ("leader", value)


async def test_a_term_that_did_not_begin_is_not_stopped(group, monkeypatch):
    """What that would end is not there: it would hide why it did not begin."""

    async def no_start(_):
        raise InvalidArgument("another one has the name")

    monkeypatch.setattr(LinesTerm, "start", no_start)
    (member,) = group(1, started=False).members.values()
    replica = Replica(member.settings, LinesService(member.directory, member.disk))
    with pytest.raises(InvalidArgument, match="has the name"):
        await live(replica, asyncio.Event())
    term = replica.service.term
    assert (term.quiet, term.handed_over) == (False, None)
