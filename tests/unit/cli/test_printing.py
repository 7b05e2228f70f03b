"""Messages as the CLI prints them."""

from __future__ import annotations

from duemq.message import Message, Origin
from duemq.v1.message_pb2 import Record
from duemq_cli.printing import message_fields


def test_the_key_under_which_a_message_waited_is_told_if_there_is_one() -> None:
    def fields(**record: str) -> dict[str, object]:
        return message_fields(Message(Record(**record), Origin("orders", "b0", 1), 7, 0))

    assert fields(timer_key="order-7")["timer_key"] == "order-7"
    assert "timer_key" not in fields()
