"""Groups of replicas under the supervisor, with a real nameserver and stand-ins for brokers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from duemq.errors import InvalidArgument
from duemq_server.local_cluster import ClusterFailed, EmbeddedCluster
from tests.cluster.harness import until
from tests.service.embedded.supervised import WAIT_S, Events, order, stand_in


@pytest.fixture(autouse=True)
def _fake_members(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "fake_replica")


@pytest.fixture
def running(tmp_path: Path, events: Events) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(
        tmp_path, brokers=1, replicas=2, on_event=events, heartbeat_period_s=0.1
    ) as embedded:
        yield embedded


def disk_of(directory: Path, member: str) -> str:
    return (directory / member / "disk_id").read_text()


def test_replicas_are_processes_with_a_name_and_a_directory_each(
    running: EmbeddedCluster, events: Events, tmp_path: Path
) -> None:
    ready = events.wait("ready").details
    assert set(ready["processes"]) == {
        "nameserver-0",
        *("broker-0/a", "broker-0/b"),
        *("timer-0/a", "timer-0/b"),
    }
    assert ready["replicas"] == 2
    assert running.names("broker") == running.replicas("broker-0") == ["broker-0/a", "broker-0/b"]
    assert disk_of(tmp_path, "broker-0/a") != disk_of(tmp_path, "broker-0/b")
    assert (tmp_path / "leases" / "broker-0.leader").exists()
    assert (tmp_path / "logs" / "broker-0" / "a.log").exists()
    told = psutil.Process(running.processes["broker-0/b"]).cmdline()
    for flag, value in (
        ("--name", "broker-0"),
        ("--replica", "b"),
        ("--replicas", "a,b"),
        ("--lease-store", f"file:{tmp_path}/leases"),
        ("--data-dir", f"{tmp_path}/broker-0/b"),
    ):
        assert told[told.index(flag) + 1] == value


def test_it_is_ready_with_a_leader_and_everybody_in_sync(
    running: EmbeddedCluster, tmp_path: Path
) -> None:
    leader = running.leader("broker-0")
    [follower] = {"broker-0/a", "broker-0/b"} - {leader}
    lagging = order(tmp_path, follower, "lag")
    until(lambda: f"{follower} not in sync" in missing(running))
    lagging.unlink()
    running.wait_ready()
    assert running.leader("timer-0") in running.replicas("timer-0")


def test_a_replica_that_is_no_member_any_more_is_not_waited_for(
    running: EmbeddedCluster, tmp_path: Path
) -> None:
    leader = running.leader("broker-0")
    [follower] = {"broker-0/a", "broker-0/b"} - {leader}
    order(tmp_path, follower, "lag")
    until(lambda: f"{follower} not in sync" in missing(running))
    order(tmp_path, follower, "removed")
    running.wait_ready()


def missing(running: EmbeddedCluster) -> str:
    """What it waits for, if anything."""
    try:
        running.wait_ready(0.05)
    except ClusterFailed as error:
        return str(error)
    return ""


def test_another_one_leads_when_the_leader_is_killed(running: EmbeddedCluster) -> None:
    leader = running.leader("broker-0")
    running.kill(leader, restart=False)
    running.wait_ready()
    assert running.leader("broker-0") not in ("", leader)
    running.start_member(leader)
    running.wait_ready()
    assert running.leader("broker-0") != leader


def test_a_removed_directory_comes_back_as_a_new_disk(
    running: EmbeddedCluster, tmp_path: Path
) -> None:
    before = {name: disk_of(tmp_path, name) for name in running.replicas("broker-0")}
    running.kill("broker-0/a", restart=False)
    shutil.rmtree(tmp_path / "broker-0" / "a")
    running.start_member("broker-0/a")
    running.wait_ready()
    assert disk_of(tmp_path, "broker-0/a") != before["broker-0/a"]
    assert disk_of(tmp_path, "broker-0/b") == before["broker-0/b"]


def test_a_process_that_replaces_its_image_is_no_death(
    running: EmbeddedCluster, events: Events, tmp_path: Path
) -> None:
    events.wait("ready")
    leader = running.leader("broker-0")
    address, pid = running.address(leader), running.processes[leader]
    order(tmp_path, leader, "exec")
    reopened = events.wait("reopened").details
    assert reopened == {"member": leader, "pid": pid, "address": address}
    running.wait_ready()
    assert running.processes[leader] == pid
    # Its new image still follows the supervisor, and hears it.
    assert running.stop_member(leader) == 0


def test_a_new_image_still_ends_with_its_supervisor(
    running: EmbeddedCluster, events: Events, tmp_path: Path
) -> None:
    process = psutil.Process(running.processes["broker-0/a"])
    order(tmp_path, "broker-0/a", "exec")
    events.wait("reopened")
    [stdin] = [
        member.process.stdin
        for member in running._members.values()
        if member.process is not None and member.process.pid == process.pid
    ]
    assert stdin is not None
    stdin.close()  # as a dead parent's
    _, alive = psutil.wait_procs([process], timeout=WAIT_S)
    assert alive == []


def test_a_restart_keeps_the_replicas(tmp_path: Path, events: Events) -> None:
    with EmbeddedCluster(tmp_path, brokers=1, replicas=2) as embedded:
        before = {name: embedded.address(name) for name in embedded.names("broker")}
    assert json.loads((tmp_path / "cluster.json").read_text())["version"] == 2
    with EmbeddedCluster(tmp_path) as embedded:
        assert {name: embedded.address(name) for name in embedded.names("broker")} == before


@pytest.mark.parametrize(("had", "asked"), [(2, 1), (2, 3)])
def test_another_number_of_replicas_than_the_data_have_is_refused(
    tmp_path: Path, had: int, asked: int
) -> None:
    with EmbeddedCluster(tmp_path, brokers=1, replicas=had):
        pass
    with pytest.raises(InvalidArgument, match="of 2 replicas each") as caught:
        EmbeddedCluster(tmp_path, replicas=asked).start()
    assert (caught.value.field, caught.value.limit) == ("replicas", "2")
