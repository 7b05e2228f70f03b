import shlex

import pytest

from duemq_analytics.page import messages
from tests.unit.trace_analytics.page.made_rows import example


def by_title(examples, unreceived=0, twice=0):
    found = messages.tables(examples, {"unreceived": unreceived, "twice": twice})
    return {table.title: table for table in found}


def test_each_kind_has_a_table_and_suspects_say_of_how_many_they_are():
    found = by_title(
        [
            example("suspect", "a"),
            example("twice", "b", "g", 7, 3),
            example("slowest", "c", "g", 9),
        ],
        unreceived=1_234,
        twice=1,
    )
    lost, twice = found["Suspects: sent, never received"], found["Suspects: processed twice"]
    assert [row["message_id"] for row in lost.rows] == ["a"]
    assert lost.said == "1 of 1,234."
    assert [(row["message_id"], row["done"]) for row in twice.rows] == [("b", 3)]
    assert twice.said == ""
    assert not found["Latest messages"].rows


@pytest.mark.parametrize("message_id", ["5f0c", "a b", "$(reboot)", "it's", "-n"])
def test_a_command_can_be_pasted_whatever_the_id(message_id):
    command = messages.show_command(example("suspect", message_id))
    words = shlex.split(command)
    # A minute before the sending: clocks differ.
    assert words[:5] == ["duemq", "trace", "show", "--since", "2026-01-01T11:59:01Z"]
    assert words[-1] == message_id
    assert ("--" in words) == message_id.startswith("-")
