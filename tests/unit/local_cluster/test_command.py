"""What `duemq up` says of its options."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.local_cluster import ClusterFailed, command


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
