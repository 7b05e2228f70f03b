"""Replicas whose record lies in a real etcd."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from duemq_server.serving.clock import steady_ms
from tests.cluster.test_etcd_store import Node, cluster_of
from tests.service.replica_group import Group
from tests.service.running_cluster import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory):
    yield from cluster_of(3, tmp_path_factory.mktemp("etcd"))


async def test_a_group_goes_on_when_etcds_leader_and_then_its_own_die(
    three: list[Node], tmp_path: Path
) -> None:
    addresses = ",".join(each.address for each in three)
    group = Group(tmp_path, 3, lease_store=f"etcd:{addresses}", lease_duration=2.0)
    group.start()
    try:
        leader = await group.in_sync(3)
        await group.write(b"one")
        three[0].process.send_signal(signal.SIGKILL)  # whoever leads etcd: two of three go on
        await group.write(b"two")
        leader = await group.leader()
        await leader.kill()
        await group.write(b"three")
        leader.start()
        await until(lambda: leader.lines == [b"one", b"two", b"three"])
    finally:
        await group.stop()


async def test_a_store_that_is_away_stops_nothing_while_the_group_is_whole(
    three: list[Node], tmp_path: Path
) -> None:
    addresses = ",".join(each.address for each in three[1:])
    group = Group(tmp_path, 2, lease_store=f"etcd:{addresses}", lease_duration=1.0, name="whole")
    group.start()
    try:
        leader = await group.in_sync(2)
        for node in three[1:]:
            node.process.send_signal(signal.SIGSTOP)
        renewed = leader.replica.leading.leader._renewed_ms
        await group.write(b"one")
        # Its lease has run out by its own clock, and it serves on.
        await until(lambda: _lapsed(leader, renewed) and leader.term is not None)
        await group.write(b"two")
        for node in three[1:]:
            node.process.send_signal(signal.SIGCONT)
        (other,) = [each for each in group.members.values() if each is not leader]
        await until(lambda: other.lines == [b"one", b"two"])
    finally:
        for node in three[1:]:
            node.process.send_signal(signal.SIGCONT)
        await group.stop()


def _lapsed(leader, renewed_ms: int) -> bool:
    leading = leader.replica.leading.leader
    return steady_ms() - (leading._renewed_ms or renewed_ms) > leading._times.serve_ms
