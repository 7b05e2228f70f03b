"""Which cluster `duemq bench` measures."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.bench import suite
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import target
from duemq_server.local_cluster import ClusterFailed


@pytest.mark.parametrize(
    ("written", "asked"),
    [((), None), (("--nameserver", "ns:1"), "ns:1")],
    ids=["variable", "option"],
)
def test_only_a_cluster_that_is_written_gets_its_messages(
    written: tuple[str, ...], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[suite.BenchPlace] = []

    def run(bench: str, parameters: object, place: suite.BenchPlace, **_: object) -> None:
        places.append(place)
        raise OSError

    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setenv("DUEMQ_NAMESERVER", "production:9876")
    for command in ((*written, "bench", "send"), ("bench", "send", *written)):
        CliRunner().invoke(cli, command)
    assert [place.nameserver for place in places] == [asked, asked]


def test_a_sigterm_lets_it_remove_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bench: str, parameters: object, place: suite.BenchPlace, **_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(suite, "run", run)
    default = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert CliRunner().invoke(cli, ["bench", "send"]).exit_code == Exit.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, default)


def test_what_it_leaves_elsewhere_is_told_and_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        bench: str,
        parameters: dict[str, Any],
        place: suite.BenchPlace,
        before: object,
        tell_left: Callable[[str], None],
    ) -> Report:
        if not place.keep_topics:
            tell_left("topic t is left")
        return Report(bench, parameters, {"lost": 0})

    monkeypatch.setattr(suite, "run", run)
    command = ["--nameserver", "ns:1", "bench", "send", "--json"]
    told = CliRunner().invoke(cli, command)
    assert told.exit_code == Exit.FAILED
    error, report = map(json.loads, told.stdout.splitlines())
    assert error["error"]["message"] == "topic t is left"
    assert report["figures"] == {"lost": 0}
    assert CliRunner().invoke(cli, [*command, "--keep-topics"]).exit_code == Exit.OK


@pytest.mark.parametrize("name", ["restart", "timers-matrix"])
def test_who_names_a_cluster_that_is_not_measured_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(bench: str, parameters: object, place: suite.BenchPlace, **_: object) -> Report:
        assert place.nameserver is None
        return Report(bench, {}, {"restart_s": 1.0})

    monkeypatch.setattr(suite, "run", run)
    told = CliRunner().invoke(cli, ["--nameserver", "ns:1", "bench", name])
    assert told.exit_code == Exit.OK
    assert f"{name} measures a cluster of its own, not that of --nameserver" in told.stderr
    assert CliRunner().invoke(cli, ["bench", name]).stderr == ""
    assert "--keep-topics" not in CliRunner().invoke(cli, ["bench", name, "--help"]).stdout


def test_a_cluster_of_its_own_that_does_not_come_up_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object, **__: object) -> None:
        raise ClusterFailed("broker-0 did not come up:\n  no space")

    monkeypatch.setattr(suite, "run", run)
    told = CliRunner().invoke(cli, ["bench", "send"])
    assert told.exit_code == Exit.FAILED
    assert told.stderr == "duemq: broker-0 did not come up: no space\n"


def test_its_folder_is_made(tmp_path: Path) -> None:
    with target("ns:1", directory=str(tmp_path / "a" / "b")) as found:
        assert found.directory.parent == tmp_path / "a" / "b"
