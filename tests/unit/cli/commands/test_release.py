"""`duemq timer release` gives up nothing that was not shown and agreed to."""

import json

import pytest
from click.testing import CliRunner

import duemq
from duemq.descriptions import TimerOwner
from duemq.errors import MissingBroker, PartialAnswer
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin


class Flapping(FakeAdmin):
    """A broker with the shard's queues is away as it is asked, and back right after."""

    released = 0

    def release_timer_shard(self, shard: int, *, dry_run: bool = False) -> list[TimerOwner]:
        if dry_run:
            raise PartialAnswer("b0 is away", missing=[MissingBroker("b0", "away")], partial=[])
        Flapping.released += 1
        return []


def test_what_a_broker_that_is_away_has_is_not_released_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duemq, "Admin", Flapping)
    told = CliRunner().invoke(cli, ["--nameserver", "ns:1", "timer", "release", "0"])
    assert told.exit_code == Exit.FAILED
    assert "no answer of b0" in told.stderr
    assert "nothing was done" in told.stderr
    assert Flapping.released == 0


def test_owners_are_told_by_the_names_that_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owned(FakeAdmin):
        def timer_owners(self) -> list[TimerOwner]:
            return [TimerOwner("b0", 3, 0xFEED, "timer-0", 0, 1)]

    monkeypatch.setattr(duemq, "Admin", Owned)
    told = CliRunner().invoke(cli, ["--nameserver", "ns:1", "timer", "owners", "--json"])
    row = json.loads(told.stdout)
    assert (row["broker"], row["queue"], row["id"]) == ("b0", 3, f"{0xFEED:016x}")
    assert "queue_id" not in row
