"""Printing: for people, or as JSON Lines for programs.

With `--json` everything goes to standard output as one object a line, errors as `{"error": …}`.
Without, results go to standard output, and errors and progress to standard error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from duemq.errors import DuemqError, InvalidArgument, MissingBroker, PartialAnswer
from duemq_cli import text as texts
from duemq_cli.streams import writes_utf8

Row = Mapping[str, Any]
# The field in front of what is wrong with it; elsewhere what can be no word of English.
_FIELD = re.compile(r"^[a-z_]+(?=: )|(?<![\w'])[a-z]+(?:_[a-z]+)+(?![\w'])")


class Output:
    """Prints results and errors in one of the two forms."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def record(self, row: Row, text: str) -> None:
        """One result: `row` for programs, `text` for people."""
        click.echo(as_json(row) if self.as_json else text)

    def line(self, text: str) -> None:
        """A part of the result that only people need."""
        if not self.as_json:
            click.echo(texts.printable(text))

    def note(self, text: str) -> None:
        """A remark for people."""
        if not self.as_json:
            click.echo(text, err=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Row],
        *,
        empty: str,
        missing: Sequence[MissingBroker] = (),
    ) -> None:
        """Rows with the same columns, and whose are not there.

        `empty` is said to people when there are none, and nobody is missing who may have some.
        """
        if self.as_json:
            for row in rows:
                click.echo(as_json(row))
        elif cells := [[row[column] for column in columns] for row in rows]:
            click.echo("\n".join(texts.table(columns, cells)))
        elif not missing:
            self.note(empty)
        self.missing(missing)

    def say_if_more(self, more: bool, limit: int) -> None:
        """That what was printed ends at a limit: to programs, too, beside their lines."""
        if more:
            click.echo(f"there are more than {limit}: raise --limit, or choose", err=True)

    def missing(self, brokers: Sequence[MissingBroker]) -> None:
        """Brokers whose part of what was printed is not there."""
        if self.as_json and brokers:
            named = [{"broker": each.name, "error": each.error} for each in brokers]
            click.echo(as_json({"missing_brokers": named}))
            return
        for broker in brokers:
            click.echo(f"duemq: incomplete, no answer of {broker.name}: {broker.error}", err=True)

    def warn_missing(self, brokers: Sequence[MissingBroker]) -> None:
        """As `missing`, before the answer begins; to people only."""
        if not self.as_json:
            self.missing(brokers)

    def error(self, error: Exception | str) -> None:
        """A failure, in one line."""
        if isinstance(error, PartialAnswer) and error.partial is not None:
            self.missing(error.missing)  # the rest is printed
        elif self.as_json:
            click.echo(as_json({"error": error_fields(error)}))
        else:
            click.echo(f"duemq: {one_line(error)}", err=True)

    def interrupted(self, text: str) -> None:
        """Ctrl-C; `text` says what is left."""
        if self.as_json:
            click.echo(as_json({"error": {"code": "INTERRUPTED", "message": text}}))
        else:
            click.echo(f"duemq: {text}", err=True)


def in_words_of(command: click.Command | None, error: DuemqError) -> DuemqError:
    """A wrong value's error names the option that was typed, where it has the request's field.

    That stays the error's `field`, which programs go by.
    """
    if command is None or not isinstance(error, InvalidArgument):
        return error
    options = [each for each in command.params if isinstance(each, click.Option)]

    def word(found: re.Match[str]) -> str:
        plain = found[0].removesuffix("_ms")
        names = {found[0], plain, plain.removeprefix("retry_")}
        written = (each.opts[-1] for each in options if names & _names_of(each))
        return next(written, found[0])

    message = _FIELD.sub(word, error.message)
    return InvalidArgument(message, field=error.field, value=error.value, limit=error.limit)


def _names_of(option: click.Option) -> set[str]:
    """What the request may call it."""
    return {option.name or "", option.opts[-1].lstrip("-").replace("-", "_")}


def as_json(row: Row) -> str:
    """One line of JSON."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str)
    if writes_utf8(text):
        return text
    return json.dumps(row, separators=(",", ":"), default=str)


def one_line(error: Exception | str) -> str:
    """The error's message in one line."""
    return texts.printable(" ".join(str(error).split())) or type(error).__name__


def error_fields(error: Exception | str) -> dict[str, Any]:
    """An error as an object: `code`, `message` and what was wrong, where known."""
    if not isinstance(error, DuemqError):
        return {"code": "FAILED", "message": one_line(error)}
    fields: dict[str, Any] = {"code": error.code.name, "message": error.message}
    named = {"field": error.field, "value": error.value, "limit": error.limit}
    return fields | {name: value for name, value in named.items() if value}
