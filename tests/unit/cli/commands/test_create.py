"""`duemq topic create` and `duemq group create` of what is there."""

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import duemq
from duemq.descriptions import GroupDescription, GroupSummary, TopicSummary
from duemq.errors import TopicExists
from duemq.protocol.retry_policy import RetryPolicy
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin

TOPIC = TopicSummary("there", 8, 0, ("b0", "b1"))
GROUP = GroupDescription("there", "b0", 1, "", (), (), RetryPolicy(3, (1_000,)))


class There(FakeAdmin):
    """A cluster that has the topic and the group `there`, and changes nothing."""

    def create_topic(self, name: str, **_: object) -> TopicSummary:
        raise TopicExists(f"topic {name!r} exists", field="name", value=name)

    def topics(self, *, system: bool) -> list[TopicSummary]:
        return [TOPIC]

    def groups(self) -> list[GroupSummary]:
        return [GroupSummary("there", 0, 1, "b0")]

    def describe_group(self, name: str) -> GroupDescription:
        return GROUP

    def put_group(self, name: str, **_: object) -> RetryPolicy:
        pytest.fail("it is there, everywhere")


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duemq, "Admin", There)


def create(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--nameserver", "ns:1", *arguments])


@pytest.mark.parametrize("kind", ["topic", "group"])
def test_what_is_there_is_no_wrong_argument(kind: str) -> None:
    people = create(kind, "create", "there")
    assert people.exit_code == Exit.FAILED
    assert f"duemq: {kind} 'there' exists" in people.stderr
    programs = create(kind, "create", "there", "--json")
    assert programs.exit_code == Exit.FAILED
    (line,) = programs.stdout.splitlines()
    assert json.loads(line)["error"]["value"] == "there"


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (
            ("topic", "create", "there", "--queues", "3"),
            {"topic": "there", "queues": 8, "message_bytes_max": 0, "brokers": ["b0", "b1"]},
        ),
        (
            ("group", "create", "there", "--retries-max", "9"),
            {
                "group": "there",
                "retries_max": 3,
                "retry_delays_ms": [1_000],
                "retry_exponential": None,
            },
        ),
    ],
    ids=["topic", "group"],
)
def test_if_not_exists_prints_what_is_there(
    arguments: tuple[str, ...], row: dict[str, object]
) -> None:
    told = create(*arguments, "--if-not-exists", "--json")
    assert told.exit_code == Exit.OK, told.output
    (line,) = told.stdout.splitlines()
    assert json.loads(line) == row


@pytest.mark.parametrize("again", [("create", "--if-not-exists"), ("update",)], ids=" ".join)
def test_a_broker_that_lacks_a_group_gets_it_as_it_is(
    again: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away when the group was made, or has been added since."""
    put: list[dict[str, Any]] = []

    def put_group(_: There, name: str, **wanted: Any) -> RetryPolicy:
        put.append(wanted)
        assert GROUP.retry is not None
        return GROUP.retry

    lacking = replace(GROUP, without_settings=("b1",))
    monkeypatch.setattr(There, "describe_group", lambda *_: lacking)
    monkeypatch.setattr(There, "put_group", put_group)
    assert create("group", *again, "there").exit_code == Exit.OK
    assert put == [{"retries_max": 3, "retry_delays": [1.0], "exponential": None}]
