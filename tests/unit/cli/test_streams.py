"""Standard streams that are closed, or have not all characters."""

import io
import json
import sys

import click
import pytest

from duemq_cli import streams
from duemq_cli.commands.tally import progress
from duemq_cli.output import Output, as_json
from duemq_cli.printing import MessagePrinter
from duemq_cli.session import Session, confirmed
from duemq_cli.text import printable


def test_where_standard_input_is_closed_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert confirmed(Session(), "Delete it?", yes=False)
    with pytest.raises(click.UsageError, match="input is closed"):
        streams.input_bytes()


def test_where_standard_error_is_closed_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress(Output(False), "orders", 1, of_bytes=False) as advance:
        advance(1)


def test_messages_are_not_consumed_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.UsageError, match="output is closed"):
        MessagePrinter(Output(False), raw=False)


@pytest.mark.parametrize("text", ["ü…", "a\udcff"], ids=ascii)
def test_json_is_json_whatever_standard_output_writes(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    line = as_json({"value": text})
    assert line.isascii()
    assert json.loads(line) == {"value": text}


def test_bytes_that_are_no_text_are_written_out_for_people() -> None:
    assert printable("a\udcff") == "a\\udcff"
