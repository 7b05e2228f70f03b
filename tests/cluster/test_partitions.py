"""Links between real processes break, and the directory of records stays within reach.

A broker and a timer shard of three replicas each, two nameservers, producers and consumers.  Which
links break, and what then is said of it, is the test's; judged as test_kill9.py: nothing
acknowledged is lost, stored twice, early, out of order, or elsewhere than its receipt says.  And no
epoch has two leaders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from duemq import Producer
from duemq.v1 import nameserver_pb2, stubs
from duemq_cli.exits import Exit
from duemq_server.bench.harness.topic_reader import read_topic
from tests.cluster.harness import WAIT_S, duemq, topic_name, until
from tests.cluster.network import CLIENT, Network, ProxiedCluster, between
from tests.cluster.replicated import (
    GROUP,
    SHARD,
    goes_on,
    in_sync,
    refusal,
    roles,
    shown,
    status,
    work,
)

NAMESERVERS = ("nameserver-0", "nameserver-1")
FLAGS = ("--lease-duration", "2", "--lag-max", "1", "--checkpoint-interval", "0.5")
CUT_S = 1.5
SLOW_S = 0.1

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, network: Network) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(
        tmp_path_factory.mktemp("cluster"),
        network,
        nameservers=len(NAMESERVERS),
        brokers=1,
        replicas=3,
        flags=dict.fromkeys(("broker", "timer"), FLAGS),
    ) as embedded:
        yield embedded


def test_who_is_cut_off_from_its_leader_is_out_until_it_is_heard_again(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    pairs = [roles(cluster, group)[:2] for group in (GROUP, SHARD)]
    with work(cluster, tmp_path) as history:
        for heard, hears in ((False, False), (True, False), (False, True)):
            cut = [(far, leader) for leader, far in pairs if not heard]
            cut += [(leader, far) for leader, far in pairs if not hears]
            with network.silent(*cut):
                for leader, far in pairs:
                    group = leader.split("/")[0]
                    until(lambda far=far, group=group: far not in in_sync(cluster, group))
                    until(lambda far=far: status(cluster, far).role != "follower")
                    if not hears:
                        until(lambda far=far: "is silent" in status(cluster, far).reason)
                        until(lambda far=far: bool(shown(cluster, "replica", far).get("error")))
                goes_on(history)
            cluster.wait_ready(WAIT_S)
            goes_on(history)


def test_a_leader_that_no_follower_hears_accepts_nothing_and_says_so(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, *others = roles(cluster, GROUP)
    topic = topic_name()
    with Producer(cluster.nameserver) as producer:
        producer.send(topic, b"before")
    with work(cluster, tmp_path) as history:
        with network.silent(*between(leader, *others)):
            until(lambda: "nothing is committed" in status(cluster, leader).reason)
            until(lambda: "not enough replicas are in sync" in refusal(cluster))
            until(lambda: shown(cluster, "broker", GROUP).get("read_only") is True)
            acked = history.ids("acked")
            assert [each.body for each in read_topic(cluster.nameserver, topic)] == [b"before"]
            assert refusal(cluster)
            assert cluster.leader(GROUP) == leader
            assert history.ids("acked") == acked
        goes_on(history)
        with network.silent(*between(leader, *others)):
            until(lambda: "nothing is committed" in status(cluster, leader).reason)
            cluster.stop_member(leader)  # it renews its lease: nobody else leads before
            until(lambda: cluster.leader(GROUP) in others)
            goes_on(history)
            cluster.start_member(leader)
        cluster.wait_ready(WAIT_S)


def test_a_leader_that_one_nameserver_does_not_hear_leads_on(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, *others = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with network.silent(*between(leader, NAMESERVERS[0])):
            until(lambda: not knows(cluster, NAMESERVERS[0]))
            goes_on(history)
            until(lambda: in_sync(cluster, GROUP) == {leader, *others})
        goes_on(history)
        assert cluster.leader(GROUP) == leader


def test_a_leader_that_no_nameserver_hears_is_lost_until_another_one_is_told_to_lead(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, *others = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with network.silent(*between(leader, *NAMESERVERS)):
            until(lambda: shown(cluster, "broker", GROUP)["lost_ms"] is not None)
            assert status(cluster, leader).role == "leader"
            until(lambda: in_sync(cluster, GROUP) == {leader, *others})
            lead = ("replica", "lead", others[0])
            until(lambda: duemq(cluster.nameserver, *lead).returncode == Exit.OK)
            until(lambda: cluster.leader(GROUP) == others[0])
            goes_on(history)
        cluster.wait_ready(WAIT_S)


def knows(cluster: ProxiedCluster, nameserver: str) -> bool:
    """Whether it lists the group."""
    with grpc.insecure_channel(cluster.address(nameserver)) as connection:
        stub = stubs.NameserverStub(connection)
        found = stub.GetCluster(nameserver_pb2.GetClusterRequest(), timeout=WAIT_S)
    return any(broker.name == GROUP for broker in found.brokers)


def test_what_a_client_and_the_leader_do_not_hear_of_each_other_is_sent_once(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, *others = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        for cut in (between(CLIENT, leader), [(CLIENT, leader)], [(leader, CLIENT)]):
            with network.silent(*cut):
                time.sleep(CUT_S)
                acked = history.ids("acked")
                until(lambda: in_sync(cluster, GROUP) == {leader, *others})
                assert history.ids("acked") == acked
            goes_on(history)
        assert cluster.leader(GROUP) == leader


def test_a_leader_that_dies_cut_off_is_followed_by_who_has_all(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, far, near = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with network.silent(*between(leader, far)):
            until(lambda: far not in in_sync(cluster, GROUP))
            goes_on(history)
            cluster.kill(leader, restart=False)
            until(lambda: cluster.leader(GROUP) == near)
            goes_on(history)
            cluster.start_member(leader)
        cluster.wait_ready(WAIT_S)


def test_a_slow_link_makes_sends_slow_and_nothing_else(
    cluster: ProxiedCluster, network: Network, tmp_path: Path
) -> None:
    leader, *others = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with network.delayed(SLOW_S, *((other, leader) for other in others)):
            for _ in range(3):
                goes_on(history)
            until(lambda: in_sync(cluster, GROUP) == {leader, *others})
        assert cluster.leader(GROUP) == leader
