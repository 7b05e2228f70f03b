"""Who is asked whether to go on knows of whom the answer does not tell."""

from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

import duemq
from duemq.errors import MissingBroker, PartialAnswer
from duemq_cli import streams
from duemq_cli.app import cli
from duemq_cli.commands.timer.bulk import at_that_time
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin


def away(partial: object) -> NoReturn:
    missing = [MissingBroker("b0", "it is away")]
    raise PartialAnswer("b0 is away", missing=missing, partial=partial)


class Partial(FakeAdmin):
    """A cluster of which a part is away."""

    def cancel_pending(self, *_: object, dry_run: bool, **__: object) -> int:
        assert dry_run
        away(3)

    def reset_offsets(self, *_: object, dry_run: bool, **__: object) -> list[object]:
        assert dry_run
        away([])

    def purge_topic(self, _: str, *, dry_run: bool) -> list[object]:
        assert dry_run
        away([])


@pytest.mark.parametrize(
    "command",
    [
        ("timer", "cancel", "--topic", "t", "--all"),
        ("topic", "purge", "t"),
        ("group", "reset", "g", "--topic", "t", "--to", "latest"),
    ],
    ids=" ".join,
)
def test_a_part_that_is_away_is_named_before_the_question(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(duemq, "Admin", Partial)
    monkeypatch.setattr(streams, "can_be_asked", lambda: True)
    told = CliRunner().invoke(cli, ["--nameserver", "ns:1", *command], input="n\n")
    assert told.exit_code == Exit.FAILED
    before, _, _ = told.stderr.partition("?")
    assert "no answer of b0: it is away" in before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("1971-01-01T01:00:00+01:00", "1971-01-01T00:00:00.000+00:00"),
        ("1900000000123", "2030-03-17T17:46:40.123+00:00"),
    ],
)
def test_a_time_is_the_same_when_it_is_said_again(given: str, told: str) -> None:
    context, option = click.Context(click.Command("shift")), click.Option(["--from"])
    assert at_that_time(context, option, given) == told
    assert at_that_time(context, option, told) == told
    ago = at_that_time(context, option, "-1h")
    assert ago is not None
    assert at_that_time(context, option, ago) == ago
