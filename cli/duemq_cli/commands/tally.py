"""What becomes of many: a line each, or progress and a sum; failures that repeat are counted."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from duemq.errors import DuemqError
from duemq_cli.exits import Exit, exit_of
from duemq_cli.output import Output, as_json, error_fields, one_line
from duemq_cli.streams import is_terminal
from duemq_cli.text import printable

# To people, of failures with the same words; all are counted.
FAILURES_SHOWN_MAX = 10

F = TypeVar("F", bound=Callable[..., Any])


def quiet_option(command: F) -> F:
    """Adds `--quiet`."""
    return click.option(
        "--quiet",
        "-q",
        is_flag=True,
        help="Print failures and the sum only.",
    )(command)


class Tally:
    """Prints what was done and counts it.  Used by one thread."""

    def __init__(self, output: Output, *, quiet: bool, verb: str) -> None:
        """`verb`: "sent", "sent again"."""
        self.done = self.failed = 0
        self.exit = Exit.OK
        self._output = output
        self._quiet = quiet
        self._verb = verb
        self._kinds: Counter[str] = Counter()
        self._started = time.monotonic()

    def add(self, row: dict[str, Any], line: str) -> None:
        """One was done."""
        self.done += 1
        if not self._quiet:
            self._output.record(row, line)

    def fail(self, row: dict[str, Any], name: str, error: DuemqError) -> None:
        """One was not."""
        self.failed += 1
        self.exit = max(self.exit, exit_of(error))
        if self._output.as_json:
            click.echo(as_json({**row, "error": error_fields(error)}))
            return
        reason = one_line(error)
        kind = f"{type(error).__name__} {error.field}"
        self._kinds[kind] += 1
        if self._kinds[kind] <= FAILURES_SHOWN_MAX:
            click.echo(f"duemq: {printable(name)} not {self._verb}: {reason}", err=True)
        elif self._kinds[kind] == FAILURES_SHOWN_MAX + 1:
            click.echo("duemq: … more of that kind are counted only", err=True)

    def sum_up(self) -> None:
        """After the last one."""
        if self._quiet and self._output.as_json:
            counts = {"done": self.done, "failed": self.failed}
            click.echo(as_json({"summary": counts | {"seconds": self._seconds}}))
        elif self._quiet or self.done + self.failed > 1:
            self._output.note(f"{self} in {self._seconds:g} s")

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def __str__(self) -> str:
        return f"{self.done:,} {self._verb}, {self.failed:,} not"


@contextmanager
def progress(output: Output, name: str, total: int | None, *, of_bytes: bool) -> Iterator[Any]:
    """A bar on standard error, when that is a terminal; gives `advance(count)`."""
    if output.as_json or not is_terminal(sys.stderr):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        # Else rich would move what goes to a redirected standard output to standard error.
        redirect_stdout=is_terminal(sys.stdout),
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)
