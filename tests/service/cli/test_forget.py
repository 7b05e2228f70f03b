"""`duemq cluster forget`: the operator's word that a lost broker will not come back."""

import pytest

from duemq import errors
from duemq.administering import forgetting
from duemq.aio import Admin
from duemq.v1 import nameserver_pb2 as pb
from duemq.v1.stubs import NameserverStub
from duemq_cli.exits import Exit
from tests.service.cli.commands import rows, run
from tests.service.cut_link import link_to
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster

TOPIC, GROUP = "orders", "billing"
RESET = ("group", "reset", GROUP, "--topic", TOPIC, "--to", "earliest")


@pytest.fixture
async def cluster(tmp_path):
    """b1 is gone; only it had the topic `audit`."""
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC)
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("audit", queues=2, brokers=["b1"])
            await admin.put_group(GROUP)
        await cluster.stop_broker("b1")
        yield cluster


async def test_without_the_broker_that_is_given_up_answers_are_whole(cluster: Cluster) -> None:
    assert (await run(cluster.nameserver, "topic", "list")).exit_code == Exit.PARTIAL
    assert (await run(cluster.nameserver, *RESET)).exit_code == Exit.UNAVAILABLE

    planned = await run(cluster.nameserver, "cluster", "forget", "b1", "--dry-run")
    assert planned.exit_code == Exit.OK, planned.stderr
    assert "stopped at 20" in planned.stderr
    assert "out of reach: 4 queues of orders; others have theirs" in planned.stderr
    assert "out of reach: 2 queues of audit; nobody else serves the topic" in planned.stderr
    assert (await run(cluster.nameserver, "topic", "list")).exit_code == Exit.PARTIAL

    done = await run(cluster.nameserver, "cluster", "forget", "b1", "--yes", "--json")
    assert done.exit_code == Exit.OK
    [row] = rows(done)
    assert (row["name"], row["dry_run"], row["missing_nameservers"]) == ("b1", False, [])
    assert {"topic": "audit", "queues": 2, "elsewhere": False} in row["topics"]
    for command in (("topic", "list"), RESET, ("cluster", "forget", "b1", "--yes")):
        whole = await run(cluster.nameserver, *command)
        assert whole.exit_code == Exit.OK, whole.stderr
    assert "b1" not in (await run(cluster.nameserver, "cluster", "show")).stdout


async def test_a_client_that_was_there_before_hears_of_it(cluster: Cluster) -> None:
    async with Admin(cluster.nameserver) as earlier:
        with pytest.raises(errors.PartialAnswer):
            await earlier.topics()
        found = await earlier.forget("b1")
        assert (found.name, found.timer, found.missing) == ("b1", False, ())
        assert [each.name for each in await earlier.topics()] == [TOPIC]


async def test_one_that_lives_or_that_nobody_remembers_is_refused(cluster: Cluster) -> None:
    lives = await run(cluster.nameserver, "cluster", "forget", "b0", "--yes")
    assert lives.exit_code == Exit.USAGE
    assert "broker b0 lives" in lives.stderr
    for name in (("b9",), ("b1", "--timer")):
        unknown = await run(cluster.nameserver, "cluster", "forget", *name, "--yes", "--json")
        assert unknown.exit_code == Exit.NOT_FOUND
        assert rows(unknown)[-1]["error"]["code"] == "INSTANCE_NOT_FOUND"
    assert (await run(cluster.nameserver, "topic", "list")).exit_code == Exit.PARTIAL


async def test_a_lost_timer_service_is_given_up_alike(cluster: Cluster) -> None:
    async with Admin(cluster.nameserver) as admin:
        stub = NameserverStub(admin._client.channel(cluster.nameserver))
        version, report = pb.Version(epoch=1), pb.TimerReport(name="t0", address="t:1", shards=1)
        await stub.Register(pb.RegisterRequest(version=version, timer=report))
        await stub.Deregister(pb.DeregisterRequest(version=version, timer="t0"))
        forget = ("cluster", "forget", "t0", "--timer", "--yes")
        # It may know of timers that only t0 has, and tells everybody once it is back.
        partial = await run(cluster.nameserver, *forget)
        assert partial.exit_code == Exit.PARTIAL, partial.stderr
        assert "no answer of b1" in partial.stderr
        assert "t0: is given up" in partial.stdout
        assert "call again when these brokers are there" in partial.stderr
        with pytest.raises(errors.PartialAnswer) as caught:
            await admin.forget("t0", timer=True)
        assert (caught.value.partial.name, caught.value.partial.missing) == ("t0", ())
        await admin.forget("b1")
        done = await run(cluster.nameserver, *forget)
        assert done.exit_code == Exit.OK, done.stderr
        assert "timer release" in done.stderr
        lost = (await stub.GetCluster(pb.GetClusterRequest())).lost_timers
        assert [(each.name, each.forgotten) for each in lost] == [("t0", True)]


async def test_a_nameserver_that_is_away_is_named_and_told_later(tmp_path) -> None:
    async with running_cluster(tmp_path) as cluster:
        first = cluster.nameserver
        await cluster.start_nameserver()
        second = cluster.nameserver
        for name in ("b0", "b1"):
            await cluster.start_broker(name, (first, second))
        await cluster.create_topic(TOPIC)
        await cluster.stop_broker("b1")
        forget = ("cluster", "forget", "b1", "--yes")
        async with link_to(second) as link:
            link.cut()
            partial = await run(f"{first},{link.address}", *forget)
            assert partial.exit_code == Exit.PARTIAL
            assert f"no answer of nameserver {link.address}" in partial.stderr
        assert (await run(first, "topic", "list")).exit_code == Exit.OK
        assert (await run(second, "topic", "list")).exit_code == Exit.PARTIAL
        # Who hears both takes the word of the one that was told.
        assert (await run(f"{first},{second}", "topic", "list")).exit_code == Exit.OK
        assert (await run(f"{first},{second}", *forget)).exit_code == Exit.OK
        assert (await run(second, "topic", "list")).exit_code == Exit.OK


async def test_while_one_nameserver_hears_it_no_other_gives_it_up(tmp_path, monkeypatch) -> None:
    # Else after a pause of 2 s a nameserver is taken for away, or its broker for lost.
    monkeypatch.setattr(forgetting, "TIMEOUT_S", WAIT_S)
    async with running_cluster(tmp_path, heartbeat_period=WAIT_S) as cluster:
        first = cluster.nameserver
        await cluster.start_nameserver()
        second = cluster.nameserver
        await cluster.start_broker("b0", (second,))
        async with Admin([first, second]) as admin:
            stub = NameserverStub(admin._client.channel(first))
            version, report = pb.Version(epoch=1), pb.BrokerReport(name="b0", address="h:1")
            await stub.Register(pb.RegisterRequest(version=version, broker=report))
            await stub.Deregister(pb.DeregisterRequest(version=version, broker="b0"))
            with pytest.raises(errors.InvalidArgument, match="b0 lives"):
                await admin.forget("b0")
            [lost] = (await stub.GetCluster(pb.GetClusterRequest())).lost_brokers
            assert not lost.forgotten


async def test_without_an_answer_nothing_is_given_up(tmp_path) -> None:
    async with (
        running_cluster(tmp_path) as cluster,
        link_to(cluster.nameserver) as link,
        Admin(link.address) as admin,
    ):
        link.cut()
        with pytest.raises(errors.Unavailable, match=link.address):
            await admin.forget("b1")
