"""`duemq-nameserver` as its starter sees it: one line on stdout, signals, exit status."""

import json
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster
WAIT_S = 60


def start(*arguments):
    command = [sys.executable, "-m", "duemq_server.nameserver", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def nameserver():
    process = start("--listen", "127.0.0.1:0", "--ready-after", "0")
    yield process
    process.kill()
    process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_announces_itself_and_stops_cleanly(nameserver, number):
    line = json.loads(nameserver.stdout.readline())
    assert line["event"] == "listening"
    assert line["address"].startswith("127.0.0.1:")
    nameserver.send_signal(number)
    assert nameserver.wait(WAIT_S) == 0


def test_a_taken_address_ends_it_with_status_1(nameserver):
    address = json.loads(nameserver.stdout.readline())["address"]
    second = start("--listen", address)
    _, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 1
    assert f"cannot listen on {address}" in log


def test_a_wrong_setting_ends_it_with_status_2():
    process = start("--expiry", "soon")
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "expiry is 'soon' (--expiry), must be a duration" in said
