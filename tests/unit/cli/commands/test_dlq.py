"""What a dry run of `duemq dlq resend` says."""

import os
import signal
from typing import Any

import pytest
from click.testing import CliRunner

import duemq
from duemq.administering.letters.resending import Letter
from duemq.message import Origin
from duemq.v1.message_pb2 import Record
from duemq_cli import interrupts
from duemq_cli.app import cli
from duemq_cli.commands.dlq import _Sent
from duemq_cli.commands.tally import Tally
from duemq_cli.exits import Exit
from duemq_cli.output import Output
from tests.unit.cli.commands.fake_admin import FakeAdmin


def test_a_letter_that_does_not_say_where_it_lay_cannot_be_sent_there() -> None:
    letter = Letter(Record(message_id="m"), Origin("%DLQ%billing", "b0", 0), 0, 0, resent=False)

    def would(to_topic: str | None) -> tuple[int, int]:
        tally = Tally(Output(True), quiet=True, verb="sent again")
        assert _Sent(tally, "billing").would(iter([letter]), to_topic) == ()
        return tally.done, tally.failed

    assert would(None) == (0, 1)
    assert would("orders") == (1, 0)


class Terminated(FakeAdmin):
    """The process is told to end while letters are on their way."""

    ended = False

    def describe_topic(self, _: str) -> Any:
        raise duemq.errors.TopicNotFound("none")

    def resend_dead_letters(self, *_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            Terminated.ended = True  # what the real one has sent is marked


def test_sigterm_ends_a_resend_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duemq, "Admin", Terminated)
    with interrupts.handled(signal.SIGTERM, lambda *_: None):  # else the tests would end
        told = CliRunner().invoke(cli, ["--nameserver", "ns:1", "dlq", "resend", "g", "--all"])
    assert told.exit_code == Exit.INTERRUPTED
    assert "interrupted: 0 sent again, 0 not; some more may be" in told.stderr
    assert Terminated.ended
