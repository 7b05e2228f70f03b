"""What the shell is offered when Tab is pressed."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from duemq.v1 import broker_pb2
from duemq_cli import completion
from duemq_cli.app import cli
from duemq_cli.session import Session
from tests.service.running_cluster import Cluster, running_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as cluster:
        for topic in ("orders", "organs", "mail"):
            await cluster.create_topic(topic)
        commit = broker_pb2.OffsetCommit(topic="orders", queue_id=0, offset=0)
        await cluster.clients["b0"].broker.CommitOffsets(
            broker_pb2.CommitOffsetsRequest(group="billing", commits=[commit])
        )
        yield cluster


def offered(nameserver: str, *words: str) -> list[str]:
    """For the last word."""
    complete = ShellComplete(cli, {"obj": Session()}, "duemq", "_DUEMQ_COMPLETE")
    *before, incomplete = ("--nameserver", nameserver, *words)
    return [each.value for each in complete.get_completions(before, incomplete)]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("topic", "show", "or"), ["orders", "organs"]),
        (("send", "ma"), ["mail"]),
        (("tail", ""), ["mail", "orders", "organs"]),
        (("topic", "create", "or"), []),
        (("group", "show", "b"), ["billing"]),
        (("consume", "orders", "--group", ""), ["billing"]),
        (("group", "reset", "billing", "--topic", "m"), ["mail"]),
        (("timer", "count", "--topic", "m"), ["mail"]),
        (("timer", "histogram", "--topic", "m"), ["mail"]),
        (("timer", "list", "--topic", "m"), ["mail"]),
        (("dlq", "resend", "billing", "--to", "m"), ["mail"]),
        (("dlq", "li"), ["list"]),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
async def test_names_of_the_cluster_are_offered(
    cluster: Cluster, words: tuple[str, ...], values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "TIMEOUT_S", 60.0)
    assert await asyncio.to_thread(offered, cluster.nameserver, *words) == values


def test_a_cluster_that_does_not_answer_offers_nothing_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completion, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert offered(f"127.0.0.1:{silent.getsockname()[1]}", "topic", "show", "") == []


def test_contexts_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    CliRunner().invoke(cli, ["context", "add", "staging", "ns:9876"])
    assert offered("nowhere:1", "context", "use", "s") == ["staging"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_what_a_shell_takes(shell: str) -> None:
    environment = {**os.environ, "_DUEMQ_COMPLETE": f"{shell}_source"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "duemq")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "_duemq_completion" in done.stdout
