"""`duemq topic delete` tells of the delayed messages that it leaves."""

import json

import pytest
from click.testing import CliRunner, Result

import duemq
from duemq.descriptions import TimerCount
from duemq.errors import DuemqError, InvalidArgument, MissingBroker, PartialAnswer
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin

AWAY = PartialAnswer(
    "no answer of timer shard 1: it is away",
    missing=[MissingBroker("timer shard 1", "it is away")],
    partial=[TimerCount("orders", pending=2)],
)
NOTHING_KNOWN = PartialAnswer(AWAY.message, missing=AWAY.missing, partial=[TimerCount("orders")])


def delete(monkeypatch: pytest.MonkeyPatch, pending: int | DuemqError, *options: str) -> Result:
    class Deleting(FakeAdmin):
        """A cluster with so many delayed messages of the topic."""

        def delete_topic(self, name: str) -> None:
            assert name == "orders"

        def count_timers(self, name: str) -> list[TimerCount]:
            if isinstance(pending, DuemqError):
                raise pending
            return [TimerCount(name, pending=pending, accepted=7)]

    monkeypatch.setattr(duemq, "Admin", Deleting)
    done = CliRunner().invoke(
        cli, ["--nameserver", "ns:1", "topic", "delete", "orders", "--yes", *options]
    )
    assert done.exit_code == Exit.OK, done.output
    return done


@pytest.mark.parametrize(("pending", "count"), [(1_200, "1,200"), (AWAY, "2 or more")])
def test_what_waits_for_it_is_told_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, pending: int | DuemqError, count: str
) -> None:
    done = delete(monkeypatch, pending)
    assert done.stdout == "topic orders deleted\n"
    assert done.stderr.startswith(f"{count} delayed messages wait for it: ")
    assert "`duemq timer move --topic orders --to-topic TOPIC`" in done.stderr
    assert "`duemq timer cancel --topic orders --all`" in done.stderr


def test_nothing_is_said_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert delete(monkeypatch, 0).stderr == ""


@pytest.mark.parametrize("error", [NOTHING_KNOWN, InvalidArgument("counted with others")])
def test_what_cannot_be_counted_is_said_and_the_topic_is_deleted(
    monkeypatch: pytest.MonkeyPatch, error: DuemqError
) -> None:
    done = delete(monkeypatch, error)
    assert done.stdout == "topic orders deleted\n"
    assert f"is not known: {error}" in done.stderr


@pytest.mark.parametrize(
    ("pending", "told"), [(3, 3), (0, 0), (AWAY, None), (InvalidArgument("others"), None)]
)
def test_programs_get_the_number(
    monkeypatch: pytest.MonkeyPatch, pending: int | DuemqError, told: int | None
) -> None:
    done = delete(monkeypatch, pending, "--json")
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row == {"topic": "orders", "deleted": True, "pending": told}
    assert done.stderr == ""
