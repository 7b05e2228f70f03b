"""`duemq timer hold` of a topic that is not there."""

import json

import pytest
from click.testing import CliRunner, Result

import duemq
from duemq.descriptions import HeldTimers, TopicDescription
from duemq.errors import PartialAnswer, TopicNotFound
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin


class Holding(FakeAdmin):
    """A cluster that knows the topic `orders`; of `away` only a lost broker could tell."""

    def hold_timers(self, *_: object, **__: object) -> HeldTimers:
        return HeldTimers(0, False)

    def describe_topic(self, name: str) -> TopicDescription:
        if name == "away":
            raise PartialAnswer("no answer of b1")
        if name != "orders":
            raise TopicNotFound(f"no topic {name!r}")
        return TopicDescription(name, 0, (), ())


@pytest.fixture(autouse=True)
def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duemq, "Admin", Holding)


def hold(topic: str, *more: str) -> Result:
    told = CliRunner().invoke(
        cli, ["--nameserver", "ns:1", "timer", "hold", "--topic", topic, *more]
    )
    assert told.exit_code == Exit.OK, told.output
    assert told.stdout
    return told


@pytest.mark.parametrize("form", [(), ("--dry-run",)], ids=["held", "dry run"])
def test_that_no_broker_knows_the_topic_is_said(form: tuple[str, ...]) -> None:
    assert "no broker knows topic oders" in hold("oders", *form).stderr
    for topic in ("orders", "away"):
        assert hold(topic, *form).stderr == ""


@pytest.mark.parametrize(("topic", "known"), [("orders", True), ("oders", False), ("away", None)])
def test_programs_are_told(topic: str, known: bool | None) -> None:
    told = hold(topic, "--json")
    (row,) = map(json.loads, told.stdout.splitlines())
    assert row == {"count": 0, "was_held": False, "topic_known": known}
    assert told.stderr == ""
