"""What `duemq send` makes of its options, and what it says when it is interrupted."""

import io
from typing import Any

import pytest

from duemq.errors import Internal, InvalidArgument
from duemq.protocol.due import deliver_at_ms
from duemq_cli import inputs
from duemq_cli.commands.send import Template, _checked, _Sender
from duemq_cli.commands.tally import FAILURES_SHOWN_MAX, Tally
from duemq_cli.inputs import InputLine
from duemq_cli.output import Output


class NoAnswers:
    """A producer whose receipts never come."""

    def submit(self, topic: str, body: bytes, **arguments: Any) -> Any:
        return self


def test_what_has_no_answer_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(Output(False), quiet=False, verb="sent")
    sender = _Sender(tally, "t")
    template = Template("t", {}, {}, {})
    for number in range(3):
        sender.send(NoAnswers(), template, InputLine(number))  # type: ignore[arg-type]
    tally.add({}, "the first")
    assert sender.left() == "1 sent, 0 not; 2 more have no answer yet: they may be stored"


def test_a_wrong_column_is_one_error_and_names_the_others() -> None:
    template = Template("t", {}, {"key": "nope"}, {})
    entries = iter([InputLine(2, b"{}", {"id": "1"}), InputLine(3, b"{}", {"id": "2"})])
    with pytest.raises(InvalidArgument, match="no column 'nope'; there are: id") as caught:
        _checked(entries, template)
    assert (caught.value.field, caught.value.limit) == ("key-column", "id")


@pytest.mark.parametrize("digits", ["2030", "20300131", "1900000000", "9" * 5_000])
def test_a_column_of_due_times_has_no_years_dates_or_seconds(digits: str) -> None:
    options = Template("t", {}, {"deliver_at": "at"}, {}).options
    with pytest.raises(InvalidArgument) as caught:
        deliver_at_ms(options(InputLine(2, b"{}", {"at": digits}))["deliver_at"])
    assert caught.value.field == "deliver_at"


def test_the_first_entry_is_not_lost() -> None:
    template = Template("t", {}, {"key": "id"}, {})
    entries = [InputLine(2, b"{}", {"id": "1"}), InputLine(3, b"{}", {"id": "2"})]
    assert list(_checked(iter(entries), template)) == entries
    assert list(_checked(iter([]), template)) == []


def test_what_ends_the_input_is_an_error_in_its_place_where_others_were_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "LINE_BYTES_MAX", 3)
    template = Template("t", {}, {}, {})

    def entries(text: bytes) -> list[InputLine]:
        lines = inputs.counted(io.BytesIO(text), lambda size: None)
        return list(_checked(inputs.from_lines(lines), template))

    sent, wrong = entries(b"ab\nabcd\nab\n")
    assert (sent.body, sent.error, wrong.line) == (b"ab", None, 2)
    assert wrong.error is not None
    assert "line 2 is longer than 3 bytes" in wrong.error.message
    with pytest.raises(InvalidArgument):  # nothing was sent
        entries(b"abcd\nab\n")


@pytest.mark.parametrize("value", [1_900_000_000_000, "1900000000000", "2030-03-17T17:46:40Z"])
def test_a_column_says_when_as_the_option_does(value: object) -> None:
    template = Template("t", {}, {"deliver_at": "due"}, {})
    moment = template.options(InputLine(1, b"{}", {"due": value}))["deliver_at"]
    assert moment is not None
    assert deliver_at_ms(moment) == 1_900_000_000_000


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("true", "true"),
        (True, "true"),
        (9_007_199_254_740_993, "9007199254740993"),
        (1.5, "1.5"),
        ({"a": ["ä", None]}, '{"a": ["ä", null]}'),
    ],
)
def test_a_column_that_is_no_text_is_told_as_json_writes_it(value: object, key: str) -> None:
    template = Template("t", {}, {"key": "id"}, {})
    assert template.options(InputLine(1, b"{}", {"id": value}))["key"] == key


def test_the_same_failure_is_printed_a_few_times_only(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(Output(False), quiet=True, verb="sent")
    for number in range(100):
        tally.fail({}, f"message {number}", Internal("broken"))
    tally.sum_up()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == FAILURES_SHOWN_MAX + 2
    assert lines[0] == "duemq: message 0 not sent: broken"
    assert lines[-1].startswith("0 sent, 100 not in ")
