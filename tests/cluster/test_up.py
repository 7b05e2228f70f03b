"""A cluster that others than this machine can use, with metrics."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from duemq import Admin, ClientSettings
from duemq_cli.exits import Exit
from duemq_server.local_cluster import EmbeddedCluster
from tests.certificates import authority, certificate, needs_openssl
from tests.cluster.harness import WAIT_S, duemq, rows
from tests.listening import loopbacks

SERIES = {
    "nameserver-0": "duemq_nameserver_instances",
    "broker-0": "duemq_broker_",
    "timer-0": "duemq_timer_",
}


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def test_it_listens_everywhere_and_advertises_a_name(tmp_path: Path) -> None:
    with EmbeddedCluster(
        tmp_path, brokers=1, host="0.0.0.0", advertise="localhost", metrics=True
    ) as cluster:
        nameserver = cluster.nameserver
        assert nameserver.startswith("localhost:")
        with Admin(nameserver) as admin:
            [broker] = admin.cluster().brokers
            assert broker.address.startswith("localhost:")
        sent = rows(duemq(nameserver, "send", "greetings", "hello", "--json"))
        assert sent[0]["broker"] == "broker-0"
        assert set(cluster.metrics) == set(SERIES)
        for member, address in cluster.metrics.items():
            assert SERIES[member] in page(address)
            traces = 'duemq_trace_spans_dropped_total{reason="queue_full"} 0.0' in page(address)
            assert traces == (member != "nameserver-0")
        targets = json.loads((tmp_path / "metrics.json").read_text())
        assert {each["labels"]["member"]: each["targets"] for each in targets} == {
            member: [address] for member, address in cluster.metrics.items()
        }


@needs_openssl
def test_a_certificate_is_for_the_name_that_is_advertised(tmp_path: Path) -> None:
    tls = certificate(authority(tmp_path), "queue", san="DNS:localhost")
    with (
        EmbeddedCluster(
            tmp_path / "data", brokers=1, host="0.0.0.0", advertise="localhost", tls=tls
        ) as cluster,
        Admin(cluster.nameserver, settings=ClientSettings(tls=tls)) as admin,
    ):
        assert [broker.error for broker in admin.cluster().brokers] == [None]


@pytest.mark.skipif("[::1]" not in loopbacks(), reason="no IPv6")
def test_a_member_comes_back_to_its_ipv6_addresses(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path, brokers=1, host="::1", metrics=True) as cluster:
        before = cluster.address("broker-0"), cluster.metrics["broker-0"]
        assert all(address.startswith("[::1]:") for address in before)
        cluster.kill("broker-0")
        cluster.wait_ready()
        assert (cluster.address("broker-0"), cluster.metrics["broker-0"]) == before
        assert SERIES["broker-0"] in page(cluster.metrics["broker-0"])
        sent = rows(duemq(cluster.nameserver, "send", "greetings", "hello", "--json"))
        assert sent[0]["broker"] == "broker-0"


def test_the_command_says_where_metrics_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--brokers", "1", "--metrics", "--json"], stdout=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        events = (json.loads(line) for line in up.stdout)
        ready = next(event for event in events if event["event"] == "ready")
        for member, address in ready["metrics"].items():
            assert SERIES[member] in page(address)
        up.terminate()
        assert up.wait(WAIT_S) == Exit.OK


def test_everywhere_alone_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path)]
    done = subprocess.run(
        [*command, "--listen", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == Exit.USAGE
    assert "--advertise" in done.stderr


def test_ctrl_c_drains_and_stops_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--brokers", "1", "--json"], stdout=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        events = (json.loads(line)["event"] for line in up.stdout)
        assert "ready" in events
        up.send_signal(signal.SIGINT)
        assert list(events)[-1] == "stopped"
        assert up.wait(WAIT_S) == Exit.OK


def test_it_stops_although_nobody_reads_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--brokers", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as up:
        assert up.stdout is not None
        ready = next(json.loads(line) for line in up.stdout if '"ready"' in line)
        up.stdout.close()
        up.terminate()
        up.wait(WAIT_S)
    assert not any(psutil.pid_exists(pid) for pid in ready["processes"].values())


def test_ctrl_c_is_heard_while_it_starts(tmp_path: Path) -> None:
    folder = tmp_path / "broker-0" / "commitlog"
    folder.mkdir(parents=True)
    (folder / "00000000000000000000").mkdir()  # no log: this broker cannot start
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--brokers", "1", "--json"], stdout=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        events = (json.loads(line).get("event") for line in up.stdout)
        assert "died" in events
        up.send_signal(signal.SIGINT)
        rest = list(events)
        assert rest[-1] == "stopped"
        assert "failed" not in rest
        assert up.wait(WAIT_S) == Exit.OK
