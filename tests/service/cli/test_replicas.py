"""Replicas as a broker's leader reports them, all the way to the command line."""

from duemq.v1 import nameserver_pb2 as pb
from duemq_cli.exits import Exit
from duemq_cli.text import local_time
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import running_cluster, until

SINCE_MS = 1_700_000_000_000
LEADER = pb.ReplicaReport(name="a", role=pb.LEADER, in_sync=True, epoch=3, address="h:1")
LEARNER = pb.ReplicaReport(
    name="b",
    role=pb.LEARNER,
    epoch=3,
    lag_bytes=4096,
    lag_s=1.5,
    address="h:2",
    since_ms=SINCE_MS,
    reason="its disk is new",
)
AWAY = pb.ReplicaReport(name="c", role=pb.AWAY, in_sync=True, epoch=3)


async def shown(cluster, *options):
    return await run(cluster.nameserver, "cluster", "show", *options)


async def test_the_cluster_shows_replicas(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        broker = cluster.brokers["b1"]
        broker.replicas = lambda: [LEADER, LEARNER, AWAY]
        broker.registration.changed()
        await until(lambda: any(each.report.replicas for each in cluster.registry.brokers))
        found = rows(await shown(cluster, "--json"))
        leader, learner, away = [row for row in found if row["kind"] == "replica"]
        assert leader == {
            "kind": "replica",
            "group": "b1",
            "name": "a",
            "role": "leader",
            "in_sync": True,
            "epoch": 3,
            "lag_bytes": 0,
            "lag_s": 0.0,
            "address": "h:1",
            "since_ms": 0,
            "reason": "",
            "error": None,
        }
        assert (learner["role"], learner["in_sync"]) == ("learner", False)
        assert (learner["lag_bytes"], learner["lag_s"]) == (4096, 1.5)
        assert learner["error"] == "not in sync: its disk is new"
        assert (away["role"], away["in_sync"]) == ("away", True)
        assert away["error"] == "away: nothing is heard of it"
        assert [row["name"] for row in found if row["kind"] == "broker"] == ["b0", "b1"]
        people = (await shown(cluster)).stdout
        for told in ("b1/a", "learner", "4,096 B, 1.5 s", local_time(SINCE_MS), "its disk is new"):
            assert told in people

        await cluster.stop_broker("b1")  # nobody can tell of them now
        found = rows(await shown(cluster, "--json"))
        assert [row["kind"] for row in found if row.get("group")] == []
        told = (await shown(cluster)).stderr
        assert told == "b1: its replicas say what they wait for: duemq replica status b1\n"


async def test_who_is_in_sync_and_silent_is_not_well(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        silence = "nothing is heard of it for 4 s"
        silent = pb.ReplicaReport(name="b", role=pb.FOLLOWER, in_sync=True, reason=silence)
        broker = cluster.brokers["b0"]
        broker.replicas = lambda: [LEADER, silent]
        broker.registration.changed()
        await until(lambda: any(each.report.replicas for each in cluster.registry.brokers))
        answer = await shown(cluster, "--json")
        assert answer.exit_code == Exit.FAILED
        _, replica = [row for row in rows(answer) if row["kind"] == "replica"]
        assert replica["error"] == f"in sync, and {silence}"


async def test_without_replicas_nothing_is_said_of_them(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        assert "replica" not in (await shown(cluster)).stdout
        assert "replica" not in {row["kind"] for row in rows(await shown(cluster, "--json"))}
