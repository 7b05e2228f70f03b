"""`duemq message find` of one message."""

import pytest
from click.testing import CliRunner

import duemq
from duemq.descriptions import FoundMessages
from duemq.errors import MissingBroker
from duemq.message import Message, Origin
from duemq.v1.message_pb2 import Record
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from tests.unit.cli.commands.fake_admin import FakeAdmin

MESSAGE = Message(Record(message_id="m"), Origin("t", "b0", 0), 0, 0)
AWAY = (MissingBroker("b1", "it is away"),)


@pytest.mark.parametrize(
    ("options", "found", "told"),
    [
        (("--id", "m"), FoundMessages((), False, ()), Exit.NOT_FOUND),
        (("--id", "m"), FoundMessages((MESSAGE,), False, ()), Exit.OK),
        (("--id", "m"), FoundMessages((), False, AWAY), Exit.PARTIAL),
        (("--key", "k"), FoundMessages((), False, ()), Exit.OK),
        ((), FoundMessages((), False, ()), Exit.OK),
    ],
    ids=["nowhere", "found", "may be at who is away", "of a key", "any"],
)
def test_an_id_that_no_message_has_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], found: FoundMessages, told: Exit
) -> None:
    class Finding(FakeAdmin):
        def find_messages(self, *_: object, **__: object) -> FoundMessages:
            return found

    monkeypatch.setattr(duemq, "Admin", Finding)
    command = ["--nameserver", "ns:1", "message", "find", "t", *options]
    assert CliRunner().invoke(cli, command).exit_code == told
