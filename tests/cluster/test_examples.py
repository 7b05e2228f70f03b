"""The SDK's examples say what they claim to say, against a real cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S

EXAMPLES = Path(__file__).resolve().parents[2] / "sdk" / "examples"
SAID = {
    "first": ["hello", "hello in a second", "the third is cancelled"],
    "send_many": [
        "10000 stored",
        "1000 stored",
        "queues at most 3",
        "number 1 TooLarge",
    ],
    "due_times": ["dmq1", "True"],
    "timer_keys": [
        "replaced True",
        "exists True True",
        "rescheduled",
        "50 cancelled",
        "customer-7 plum",
    ],
    "schedules": ["created", "changed", "3 changed beat of beat", "ended True"],
    "asyncio_client": ["True"],
    "administration": ["1 message", "up", "[]"],
    "lists": [
        "9 billed",
        "order 3 at the second time",
        "order 7 is a dead letter: no such customer",
    ],
    "in_order": ["ada ordered paid sent", "bob ordered paid sent", "screen-2 9 messages"],
}


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_example(cluster: EmbeddedCluster, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), cluster.nameserver],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in SAID[name]:
        assert line in done.stdout
    assert "never seen" not in done.stdout
