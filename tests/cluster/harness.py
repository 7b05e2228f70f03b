"""Real processes for the cluster tests: an embedded cluster a test module, on free ports.

Tests that kill members share the module's cluster and leave it whole (`cluster.wait_ready()`).
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tenacity

from duemq_server.local_cluster import EmbeddedCluster
from tests.service.cli.commands import CONNECTS

# The wait for anything that must happen: generous, as these machines are slow and shared.
WAIT_S = 60.0
POLL_S = 0.02


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One nameserver, two brokers, one timer service."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster")) as embedded:
        yield embedded


@pytest.fixture(scope="module")
def two_nameservers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two nameservers, two brokers, one timer service."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), nameservers=2) as embedded:
        yield embedded


def duemq(
    nameserver: str, *arguments: str, stdin: str = "", wait_s: float = 2 * WAIT_S
) -> subprocess.CompletedProcess[str]:
    """Runs the command line against a cluster."""
    command = [sys.executable, "-P", "-c", f"{CONNECTS}\nmain()", "--nameserver", nameserver]
    return subprocess.run(
        [*command, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The objects that a command printed; fails the test if the command failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def topic_name() -> str:
    """A topic of a test's own."""
    return f"t-{secrets.token_hex(4)}"


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits for something that must come true; fails the test when it does not."""
    retry = tenacity.Retrying(
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(POLL_S),
        retry=tenacity.retry_if_result(lambda fulfilled: not fulfilled),
        retry_error_callback=lambda state: False,
    )
    assert retry(condition), f"not fulfilled within {timeout_s:g} s"


def leader_of(cluster: EmbeddedCluster, group: str) -> str:
    """The member that leads; waits until there is one, and until it says so in time."""
    said: list[str] = []

    def is_known() -> bool:
        said.append(cluster.leader(group))
        return bool(said[-1])

    until(is_known)
    return said[-1]
