"""Where `duemq replica` asks."""

import pytest
from click.testing import CliRunner

from duemq.errors import InvalidArgument
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.operating.asking import Asking


def test_addresses_are_those_that_all_commands_take() -> None:
    assert Asking("ns-0, ns-1:9000", 1.0, None).nameservers == ("ns-0:9876", "ns-1:9000")
    with pytest.raises(InvalidArgument, match="a nameserver is needed"):
        Asking("", 1.0, None)


def test_a_replica_that_is_named_by_its_address_is_told_by_it() -> None:
    told = CliRunner().invoke(cli, ["replica", "history", "127.0.0.1:1", "--timeout", "0.5"])
    assert told.exit_code == Exit.UNAVAILABLE
    assert "no answer of 127.0.0.1:1: " in told.stderr
