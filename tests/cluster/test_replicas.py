"""Groups of two replicas as real processes: killed, stopped, with and without their disks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from duemq import Admin, CancelOutcome, Producer, Receipt
from duemq.settings import ProducerSettings
from duemq_cli.exits import Exit
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, leader_of, rows, topic_name, until
from tests.cluster.replicated import in_sync, roles, status

GROUP, SHARD = "broker-0", "timer-0"
FLAGS = dict.fromkeys(("broker", "timer"), ("--min-insync", "1"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"), brokers=1, replicas=2, flags=FLAGS
    ) as embedded:
        yield embedded


def wait_for_successor(cluster: EmbeddedCluster, leader: str) -> None:
    group = leader.partition("/")[0]
    until(lambda: cluster.leader(group) not in ("", leader))


def lose_disk_of(cluster: EmbeddedCluster, leader: str) -> None:
    """It dies with its disk, and comes back as another."""
    disk = (cluster.data_dir(leader) / "disk_id").read_bytes()
    cluster.kill(leader, restart=False)
    shutil.rmtree(cluster.data_dir(leader))
    wait_for_successor(cluster, leader)
    cluster.start_member(leader)
    cluster.wait_ready(WAIT_S)
    assert (cluster.data_dir(leader) / "disk_id").read_bytes() != disk


def send(cluster: EmbeddedCluster, topic: str, *bodies: bytes) -> None:
    settings = ProducerSettings(send_timeout_s=WAIT_S)
    with Producer(cluster.nameserver, settings=settings) as producer:
        producer.send_many(topic, bodies)


def stored(cluster: EmbeddedCluster, topic: str) -> list[bytes]:
    return sorted(message.body for message in read_topic(cluster.nameserver, topic))


@pytest.mark.parametrize("restart", [True, False])
def test_a_killed_leader_loses_nothing(cluster: EmbeddedCluster, restart: bool) -> None:
    topic, leader = topic_name(), leader_of(cluster, GROUP)
    send(cluster, topic, b"a", b"b")
    cluster.kill(leader, restart=restart)
    send(cluster, topic, b"c")
    if not restart:
        wait_for_successor(cluster, leader)
        cluster.start_member(leader)
    cluster.wait_ready(WAIT_S)
    assert stored(cluster, topic) == [b"a", b"b", b"c"]


@pytest.mark.long
def test_a_leader_that_is_stopped_is_replaced_and_follows_when_it_goes_on(
    cluster: EmbeddedCluster,
) -> None:
    topic, leader = topic_name(), leader_of(cluster, GROUP)
    send(cluster, topic, b"a")
    pid = cluster.processes[leader]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for_successor(cluster, leader)
        send(cluster, topic, b"b")
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.wait_ready(WAIT_S)
    assert leader_of(cluster, GROUP) != leader
    assert cluster.processes[leader] == pid
    assert stored(cluster, topic) == [b"a", b"b"]


def test_all_survives_the_loss_of_one_disk_and_then_of_the_other(cluster: EmbeddedCluster) -> None:
    topic, bodies = topic_name(), [b"%d" % number for number in range(100)]
    send(cluster, topic, *bodies)
    for _ in range(2):
        lose_disk_of(cluster, leader_of(cluster, GROUP))
    assert stored(cluster, topic) == sorted(bodies)


@pytest.mark.long
def test_delayed_messages_survive_the_loss_of_both_disks_and_come_once(
    cluster: EmbeddedCluster,
) -> None:
    topic, bodies = topic_name(), [b"%d" % number for number in range(100)]
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        before = admin.timer_stats()[0].accepted
        due_ms = time.time_ns() // 1_000_000 + 10_000
        producer.send_many(topic, bodies, deliver_at=due_ms)
        until(lambda: admin.timer_stats()[0].accepted >= before + len(bodies))
    for _ in range(2):
        lose_disk_of(cluster, leader_of(cluster, SHARD))
    until(lambda: len(stored(cluster, topic)) >= len(bodies))
    assert stored(cluster, topic) == sorted(bodies)
    found = list(read_topic(cluster.nameserver, topic))
    assert all(message.store_ms >= due_ms for message in found)


def test_an_operator_moves_the_leader_and_sees_it(cluster: EmbeddedCluster) -> None:
    cluster.wait_ready(WAIT_S)
    before, follower = roles(cluster, GROUP)
    [moved] = rows(duemq(cluster.nameserver, "broker", "lead", follower, "--json"))
    assert (moved["group"], moved["name"]) == tuple(follower.split("/"))
    cluster.wait_ready(WAIT_S)
    assert leader_of(cluster, GROUP) == follower
    told = rows(duemq(cluster.nameserver, "replica", "history", GROUP, "--json"))
    assert follower.split("/")[1] in {row["name"] for row in told if row["role"] == "leader"}
    shown = [
        row
        for row in rows(duemq(cluster.nameserver, "cluster", "show", "--json"))
        if row["kind"] == "replica" and row["group"] == GROUP
    ]
    assert {(row["name"], row["role"], row["in_sync"]) for row in shown} == {
        (follower.split("/")[1], "leader", True),
        (before.split("/")[1], "follower", True),
    }
    with Admin(cluster.nameserver) as admin:
        [broker] = admin.cluster().brokers
        assert [each.name for each in broker.replicas] == ["a", "b"]


@pytest.mark.parametrize("comes_back", [False, True], ids=["lost", "comes back"])
def test_an_operator_accepts_a_loss(cluster: EmbeddedCluster, comes_back: bool) -> None:
    """Of whom has more, which is gone, or is there again when another one leads."""
    topic, (leader, follower) = topic_name(), roles(cluster, GROUP)
    send(cluster, topic, b"kept")
    cluster.kill(follower, restart=False)
    for _ in range(2):
        send(cluster, topic, b"lost")
    cluster.kill(leader, restart=False)
    if not comes_back:
        shutil.rmtree(cluster.data_dir(leader))
    cluster.start_member(follower)
    elect = ("replica", "elect", follower)
    until(lambda: "is lost" in duemq_says(cluster, *elect))
    assert cluster.leader(GROUP) == ""
    assert duemq(cluster.nameserver, *elect).returncode == Exit.FAILED
    assert duemq(cluster.nameserver, *elect, "--accept-loss").returncode == Exit.OK
    send(cluster, topic, b"new")
    cluster.start_member(leader)
    cluster.wait_ready(WAIT_S)
    assert stored(cluster, topic) == [b"kept", b"new"]


def test_an_operator_accepts_a_loss_where_the_record_is_gone(cluster: EmbeddedCluster) -> None:
    topic, (leader, follower) = topic_name(), roles(cluster, GROUP)
    send(cluster, topic, b"kept")
    cluster.kill(follower, restart=False)
    send(cluster, topic, b"lost")
    cluster.kill(leader, restart=False)
    (cluster.data_dir("leases") / f"{GROUP}.record").unlink()
    cluster.start_member(follower)
    adopt = ("replica", "adopt", follower, "--yes")
    until(lambda: "does not answer" in duemq_says(cluster, *adopt))
    assert duemq(cluster.nameserver, *adopt).returncode == Exit.FAILED
    assert duemq(cluster.nameserver, *adopt, "--accept-loss").returncode == Exit.OK
    send(cluster, topic, b"new")
    cluster.start_member(leader)
    cluster.wait_ready(WAIT_S)
    assert stored(cluster, topic) == [b"kept", b"new"]


@pytest.mark.long
@pytest.mark.parametrize("comes_back", [False, True], ids=["lost", "comes back"])
def test_an_operator_accepts_a_loss_of_timers(cluster: EmbeddedCluster, comes_back: bool) -> None:
    topic, (leader, follower) = topic_name(), roles(cluster, SHARD)
    with Producer(cluster.nameserver) as producer:

        def send(name: str, delay: str | float) -> Receipt:
            return producer.send(topic, name.encode(), delay=delay, timer_key=name)

        send("fired", 0.1)
        until(lambda: stored(cluster, topic) == [b"fired"])
        kept = [send(f"kept {number}", "1h") for number in range(3)]
        cluster.wait_ready(WAIT_S)
        cluster.kill(follower, restart=False)
        lost = [send(f"lost {number}", "1h") for number in range(2)]
        cluster.kill(leader, restart=False)
        if not comes_back:
            shutil.rmtree(cluster.data_dir(leader))
        cluster.start_member(follower)
        elect = ("replica", "elect", follower)
        until(lambda: "is lost" in duemq_says(cluster, *elect))
        assert cluster.leader(SHARD) == ""
        [elected] = rows(duemq(cluster.nameserver, *elect, "--accept-loss", "--json"))
        assert elected["done"] is True
        cluster.start_member(leader)
        release_timers(cluster)
        cluster.wait_ready(WAIT_S)
        assert leader_of(cluster, SHARD) == follower
        gone = [producer.cancel(lost[0].handle), producer.cancel(key=(topic, "lost 1"))]
        assert gone == [CancelOutcome.UNKNOWN] * 2
        held = [producer.cancel(kept[0].handle), producer.cancel(key=(topic, "kept 1"))]
        assert held == [CancelOutcome.CANCELLED] * 2
        producer.reschedule(kept[2].handle, delay=0)
        send("new", 0)
    bodies = {b"fired", b"kept 2", b"new"}
    until(lambda: set(stored(cluster, topic)) >= bodies)
    found = Counter(stored(cluster, topic))
    del found[b"fired"]  # just before: it may come twice
    assert found == {b"kept 2": 1, b"new": 1}


def release_timers(cluster: EmbeddedCluster) -> None:
    """To brokers, who was elected is another timer service."""
    for name in cluster.replicas(GROUP):  # then they have not seen the old one within a minute
        cluster.kill(name)
    release = ("timer", "release", "0", "--accept-loss")
    until(lambda: duemq(cluster.nameserver, *release).returncode == Exit.OK)


def test_an_operator_moves_the_leader_of_timers(cluster: EmbeddedCluster) -> None:
    cluster.wait_ready(WAIT_S)
    topic, (_, follower) = topic_name(), roles(cluster, SHARD)
    with Producer(cluster.nameserver) as producer:
        for number in range(2):
            producer.send(topic, b"x", delay="1h", timer_key=f"{number}")
        [moved] = rows(duemq(cluster.nameserver, "replica", "lead", follower, "--json"))
        assert (moved["group"], moved["name"]) == tuple(follower.split("/"))
        until(lambda: cluster.leader(SHARD) == follower)
        assert producer.cancel(key=(topic, "0")) == CancelOutcome.CANCELLED
        producer.reschedule(key=(topic, "1"), delay=0)
    until(lambda: stored(cluster, topic) == [b"x"])


@pytest.mark.parametrize("group", [GROUP, SHARD])
def test_an_operator_removes_a_replica_and_adds_it_again(
    cluster: EmbeddedCluster, group: str
) -> None:
    cluster.wait_ready(WAIT_S)
    leader, follower = roles(cluster, group)
    remove = ("replica", "remove", follower)
    would = duemq(cluster.nameserver, *remove)
    assert (would.returncode, "from now on" in would.stderr) == (Exit.FAILED, True)
    refused = duemq(cluster.nameserver, "replica", "remove", leader, "--yes")
    assert (refused.returncode, "another one lead first" in refused.stderr) == (Exit.USAGE, True)
    assert in_sync(cluster, group) == {leader, follower}
    assert duemq(cluster.nameserver, *remove, "--yes").returncode == Exit.OK
    assert in_sync(cluster, group) == {leader}
    until(lambda: "is no member" in status(cluster, follower).reason)
    if group == GROUP:
        send(cluster, topic_name(), b"without it")
    add = ("replica", "add", *follower.split("/"))
    assert duemq(cluster.nameserver, *add).returncode == Exit.FAILED
    assert in_sync(cluster, group) == {leader}
    assert duemq(cluster.nameserver, *add, "--yes").returncode == Exit.OK
    until(lambda: in_sync(cluster, group) == {leader, follower})
    cluster.wait_ready(WAIT_S)


@pytest.mark.long
@pytest.mark.parametrize("group", [GROUP, SHARD])
def test_an_operator_adopts_a_log_when_the_record_is_gone(
    cluster: EmbeddedCluster, group: str
) -> None:
    cluster.wait_ready(WAIT_S)
    topic, (leader, follower) = topic_name(), roles(cluster, group)
    with Producer(cluster.nameserver) as producer:
        cluster.kill(follower, restart=False)
        if group == GROUP:
            producer.send(topic, b"kept")
        else:
            producer.send(topic, b"kept", delay="1h", timer_key="kept")
        cluster.stop_member(leader)
        (cluster.data_dir("leases") / f"{group}.record").unlink()
        for name in (leader, follower):
            cluster.start_member(name)
        until(lambda: "history from now on" in duemq_says(cluster, "replica", "adopt", leader))
        until(lambda: "history from now on" in duemq_says(cluster, "replica", "adopt", follower))
        assert cluster.leader(group) == ""
        shorter = duemq(cluster.nameserver, "replica", "adopt", follower, "--yes")
        assert shorter.returncode == Exit.FAILED
        assert f"what only {leader} has is lost" in shorter.stderr
        assert cluster.leader(group) == ""
        adopted = duemq(cluster.nameserver, "replica", "adopt", leader, "--yes")
        assert adopted.returncode == Exit.OK
        cluster.wait_ready(WAIT_S)
        if group == SHARD:
            assert producer.cancel(key=(topic, "kept")) == CancelOutcome.CANCELLED
        else:
            assert stored(cluster, topic) == [b"kept"]


def duemq_says(cluster: EmbeddedCluster, *arguments: str) -> str:
    return duemq(cluster.nameserver, *arguments).stderr


@pytest.mark.long
def test_the_command_starts_replicas(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--brokers", "1", "--replicas", "2", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None
        events = (json.loads(line) for line in up.stdout)
        ready = next(event for event in events if event["event"] == "ready")
        assert set(ready["processes"]) == {
            "nameserver-0",
            *("broker-0/a", "broker-0/b"),
            *("timer-0/a", "timer-0/b"),
        }
        os.kill(ready["processes"]["broker-0/a"], signal.SIGKILL)
        restarted = next(event for event in events if event["event"] == "restarted")
        assert restarted["member"] == "broker-0/a"
        up.terminate()
        assert up.wait(WAIT_S) == Exit.OK
    assert (tmp_path / "broker-0" / "a" / "disk_id").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_failover_is_measured() -> None:
    command = ("bench", "failover", "--times", "1", "--rate", "100", "--json")
    # Its own bounds say what it waited for; they come before this one.
    [report] = rows(duemq("127.0.0.1:1", *command, wait_s=280))
    figures = report["figures"]
    for found in (figures, *(figures[way] for way in ("sigterm", "sigkill", "sigstop"))):
        assert found["send_gap_ms_p50"] <= found["send_gap_ms_max"]
        assert found["delivery_gap_ms_max"] > 0
        assert (found["lost"], found["twice"], found["failed"]) == (0, 0, 0)
        assert found["sent"] > 0
    assert report["parameters"]["replicas"] == 2


@pytest.mark.long
def test_catching_up_is_measured() -> None:
    sizes = ("--log-bytes", "4000000", "--rate", "50", "--seconds", "1")
    [report] = rows(duemq("127.0.0.1:1", "bench", "catch-up", *sizes, "--json"))
    assert report["parameters"]["replicas"] == 3
    figures = report["figures"]
    assert (figures["lost"], figures["twice"]) == (0, 0)
    assert figures["sent"] > 50
    for phase in ("calm", "away", "catching_up"):
        assert 0 < figures[f"{phase}_p50_ms"] <= figures[f"{phase}_p99_ms"]
    assert figures["catch_up_mb_per_s"] * figures["caught_up_s"] > 3


@pytest.mark.long
def test_too_few_replicas_to_lose_one_are_refused() -> None:
    refused = duemq("127.0.0.1:1", "bench", "catch-up", "--replicas", "2")
    assert refused.returncode == Exit.USAGE
    assert "more than --min-insync, 2" in refused.stderr
