"""What a dry run of `duemq dlq resend` says."""

from duemq.administering.letters.resending import Letter
from duemq.message import Origin
from duemq.v1.message_pb2 import Record
from duemq_cli.commands.dlq import _Sent
from duemq_cli.commands.tally import Tally
from duemq_cli.output import Output


def test_a_letter_that_does_not_say_where_it_lay_cannot_be_sent_there() -> None:
    letter = Letter(Record(message_id="m"), Origin("%DLQ%billing", "b0", 0), 0, 0, resent=False)

    def would(to_topic: str | None) -> tuple[int, int]:
        tally = Tally(Output(True), quiet=True, verb="sent again")
        assert _Sent(tally, "billing").would(iter([letter]), to_topic) == ()
        return tally.done, tally.failed

    assert would(None) == (0, 1)
    assert would("orders") == (1, 0)
