"""The supervisor, with a real nameserver and stand-ins for the other members."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from duemq.errors import InvalidArgument
from duemq_server.local_cluster import (
    CalledOff,
    ClusterFailed,
    EmbeddedCluster,
    restarts,
    supervisor,
)
from duemq_server.local_cluster.layout import Layout, bind_port
from duemq_server.local_cluster.restarts import RestartPolicy
from tests.service.embedded.supervised import WAIT_S, Events, order, stand_in


@pytest.fixture(autouse=True)
def _fake_members(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "fake_member")


@pytest.fixture
def running(tmp_path: Path, events: Events) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path, on_event=events, heartbeat_period_s=0.1) as embedded:
        yield embedded


def life(directory: Path, member: str) -> list[str]:
    return (directory / f"{member}.life").read_text().split("\n")[:-1]


def test_ready_names_the_nameserver_and_every_process(
    running: EmbeddedCluster, events: Events
) -> None:
    details = events.wait("ready").details
    assert details["nameserver"] == running.nameserver
    assert set(details["processes"]) == {"nameserver-0", "broker-0", "broker-1", "timer-0"}
    assert all(psutil.pid_exists(pid) for pid in details["processes"].values())


def test_a_dead_member_is_started_again_at_its_address(
    running: EmbeddedCluster, events: Events
) -> None:
    address, pid = running.address("broker-1"), running.processes["broker-1"]
    running.kill("broker-1")
    assert events.wait("died").details["reason"] == "signal SIGKILL"
    assert events.wait("restarted").details["member"] == "broker-1"
    running.wait_ready()
    assert running.processes["broker-1"] != pid
    assert running.address("broker-1") == address


@pytest.mark.skipif(sys.platform != "linux", reason="no signals of real time")
def test_so_is_one_that_a_signal_without_a_name_has_ended(
    running: EmbeddedCluster, events: Events
) -> None:
    os.kill(running.processes["broker-1"], signal.SIGRTMIN + 1)
    assert events.wait("died").details["reason"] == f"signal {signal.SIGRTMIN + 1}"
    assert events.wait("restarted").details["member"] == "broker-1"


def test_a_member_killed_for_good_stays_down_until_started(running: EmbeddedCluster) -> None:
    running.kill("timer-0", restart=False)
    assert "timer-0" not in running.processes
    running.wait_ready()
    running.start_member("timer-0")
    running.wait_ready()
    assert "timer-0" in running.processes


def test_stopping_drains_members_in_order_and_leaves_no_process(
    tmp_path: Path, events: Events
) -> None:
    embedded = EmbeddedCluster(tmp_path, on_event=events)
    embedded.start()
    pids = list(embedded.processes.values())
    embedded.stop()
    embedded.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert life(tmp_path, "timer-0")[-1] == "stop"
    ended = [(tmp_path / f"{name}.life").stat().st_mtime_ns for name in ("timer-0", "broker-0")]
    assert ended == sorted(ended)


def test_a_restart_keeps_brokers_and_the_ports_that_are_free(
    tmp_path: Path, events: Events
) -> None:
    with EmbeddedCluster(tmp_path, brokers=3) as embedded:
        before = {name: embedded.address(name) for name in embedded.processes}
    (tmp_path / "metrics.json").write_text("[]")  # of a start with metrics
    # Bound and not listening: theirs, and safe from everybody else.
    kept = [bind_port(port_of(address)) for name, address in before.items() if name != "broker-1"]
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", port_of(before["broker-1"])))
        taken.listen()
        for held in kept:
            stack.enter_context(held)
        embedded = stack.enter_context(EmbeddedCluster(tmp_path, on_event=events))
        after = {name: embedded.address(name) for name in embedded.processes}
    assert not (tmp_path / "metrics.json").exists()
    assert events.wait("moved").details == {
        "member": "broker-1",
        "from_port": port_of(before["broker-1"]),
    }
    events.wait("ready")
    assert events.seen.count("moved") == 1
    assert after.pop("broker-1") != before.pop("broker-1")
    assert after == before


def test_the_port_of_a_member_that_is_away_is_held(running: EmbeddedCluster) -> None:
    running.stop_member("broker-0")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port_of(running.address("broker-0"))))
    running.start_member("broker-0")
    running.wait_ready()


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def test_fewer_brokers_than_the_data_have_are_refused(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path, brokers=2):
        pass
    with pytest.raises(InvalidArgument, match="data of 2 brokers") as caught:
        EmbeddedCluster(tmp_path, brokers=1).start()
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("brokers", "1", "2")


def test_one_cluster_a_folder(running: EmbeddedCluster, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="another cluster runs"):
        EmbeddedCluster(tmp_path).start()


def test_a_foreign_cluster_file_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"version": 99}')
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"cluster\.json .* version 99"):
            EmbeddedCluster(tmp_path).start()


def test_a_taken_port_is_refused(running: EmbeddedCluster, tmp_path: Path) -> None:
    port = int(running.address("nameserver-0").rsplit(":", 1)[1])
    with pytest.raises(InvalidArgument, match="is taken"):
        EmbeddedCluster(tmp_path / "other", port=port).start()


def test_a_member_that_keeps_dying_is_given_up(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RAPID_DEATHS_MAX", 2)
    monkeypatch.setattr(restarts, "PAUSE_FIRST_MS", 1)
    order(tmp_path, "broker-0", "die")
    with pytest.raises(ClusterFailed, match="broker-0 keeps dying") as caught:
        EmbeddedCluster(tmp_path, on_event=events).start()
    assert "broker-0.log" in str(caught.value)
    assert events.wait("failed").details["member"] == "broker-0"


def test_who_is_killed_on_request_is_not_given_up_however_often(
    running: EmbeddedCluster, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RAPID_DEATHS_MAX", 1)
    monkeypatch.setattr(restarts, "STABLE_MS", 3_600_000)
    for _ in range(3):
        running.kill("broker-0")
        assert events.wait("restarted").details["member"] == "broker-0"
    os.kill(running.processes["broker-0"], signal.SIGKILL)
    events.wait("restarted")
    os.kill(running.processes["broker-0"], signal.SIGKILL)
    events.wait("failed")
    assert events.seen.count("failed") == 1


@pytest.mark.parametrize("lasts", [False, True])
def test_a_dead_member_that_cannot_be_started_is_tried_as_often_as_one_that_dies(
    running: EmbeddedCluster, events: Events, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    monkeypatch.setattr(restarts, "RAPID_DEATHS_MAX", 3)
    monkeypatch.setattr(restarts, "STABLE_MS", 3_600_000)
    monkeypatch.setattr(restarts, "PAUSE_FIRST_MS", 1)
    start, tries = subprocess.Popen, []

    def short(*given, **options):
        tries.append(given)
        if lasts or len(tries) < 3:
            raise OSError(errno.EMFILE, "no descriptor is left")
        return start(*given, **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", short)
    os.kill(running.processes["broker-0"], signal.SIGKILL)
    assert events.wait("failed" if lasts else "restarted").details["member"] == "broker-0"
    assert len(tries) == 3  # it died once besides
    assert ("failed" in events.seen) == lasts


def test_so_is_one_that_cannot_be_watched_and_none_is_left_without(
    running: EmbeddedCluster, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def short(thread: threading.Thread) -> None:
        if thread.name == "watch-broker-0" and not refused:
            refused.append(running.processes["broker-0"])
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short)
    running.kill("broker-0", restart=True)
    restarted = events.wait("restarted").details
    assert restarted["member"] == "broker-0"
    assert refused
    assert restarted["pid"] not in refused
    assert not psutil.pid_exists(refused[0])


def test_a_member_that_does_not_drain_is_killed(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DRAIN_TIMEOUT_S", 0.2)
    order(tmp_path, "broker-1", "deaf")
    with EmbeddedCluster(tmp_path, on_event=events) as embedded:
        pid = embedded.processes["broker-1"]
    while events.wait("killed").details["member"] != "broker-1":
        pass  # one of the others was too slow
    assert not psutil.pid_exists(pid)


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import json, sys, threading\n"
        "from duemq_server.local_cluster import EmbeddedCluster, plan\n"
        "plan.MODULES.update(broker='fake_member', timer='fake_member')\n"
        "embedded = EmbeddedCluster(sys.argv[1])\n"
        "embedded.start()\n"
        "print(json.dumps(embedded.processes), flush=True)\n"
        "threading.Event().wait()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline()).values()]
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_members_are_watched_where_their_ports_cannot_be_written_down(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "remember", full)
    with EmbeddedCluster(tmp_path, on_event=events, heartbeat_period_s=0.1) as embedded:
        told = events.wait("unsaved").details
        assert told["member"] == "nameserver-0"
        assert "No space left" in told["message"]
        embedded.kill("broker-0")
        assert events.wait("restarted").details["member"] == "broker-0"
        embedded.wait_ready()


def test_a_start_that_cannot_name_its_metrics_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "write_targets", full)
    embedded = EmbeddedCluster(tmp_path, metrics=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            embedded.start()
        assert embedded.processes == {}
    finally:
        embedded.stop()


def test_a_clock_that_is_set_back_keeps_no_member_down(
    running: EmbeddedCluster, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    died, time_ns = RestartPolicy.died, time.time_ns

    def set_back(policy: RestartPolicy, now_ms: int, *, wanted: bool) -> int | None:
        start_at_ms = died(policy, now_ms, wanted=wanted)
        monkeypatch.setattr(time, "time_ns", lambda: time_ns() - 3_600_000_000_000)
        return start_at_ms

    monkeypatch.setattr(RestartPolicy, "died", set_back)
    running.kill("broker-1")
    assert events.wait("restarted").details["member"] == "broker-1"


def test_a_member_that_waits_for_its_restart_can_be_killed_for_good(
    running: EmbeddedCluster, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "PAUSE_FIRST_MS", restarts.PAUSE_MAX_MS)
    running.kill("timer-0")
    events.wait("died")
    running.kill("timer-0", restart=False)
    assert running._members["timer-0"].state is supervisor.ChildState.STOPPED


def test_a_start_that_is_called_off_leaves_nothing_running(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RAPID_DEATHS_MAX", 1_000)
    order(tmp_path, "broker-0", "die")
    embedded = EmbeddedCluster(tmp_path, on_event=events)
    with pytest.raises(CalledOff):
        embedded.start(WAIT_S, called_off=lambda: "died" in events.drained())
    assert embedded.processes == {}
