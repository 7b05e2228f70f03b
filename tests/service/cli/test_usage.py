"""What the command line says without a cluster: help, wrong usage, nobody there."""

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import pytest
from click.testing import CliRunner, Result

from duemq.v1 import admin_pb2
from duemq_cli.app import COMMANDS, cli
from duemq_cli.exits import Exit
from duemq_cli.session import Session

ALL_COMMANDS = [
    ("send",),
    ("consume",),
    ("tail",),
    ("topic", "create"),
    ("topic", "list"),
    ("topic", "show"),
    ("topic", "delete"),
    ("topic", "purge"),
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
    ("dlq", "purge"),
    ("timer", "cancel"),
    ("timer", "count"),
    ("timer", "fire"),
    ("timer", "hold"),
    ("timer", "holds"),
    ("timer", "resume"),
    ("timer", "get"),
    ("timer", "list"),
    ("timer", "histogram"),
    ("timer", "reschedule"),
    ("timer", "owners"),
    ("timer", "release"),
    ("cluster", "show"),
    ("trace", "report"),
    ("trace", "show"),
    ("up",),
    ("context", "add"),
    ("context", "use"),
    ("context", "list"),
    ("context", "rm"),
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


@pytest.fixture(autouse=True)
def own_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DUEMQ_NAMESERVER", raising=False)


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
        ("tail", "t", "-n", "-1"),
        ("tail", "t", "--tag", "a", "--sql", "b = 1"),
        ("tail", "t", "--raw", "--json"),
        ("consume", "t", "--group", "g", "--raw", "--json"),
        ("topic", "list", "--timeout", "0"),
        ("context", "use", "nobody"),
        ("context", "rm", "nobody"),
        ("context", "add", "a b", "ns:9876"),
        ("context", "add", "a", "ns:port"),
        # Of a variable that is not set: no whole topic for that.
        ("timer", "cancel", "--topic", "t", "--key-prefix", ""),
        ("timer", "shift", "--topic", "t", "--by", "1h", "--key-prefix", ""),
        ("timer", "hold", "--topic", "t", "--key-prefix", ""),
        ("timer", "resume", "--topic", "t", "--key-prefix", ""),
        ("timer", "list", "--topic", "t", "--key-prefix", ""),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_2_and_an_error_object_with_json(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == Exit.USAGE
    result = run("--json", *arguments)
    assert result.exit_code == Exit.USAGE
    told = json.loads(result.stdout)["error"]
    assert told["message"]
    assert told["code"] == "INVALID_ARGUMENT"


def test_a_cluster_that_is_not_there_is_exit_3_in_one_line(nobody: str) -> None:
    result = run("topic", "list", "--nameserver", nobody, "--timeout", "1", "--json")
    assert result.exit_code == Exit.UNAVAILABLE
    (line,) = result.stdout.splitlines()
    assert nobody in json.loads(line)["error"]["message"]


def test_it_is_said_within_3_seconds_and_what_to_do(nobody: str) -> None:
    result = run("topic", "list", "--nameserver", nobody)
    assert result.exit_code == Exit.UNAVAILABLE
    assert "within 3 s" in result.stderr
    assert "duemq up" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("send", "t", "b"),
        ("consume", "t", "--group", "g"),
        ("tail", "t"),
        ("dlq", "list", "g"),
        ("timer", "cancel", "h"),
    ],
    ids=" ".join,
)
def test_every_command_waits_no_longer_than_it_is_told(
    nobody: str, command: tuple[str, ...]
) -> None:
    result = run(*command, "--nameserver", nobody, "--timeout", "0.5")
    assert result.exit_code == Exit.UNAVAILABLE
    assert "within 0.5 s" in result.stderr


@pytest.mark.parametrize(
    "command", [("topic", "list"), ("replica", "status", "broker-0")], ids=" ".join
)
def test_an_address_with_a_scheme_is_refused_at_once(command: tuple[str, ...]) -> None:
    result = run(*command, "--nameserver", "http://localhost:9876")
    assert result.exit_code == Exit.USAGE
    assert "write localhost:9876" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("send", "t", "b", "--at", "tomorrow"), "--at 'tomorrow' is no time to deliver at: RFC"),
        (
            ("send", "t", "b", "--at", "2030-01-01T00:00:00"),
            "--at '2030-01-01T00:00:00' is no time",
        ),
        (("send", "t", "b", "--delay-level", "0"), "--delay-level '0' is no delay level: 1 to "),
        (("send", "t", "b", "--delay", "soon"), "--delay 'soon' is no delay: 250ms, 5s, 1h30m"),
        (
            ("consume", "t", "--group", "g", "--from", "x"),
            "--from 'x' is no time: earliest, latest, ",
        ),
        (("message", "find", "t", "--since", "x"), "--since 'x' is no time: RFC 3339"),
        (("dlq", "list", "g", "--until", "x"), "--until 'x' is no time: RFC 3339"),
        (("group", "reset", "g", "--topic", "t", "--to", "x"), "--to 'x' is no time: earliest"),
        (
            ("timer", "resume", "soon", "--topic", "t", "--policy", "drop-older-than"),
            "TIME 'soon' is no delay: 250ms, 5s, 1h30m",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_wrong_values_are_named_as_they_are_written(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith(f"duemq: {words}")
    assert "datetime" not in result.stderr


@pytest.mark.parametrize(
    ("command", "one", "other"),
    [
        (("group", "reset", "g", "--topic", "t"), ("--to", "latest"), ("--offset", "3")),
        (
            ("schedule", "add", "s", "--topic", "t", "--body", "b"),
            ("--every", "1s"),
            ("--cron", "x"),
        ),
    ],
    ids=["reset", "schedule"],
)
def test_one_of_two_is_asked_for_by_name(
    command: tuple[str, ...], one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    for given in ((), (*one, *other)):
        result = run(*command, *given)
        assert result.exit_code == Exit.USAGE
        assert f"Give one of {one[0]} and {other[0]}." in result.stderr


@pytest.mark.parametrize("given", [("--policy", "drop-older-than"), ("2h",)], ids=" ".join)
def test_how_old_is_too_old_is_said_with_its_policy_alone(given: tuple[str, ...]) -> None:
    result = run("timer", "resume", "--topic", "t", *given)
    assert result.exit_code == Exit.USAGE
    assert "TIME goes with --policy drop-older-than, and that with TIME." in result.stderr


def test_contexts_are_used_where_no_address_is_given(
    nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("topic", "list", "--timeout", "0.3")
    assert "127.0.0.1:9876" in run("topic", "list", "--help").stdout
    added = run("context", "add", "staging", nobody, "--json")
    told = {"context": "staging", "nameserver": nobody, "tls": False, "current": True}
    assert json.loads(added.stdout) == told
    run("context", "add", "other", "nowhere.invalid:1")
    assert nobody in run(*asked).stderr
    run("context", "use", "other")
    assert "nowhere.invalid:1" in run(*asked).stderr
    monkeypatch.setenv("DUEMQ_NAMESERVER", "variable.invalid:2")
    assert "variable.invalid:2" in run(*asked).stderr
    assert nobody in run(*asked, "--nameserver", nobody).stderr
    assert nobody in run("--nameserver", nobody, *asked).stderr
    assert "a nameserver is needed" in run("--nameserver", "", *asked).stderr
    rows = [json.loads(line) for line in run("context", "list", "--json").stdout.splitlines()]
    assert [(row["context"], row["current"]) for row in rows] == [
        ("other", True),
        ("staging", False),
    ]
    assert json.loads(run("context", "rm", "other", "--json").stdout)["removed"]
    assert "staging" in run("context", "use", "nobody").stderr
    assert [path.name for path in (tmp_path / "duemq").iterdir()] == ["contexts.json"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"version": 2}', '{"version": 1, "contexts": 1}'),
        # Commands would go to another cluster, that of the default, and say nothing.
        '{"version": 1, "contexts": {}, "current": "staging"}',
        '{"version": 1, "contexts": {}, "current": ["staging"]}',
        '{"version": 1, "contexts": {"a": {"nameserver": null}}, "current": "a"}',
    ],
)
def test_a_bad_file_of_contexts_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "duemq").mkdir()
    (tmp_path / "duemq" / "contexts.json").write_text(content)
    result = run("topic", "list")
    assert result.exit_code == Exit.USAGE
    assert str(tmp_path / "duemq" / "contexts.json") in result.stderr


def test_who_has_no_home_has_no_contexts(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a number."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    # Somebody may be at the real one.
    monkeypatch.setattr("duemq_cli.session.DEFAULT_NAMESERVER", nobody)
    asked = run("topic", "list", "--timeout", "0.3")
    assert asked.exit_code == Exit.UNAVAILABLE
    assert nobody in asked.stderr
    assert run("context", "list").exit_code == 0
    added = run("context", "add", "staging", nobody)
    assert added.exit_code == Exit.USAGE
    assert "XDG_CONFIG_HOME" in added.stderr


def broken(how: str) -> TextIO:
    if how == "disk full":
        return open("/dev/full", "w", encoding="utf-8")
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8")


def exit_code(*arguments: str) -> int | str | None:
    """As of the program, with the streams that there are."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


@pytest.mark.parametrize("how", ["disk full", "reader gone"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("command", "code"), [("list", Exit.UNAVAILABLE), ("lost", Exit.USAGE)], ids=["3", "2"]
)
def test_an_error_that_cannot_be_printed_leaves_its_exit_code(
    command: str,
    code: Exit,
    stream: str,
    how: str,
    nobody: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--json"] if stream == "stdout" else []
    with broken(how) as unwritable, monkeypatch.context() as patched:
        patched.setattr(sys, stream, unwritable)
        asked = ("--nameserver", nobody, "--timeout", "0.3", "topic", command, *more)
        assert exit_code(*asked) == code
    told = capsys.readouterr()
    assert not told.out
    assert bool(told.err) == (stream == "stdout")  # people are told instead


@pytest.mark.parametrize("how", ["disk full", "reader gone"])
def test_an_interruption_that_cannot_be_printed_is_one(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(session: Session) -> NoReturn:
        raise KeyboardInterrupt

    with broken(how) as unwritable, monkeypatch.context() as patched:
        patched.setattr(Session, "admin", interrupted)
        patched.setattr(sys, "stderr", unwritable)
        assert exit_code("topic", "list") == Exit.INTERRUPTED


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_argument_that_is_no_text_is_wrong_usage(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(session: Session) -> NoReturn:
        admin_pb2.DescribeTopicRequest(name="no\udcfftext")
        raise AssertionError

    monkeypatch.setattr(Session, "admin", asked)
    assert exit_code("topic", "show", "no\udcfftext", *more) == Exit.USAGE
    told = capsys.readouterr()
    assert "'no\\udcfftext' is not UTF-8 text" in told.err + told.out.replace("\\\\", "\\")


class SpeaksNoTls(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_server_without_tls_is_told_in_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SpeaksNoTls) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "duemq_cli", "--nameserver", address, "topic", "list"],
                env={**environment, "DUEMQ_TLS": "1"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            server.shutdown()
    assert done.returncode == Exit.UNAVAILABLE
    [line] = done.stderr.splitlines()
    assert "does not speak TLS" in line


@pytest.mark.parametrize("what", [["cancel", "--all"], ["shift", "--by", "1h"]])
def test_a_bulk_change_of_no_time_is_told_by_its_options(what: list[str]) -> None:
    at = "2030-01-31T09:00:00Z"
    asked = ["timer", *what, "--topic", "t", "--from", at, "--to", at, "--yes"]
    found = CliRunner().invoke(cli, asked)
    assert found.exit_code == Exit.USAGE
    assert "--to 2030-01-31T09:00:00" in found.output
    assert "is not after --from 2030-01-31T09:00:00" in found.output
