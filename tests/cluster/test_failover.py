"""Replicas of a broker and of a timer shard die in every way, under load.

FAILOVER_STEPS (by default 5) things happen to the one group or the other, by CRASH_SEED: leaders
are killed, stopped cleanly, stopped beyond their lease, lose their disks, and are killed again
while they catch up.  Producers send, at once and delayed; two consumers receive.  Judged as
test_kill9.py: nothing acknowledged is lost, stored twice, early, or out of order.

HAND_OVERS (by default 4) more deaths are aimed at hand-overs that an operator asks for.

`make prove-replicas` takes more of both.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.replication.running.v1 import replication_pb2, stubs
from tests.cluster.harness import WAIT_S, leader_of
from tests.cluster.judging import judged

STEPS = int(os.environ.get("FAILOVER_STEPS", "5"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
HAND_OVERS = int(os.environ.get("HAND_OVERS", "4"))
HAND_OVER_S_MAX = 0.2
"""It takes about a tenth of a second."""
LEASE_S = 1.0
GROUPS = ("broker-0", "timer-0")
WAYS = ("kill", "terminate", "pause", "disk", "all")
STEP_S_MAX = 2.0

pytestmark = pytest.mark.timeout(240 + (STEPS + HAND_OVERS) * WAIT_S)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    flags = ("--lease-duration", str(LEASE_S), "--min-insync", "2", "--checkpoint-interval", "0.5")
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"),
        brokers=1,
        replicas=request.param,
        flags=dict.fromkeys(("broker", "timer"), flags),
    ) as embedded:
        yield embedded


@pytest.mark.long
def test_however_leaders_die_nothing_is_lost_or_repeated(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    randomness = random.Random(f"{SEED}-failover")
    # Each way once before any comes again.
    deck = [(way, group) for way in WAYS for group in GROUPS]
    steps = [deck[at] for at in randomness.sample(range(len(deck)), len(deck))]
    print(f"CRASH_SEED={SEED}")
    with judged(cluster, tmp_path, randomness):
        for number in range(STEPS):
            time.sleep(randomness.uniform(0.2, STEP_S_MAX))
            way, group = steps[number % len(steps)]
            print(way, group, flush=True)
            _do(cluster, way, group, randomness)


@pytest.mark.long
def test_who_is_killed_in_a_hand_over_takes_nothing_along(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    randomness = random.Random(f"{SEED}-hand-over")
    print(f"CRASH_SEED={SEED}")
    with judged(cluster, tmp_path, randomness):
        for number in range(HAND_OVERS):
            time.sleep(randomness.uniform(0.2, 1.0))
            _kill_in_a_hand_over(cluster, GROUPS[number % len(GROUPS)], randomness)
            cluster.wait_ready(WAIT_S)


def _kill_in_a_hand_over(cluster: EmbeddedCluster, group: str, randomness: random.Random) -> None:
    """The leader, its successor or both, at any moment of it."""
    leader = leader_of(cluster, group)
    successor = randomness.choice([each for each in cluster.replicas(group) if each != leader])
    victims = randomness.choice([[leader], [successor], [leader, successor]])
    request = replication_pb2.HandOverRequest(to=successor.partition("/")[2])
    with grpc.insecure_channel(cluster.address(leader)) as connection:
        stub = stubs.ReplicationStub(connection)
        asked = stub.HandOver.future(request, timeout=WAIT_S)
        time.sleep(randomness.uniform(0.0, HAND_OVER_S_MAX))
        met = not asked.done()
        for each in victims:
            cluster.kill(each)
        with suppress(grpc.RpcError):
            asked.result()
    print(f"{group}: {leader} to {successor}, killed {victims}, in it: {met}", flush=True)


def _do(cluster: EmbeddedCluster, way: str, group: str, randomness: random.Random) -> None:
    members = cluster.replicas(group)
    victim = cluster.leader(group) or randomness.choice(members)
    if way == "kill":
        cluster.kill(victim)
    elif way == "all":
        for member in members:
            cluster.kill(member)
    elif way == "terminate":
        victim = leader_of(cluster, group)
        assert cluster.stop_member(victim) == 0
        cluster.start_member(victim)
    elif way == "pause":
        _pause(cluster, victim, randomness.uniform(1.5, 2.5) * LEASE_S)
    else:
        _lose_disk(cluster, randomness.choice(members), randomness)


def _pause(cluster: EmbeddedCluster, member: str, pause_s: float) -> None:
    """Longer than its lease."""
    pid = cluster.processes.get(member)
    if pid is None:
        return  # the step before has killed it
    os.kill(pid, signal.SIGSTOP)
    time.sleep(pause_s)
    os.kill(pid, signal.SIGCONT)


def _lose_disk(cluster: EmbeddedCluster, member: str, randomness: random.Random) -> None:
    """Where another one has all; perhaps it is killed once more while it catches up."""
    cluster.wait_ready(WAIT_S)
    cluster.kill(member, restart=False)
    shutil.rmtree(cluster.data_dir(member))
    cluster.start_member(member)
    if randomness.random() < 0.5:
        time.sleep(randomness.uniform(0.0, 1.0))
        cluster.kill(member)
    cluster.wait_ready(WAIT_S)
