"""Printing: for people, or as JSON Lines for programs.

With `--json` everything goes to standard output as one object a line, errors as `{"error": …}`.
Without, results go to standard output, and errors and progress to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from duemq.descriptions import MissingBroker
from duemq.errors import DuemqError

Row = Mapping[str, Any]

PIPE_COLUMNS = 1_000


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
            click.echo(text)

    def note(self, text: str) -> None:
        """A remark for people."""
        if not self.as_json:
            click.echo(text, err=True)

    def table(self, columns: Sequence[str], rows: Iterable[Row], *, empty: str) -> None:
        """Rows with the same columns; `empty` is said to people when there are none."""
        if self.as_json:
            for row in rows:
                click.echo(as_json(row))
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column.replace("_", " "), overflow="fold")
        for row in rows:
            table.add_row(*(shown(row[column]) for column in columns))
        if table.row_count:
            # Folded to the terminal's width; into a pipe or file a line a row.
            width = None if sys.stdout.isatty() else PIPE_COLUMNS
            Console(file=sys.stdout, highlight=False, width=width).print(table)
        else:
            self.note(empty)

    def missing(self, brokers: Iterable[MissingBroker]) -> None:
        """Brokers whose part of what was printed is not there."""
        for broker in brokers:
            if self.as_json:
                click.echo(as_json({"missing": broker.name, "error": broker.error}))
            else:
                click.echo(
                    f"duemq: incomplete, no answer of {broker.name}: {broker.error}", err=True
                )

    def error(self, error: Exception | str) -> None:
        """A failure, in one line."""
        if self.as_json:
            click.echo(as_json({"error": error_fields(error)}))
        else:
            click.echo(f"duemq: {one_line(error)}", err=True)


    def interrupted(self, text: str) -> None:
        """Ctrl-C; `text` says what is left."""
        if self.as_json:
            click.echo(as_json({"error": {"code": "INTERRUPTED", "message": text}}))
        else:
            click.echo(f"duemq: {text}", err=True)


def as_json(row: Row) -> str:
    """One line of JSON."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str)


def one_line(error: Exception | str) -> str:
    """The error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def error_fields(error: Exception | str) -> dict[str, Any]:
    """An error as an object: `code`, `message` and what was wrong, where known."""
    if not isinstance(error, DuemqError):
        return {"code": "FAILED", "message": one_line(error)}
    fields: dict[str, Any] = {"code": error.code.name, "message": error.message}
    named = {"field": error.field, "value": error.value, "limit": error.limit}
    return fields | {name: value for name, value in named.items() if value}


def shown(value: Any) -> str:
    """A table cell for people."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return str(value)


def duration(ms: int) -> str:
    """A length of time as people read it."""
    if ms < 1_000:
        return f"{ms} ms"
    seconds = ms // 1_000
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 10 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def exact_duration(ms: int) -> str:
    """A length of time as the command line takes it: `90s`, `2h`."""
    for unit, length in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % length == 0:
            return f"{ms // length}{unit}"
    return f"{ms}ms"


def local_time(epoch_ms: int) -> str:
    """Epoch milliseconds as people read them, in the local time zone."""
    if not epoch_ms:
        return "-"
    moment = datetime.fromtimestamp(epoch_ms / 1000).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")
