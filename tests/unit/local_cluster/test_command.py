"""What `duemq up` says of its options."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from duemq.errors import InvalidArgument
from duemq.settings import TLS_VARIABLES, Tls
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.local_cluster import ClusterFailed, command
from tests.certificates import authority, certificate, needs_openssl


@pytest.mark.parametrize("written", [True, False])
def test_a_nameserver_that_is_written_is_not_the_one_that_is_started(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise ClusterFailed("it is not started here")

    monkeypatch.setattr(command, "EmbeddedCluster", start)
    monkeypatch.setenv("DUEMQ_NAMESERVER", "ns:1")  # of other commands
    given = ["--nameserver", "ns:2"] if written else []
    told = CliRunner().invoke(cli, ["up", "--data", str(tmp_path), *given])
    assert told.exit_code == Exit.FAILED
    assert ("starts a nameserver of its own" in told.stderr) == written


def test_an_empty_folder_is_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a variable that is not set makes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "EmbeddedCluster", lambda *_, **__: pytest.fail("started"))
    told = CliRunner().invoke(cli, ["up", "--data", ""])
    assert told.exit_code == Exit.USAGE
    assert "--data: '' is not allowed" in told.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("advertise", ["queue:9870", "http://queue", "a b", "0.0.0.0", "[::]"])
def test_what_nobody_can_reach_is_refused_before_anything_is_started(
    advertise: str, tmp_path: Path
) -> None:
    """It would start, and be of use to nobody; or its members would die again and again."""
    given = ["up", "--data", str(tmp_path / "d"), "--listen", "0.0.0.0", "--advertise", advertise]
    told = CliRunner().invoke(cli, given)
    assert told.exit_code == Exit.USAGE
    assert f"advertise: {advertise!r} is not allowed" in told.stderr
    assert not (tmp_path / "d").exists()


@needs_openssl
def test_files_of_tls_that_are_of_no_use_are_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority(tmp_path)
    good, other = (certificate(ca, name) for name in ("good", "other"))

    def files(tls: Tls) -> Tls | None:
        for name, variable in TLS_VARIABLES.items():
            monkeypatch.setenv(variable, getattr(tls, name))
        return command._tls(verify_clients=True)

    assert files(good) == good
    with pytest.raises(InvalidArgument, match="tls_ca: "):
        files(dataclasses.replace(good, ca=str(tmp_path / "missing.pem")))
    with pytest.raises(InvalidArgument, match="tls_cert: "):
        files(dataclasses.replace(good, key=other.key))
