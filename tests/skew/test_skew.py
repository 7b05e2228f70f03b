"""A cluster is upgraded while it works, process after process, and goes back.

SKEW_FROM names the revision that it comes from (`make skew FROM=<revision>`); by default the last
release, which `last-release` names.  Clients of both releases send, cancel and consume all the
time.  Judged as test_kill9.py: nothing acknowledged is lost, stored twice or early, what was
cancelled never comes, and the groups' offsets end where the queues do.  What is held stays back and
comes afterwards, schedules keep their plan, and jobs touch what is pending, once (tending.py).  No
process may die.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skew.load import Load, at_work, ballast
from tests.skew.mixed_cluster import MixedCluster
from tests.skew.releases import HERE, NotHere, Release, check_out, default

FROM = os.environ.get("SKEW_FROM", "")
REPLICAS = int(os.environ.get("SKEW_REPLICAS", "2"))
GROUPS = ("broker-0", "broker-1", "timer-0")
LEASE_S = 1.5

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    try:
        return check_out(FROM or default(), tmp_path_factory.mktemp("old"))
    except NotHere as error:
        if FROM:
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def cluster(old: Release, tmp_path: Path) -> Iterator[MixedCluster]:
    """Two nameservers, two brokers and a timer shard, all of the old release."""
    # Logs are cut often, so that who was away may need a snapshot.
    flags = ("--lease-duration", str(LEASE_S), "--checkpoint-interval", "0.5")
    with MixedCluster(
        tmp_path / "cluster",
        old,
        nameservers=2,
        brokers=2,
        replicas=REPLICAS,
        flags={"broker": flags, "timer": (*flags, "--memtable-rows-max", "64")},
    ) as mixed:
        yield mixed
        assert mixed.deaths == []


def followers_first(cluster: MixedCluster) -> list[str]:
    """As operators are told: nameservers, then group after group, who leads last."""
    names = cluster.names("nameserver")
    return [*names, *(name for group in GROUPS for name in _by_role(cluster, group))]


def leaders_first(cluster: MixedCluster) -> list[str]:
    """The other way round; timer services, which use brokers, before them."""
    return followers_first(cluster)[::-1]


def _by_role(cluster: MixedCluster, group: str) -> list[str]:
    leader = cluster.leader(group)
    return sorted(cluster.replicas(group), key=lambda name: name == leader)


ORDERS = {"followers": followers_first, "leaders": leaders_first}
CASES = [("followers", False), ("leaders", True), *([("leaders", False)] if FROM else [])]
"""In which order, and whether by kill -9; one case more in `make skew`."""


@pytest.mark.parametrize(("order", "kill"), CASES)
def test_a_cluster_is_upgraded_and_goes_back_while_it_works(
    cluster: MixedCluster, old: Release, order: str, kill: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "clients"
    directory.mkdir()
    with at_work(cluster, directory, [old, HERE]) as load:
        for release in (HERE, old):
            for name in ORDERS[order](cluster):
                _move(cluster, load, name, release, kill=kill)


def _move(cluster: MixedCluster, load: Load, name: str, release: Release, **how: bool) -> None:
    began = time.monotonic()
    cluster.move(name, release, **how)
    cluster.wait_ready()
    load.goes_on()
    if name.startswith("timer"):
        load.tends()
    assert cluster.deaths == []
    print(f"{name} runs {release.name}, {time.monotonic() - began:.1f} s", flush=True)


def test_a_replica_loses_its_disk_between_two_releases(
    cluster: MixedCluster, old: Release, tmp_path: Path
) -> None:
    directory = tmp_path / "clients"
    directory.mkdir()
    ballast(cluster, "timer-0")
    with at_work(cluster, directory, [old, HERE]) as load:
        for leads, follows in ((old, HERE), (HERE, old)):
            for group in GROUPS:
                *followers, leader = _by_role(cluster, group)
                for name in cluster.replicas(group):
                    if cluster.release(name) is not leads:
                        _move(cluster, load, name, leads)
                *followers, leader = _by_role(cluster, group)
                for name in followers:
                    _move(cluster, load, name, follows, new_disk=True)
                assert cluster.leader(group) == leader
