"""What the command line says without a cluster: help, wrong usage, nobody there."""

import json
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from duemq.cli.app import COMMANDS, cli
from duemq.cli.exits import Exit
from duemq.settings import ClientSettings

ALL_COMMANDS = [
    ("send",),
    ("consume",),
    ("topic", "create"),
    ("topic", "list"),
    ("topic", "show"),
    ("topic", "delete"),
    ("group", "list"),
    ("group", "show"),
    ("group", "create"),
    ("group", "update"),
    ("group", "delete"),
    ("group", "reset"),
    ("group", "skip"),
    ("group", "clone"),
    ("message", "find"),
    ("message", "show"),
    ("dlq", "list"),
    ("dlq", "show"),
    ("dlq", "resend"),
    ("timer", "cancel"),
    ("timer", "owners"),
    ("timer", "release"),
    ("cluster", "show"),
    ("trace", "report"),
    ("up",),
    ("bench", "send"),
    ("bench", "latency"),
    ("bench", "consume"),
    ("bench", "e2e"),
    ("bench", "filter"),
    ("bench", "timers"),
    ("bench", "lateness"),
    ("bench", "pending"),
    ("bench", "restart"),
    ("bench", "idle"),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, nor can: it is taken."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"


def test_the_root_lists_every_command_and_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"  {command} " in result.output
    assert "Exit codes" in result.output


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_every_command_explains_itself_and_takes_json(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output
    assert "--nameserver" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "t"),
        ("send", "t", "body", "--file", __file__),
        ("send", "t", "--file", __file__),
        ("send", "t", "b", "--delay", "1s", "--delay-level", "1"),
        ("send", "t", "b", "--property", "novalue"),
        ("consume", "t"),
        ("consume", "t", "--group", "g", "--count", "0"),
        ("consume", "t", "--group", "g", "--from", "middle"),
        ("consume", "t", "--group", "g", "--from", "2026-01-01T00:00:00"),
        ("consume", "t", "--group", "g", "--tag", "a", "--sql", "b = 1"),
        ("consume", "t", "--group", "g", "--order", "topic"),
        ("consume", "t", "--group", "g", "--member", "not/a/name"),
        ("group", "reset", "g"),
        ("group", "create", "g", "--retries-max", "-1"),
        ("group", "create", "g", "--exponential", "5s", "2"),
        ("group", "reset", "g", "--topic", "t", "--to", "earliest", "--queue", "nowhere"),
        ("message", "find"),
        ("message", "find", "t", "--limit", "0"),
        ("message", "show", "t"),
        ("message", "find", "t", "--timeout", "nan"),
        ("consume", "t", "--group", "g", "--idle-timeout", "nan"),
        ("consume", "t", "--group", "g", "--idle-timeout", "inf"),
        ("up",),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_2_and_an_error_object_with_json(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == Exit.USAGE
    result = run("--json", *arguments)
    assert result.exit_code == Exit.USAGE
    assert json.loads(result.stdout)["error"]["message"]


def test_a_cluster_that_is_not_there_is_exit_3_in_one_line(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.client.ClientSettings", lambda: ClientSettings(connect_timeout_s=1))
    result = run("topic", "list", "--nameserver", nobody, "--json")
    assert result.exit_code == Exit.UNAVAILABLE
    (line,) = result.stdout.splitlines()
    assert nobody in json.loads(line)["error"]["message"]
