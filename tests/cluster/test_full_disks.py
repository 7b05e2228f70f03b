"""The disk of one of two replicas has no space any more, under load; then it has again.

Each has a small file system of its own, so the tests need a root that may mount one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, until
from tests.cluster.replicated import GROUP, goes_on, in_sync, refusal, roles, shown, status, work

DISK_MIB = 64
RESERVE_MIB = 16
FLAGS = (
    *("--min-insync", "1", "--lease-duration", "2", "--lag-max", "1"),
    *("--segment-bytes", "65536", "--checkpoint-interval", "0.5"),
)
FULL = "its disk is full"

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        for name in ("a", "b"):
            stack.enter_context(small_disk(directory / GROUP / name))
        cluster = EmbeddedCluster(
            directory,
            brokers=1,
            replicas=2,
            flags={
                "broker": (*FLAGS, "--free-bytes-min", str(RESERVE_MIB << 20)),
                "timer": FLAGS[:6],
            },
        )
        yield stack.enter_context(cluster)


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of DISK_MIB, in memory."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def full(cluster: EmbeddedCluster, member: str, left_bytes: int = 0) -> Iterator[None]:
    """So much is left on its disk."""
    filler = cluster.data_dir(member) / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while free_bytes(filler) > left_bytes:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


def free_bytes(file: Path) -> int:
    """On its disk."""
    found = os.statvfs(file)
    return found.f_bavail * found.f_frsize


def test_a_follower_whose_disk_is_full_is_out_until_there_is_space(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    leader, follower = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with full(cluster, follower):
            until(lambda: status(cluster, follower).reason == FULL)
            until(lambda: in_sync(cluster, GROUP) == {leader})
            until(lambda: bool(shown(cluster, "replica", follower)["error"]))
            goes_on(history)
            assert cluster.leader(GROUP) == leader
        cluster.wait_ready(WAIT_S)
        assert in_sync(cluster, GROUP) == {leader, follower}
        goes_on(history)


def test_a_leader_whose_disk_is_full_lets_the_other_one_lead(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    leader, follower = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with full(cluster, leader):
            until(lambda: cluster.leader(GROUP) == follower)
            goes_on(history)
        cluster.wait_ready(WAIT_S)
        goes_on(history)


def test_a_leader_that_is_short_of_space_lets_the_other_one_lead(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """Writes would still find some; it keeps that, and would accept nothing more."""
    leader, follower = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with full(cluster, leader, RESERVE_MIB << 19):
            until(lambda: cluster.leader(GROUP) == follower)
            cluster.wait_ready(WAIT_S)
            goes_on(history)
            with full(cluster, follower, RESERVE_MIB << 19):
                until(lambda: "disk is full" in refusal(cluster))
                assert cluster.leader(GROUP) == follower  # no other one would accept more
            goes_on(history)
        goes_on(history)


def test_where_no_disk_has_space_nothing_is_accepted_until_one_has(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    leader, follower = roles(cluster, GROUP)
    with work(cluster, tmp_path) as history:
        with full(cluster, follower):
            until(lambda: in_sync(cluster, GROUP) == {leader})
            with full(cluster, leader):
                until(lambda: "disk is full" in refusal(cluster))
                assert cluster.leader(GROUP) == leader
            goes_on(history)
        cluster.wait_ready(WAIT_S)
        goes_on(history)
