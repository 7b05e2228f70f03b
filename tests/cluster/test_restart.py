"""`duemq up`, stopped and started again on its folder: data and addresses are kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.harness import WAIT_S, duemq, rows


@contextmanager
def up(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command, once it said that it is ready."""
    command = [sys.executable, "-m", "duemq_cli", "up", "--data", str(directory), "--port", "0"]
    with subprocess.Popen(
        [*command, "--json", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, next_event(process, "ready")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            process.stdout.read()
            assert process.wait(WAIT_S) == 0


def next_event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the command ended before it said {name}")


@pytest.mark.long
def test_a_restart_keeps_messages_timers_offsets_and_addresses(tmp_path: Path) -> None:
    directory = tmp_path / "with a space"
    with up(directory) as (_, ready):
        nameserver = ready["nameserver"]
        assert set(ready["processes"]) == {"nameserver-0", "broker-0", "broker-1", "timer-0"}
        rows(duemq(nameserver, "send", "t", "-", "--json", stdin="one\ntwo\nthree\n"))
        (delayed,) = rows(duemq(nameserver, "send", "t", "late", "--delay", "6s", "--json"))
        assert delayed["due_ms"]
        consume = ("consume", "t", "--group", "g", "--from", "earliest", "--json")
        first = rows(duemq(nameserver, *consume, "--count", "2", "--idle-timeout", "50"))
        pids = list(ready["processes"].values())
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with up(directory) as (_, ready):
        assert ready["nameserver"] == nameserver
        rest = rows(duemq(nameserver, *consume, "--count", "2", "--idle-timeout", "50"))
    bodies = [row["body"] for row in first + rest]
    assert sorted(bodies) == ["late", "one", "three", "two"]


def test_a_member_that_dies_is_restarted_and_said_so(tmp_path: Path) -> None:
    with up(tmp_path, "--brokers", "1") as (process, ready):
        assert "broker-1" not in ready["processes"]
        psutil.Process(ready["processes"]["broker-0"]).kill()
        assert next_event(process, "died")["member"] == "broker-0"
        restarted = next_event(process, "restarted")
        assert restarted["member"] == "broker-0"
        assert restarted["pid"] != ready["processes"]["broker-0"]
