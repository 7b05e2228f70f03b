"""`duemq send`: messages from the command line, lines or a file."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import click

from duemq import Producer, SendOptions
from duemq.errors import DuemqError, InvalidArgument, TimerExists
from duemq.producing.receipt import PendingReceipt
from duemq.sent import Receipt
from duemq_cli import completion, inputs, times
from duemq_cli.commands.tally import Tally, progress, quiet_option
from duemq_cli.exits import Exit
from duemq_cli.inputs import InputLine
from duemq_cli.output import Output
from duemq_cli.session import Session, pass_session, session_options
from duemq_cli.streams import input_bytes, is_terminal
from duemq_cli.text import local_time

# Messages sent and not yet reported.  Bounds memory; large enough to keep the producer busy.
PENDING_MAX = 10_000

_FromColumn = Literal["key", "tag", "ordering_key", "delay", "deliver_at", "timer_key"]
_Sent = tuple[InputLine, PendingReceipt | DuemqError]


@dataclass(frozen=True)
class Template:
    """What the options say of every message: fixed values, and columns of the file."""

    topic: str
    fixed: SendOptions
    columns: dict[_FromColumn, str]
    properties: dict[str, str]

    @property
    def keyed(self) -> bool:
        """Messages have timer keys."""
        return self.fixed.get("timer_key") is not None or "timer_key" in self.columns

    def check(self, entry: InputLine) -> None:
        """Raises InvalidArgument if the first entry has not the columns that are named."""
        for name, column in self.columns.items():
            if entry.error is None and column not in entry.columns:
                raise self._no_column(name, column, entry)

    def options(self, entry: InputLine) -> SendOptions:
        """Of the entry's message; raises InvalidArgument."""
        options = self.fixed.copy()
        for name, column in self.columns.items():
            if column not in entry.columns:
                raise self._no_column(name, column, entry)
            value = entry.columns[column]
            if value in (None, ""):
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if name == "deliver_at" and text.isascii() and text.isdecimal():
                options[name] = times.epoch_milliseconds(text)
            else:
                options[name] = text
        if self.properties:
            options["properties"] = self.properties
        return options

    @staticmethod
    def _no_column(name: str, column: str, entry: InputLine) -> InvalidArgument:
        known = ", ".join(entry.columns) or "none"
        return InvalidArgument(
            f"line {entry.line}: there is no column {column!r}; there are: {known}",
            field=f"{name}-column",
            value=column,
            limit=known,
        )


@click.command()
@click.argument("topic", shell_complete=completion.topics)
@click.argument("body", required=False)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send each row of a .csv (as a JSON object) or each line of a .jsonl.",
)
@click.option("--key", help="For look-up.")
@click.option("--tag", help="For filtering by consumers.")
@click.option("--ordering-key", help="Messages of one ordering key go to one queue, in order.")
@click.option("--key-column", metavar="NAME", help="Take the key from this column of the file.")
@click.option("--tag-column", metavar="NAME", help="Take the tag from this column.")
@click.option("--ordering-key-column", metavar="NAME", help="Take the ordering key from it.")
@click.option("--delay-column", metavar="NAME", help="Take the delay from this column.")
@click.option("--at-column", metavar="NAME", help="Take the due time from this column.")
@click.option("--timer-key-column", metavar="NAME", help="Take the timer key from it.")
@click.option("--property", "properties", metavar="K=V", multiple=True, help="May be repeated.")
@click.option(
    "--delay", metavar="TIME", callback=times.delay, help="Deliver after 5s, 250ms, 1.5h …"
)
@click.option(
    "--at", metavar="RFC3339", callback=times.due_time, help="Deliver at 2030-01-31T09:00:00Z."
)
@click.option(
    "--delay-level",
    metavar="N",
    type=int,
    callback=times.delay_level,
    help="Deliver after the broker's level N.",
)
@click.option("--timer-key", metavar="KEY", help="Replace what waits in the topic under this key.")
@click.option("--if-absent", is_flag=True, help="Fail instead, if something waits under it.")
@quiet_option
@session_options
@pass_session
def send(
    session: Session,
    /,
    topic: str,
    body: str | None,
    file: Path | None,
    properties: tuple[str, ...],
    quiet: bool,
    **options: Any,
) -> Exit:
    """Send messages to TOPIC: BODY, standard input's lines (BODY is -), or a file.

    Answers when the messages are durable, in the order of the input: with --json message_id, topic,
    broker, queue, offset, or for a delayed one message_id, topic, handle, due_ms, and with a timer
    key replaced (a handle or null).  What could not be sent is printed with its error, the rest is
    sent, and the exit code is not 0; of what --if-absent refuses with handle and due_ms of what is
    there.  A column that the first row has not is one error, and nothing is sent.

    What a --file holds is summed up where standard output is a terminal, and with --quiet, which
    with --json ends in {summary: {done, failed, seconds}}.

    \b
    Examples:
      duemq send greetings "hello" --tag en
      duemq send reminders "stand up" --delay 45m
      duemq send reminders "pay order 17" --delay 2h --timer-key order-17
      duemq send orders --file orders.csv --key-column id --ordering-key-column customer
      tail -f app.log | duemq send logs -
    """
    _check_sources(body, file)
    template = _template(topic, options, properties)
    quiet = quiet or (file is not None and not session.json and is_terminal(sys.stdout))
    tally = Tally(session.output, quiet=quiet, verb="sent")
    sender = _Sender(tally, topic, keyed=template.keyed)
    session.interruption.left = sender.left
    # The producer comes first: a cluster that cannot be reached is said before anything is read.
    with (
        session.traced(),
        Producer(session.nameserver, settings=session.producer_settings()) as producer,
        sender,
        _opened(session.output, body, file) as entries,
    ):
        for entry in _checked(entries, template):
            if not sender.send(producer, template, entry):
                break
    tally.sum_up()
    return tally.exit


def _checked(entries: Iterator[InputLine], template: Template) -> Iterator[InputLine]:
    """The entries, once the first one is seen to have the columns.  Raises InvalidArgument."""
    first = next(entries, None)
    if first is None:
        return entries
    template.check(first)
    return chain((first,), _to_the_end(entries, first.line))


def _to_the_end(entries: Iterator[InputLine], line: int) -> Iterator[InputLine]:
    """What ends the input before its end is the last entry's error: others were sent."""
    try:
        for entry in entries:
            line = entry.line
            yield entry
    except InvalidArgument as error:
        yield InputLine(line + 1, error=error)


class _Sender:
    """Sends entries; a thread reports each, in the order of the input, when its answer is there.

    Who writes lines into our standard input may wait for the answer to one before the next.
    """

    def __init__(self, tally: Tally, topic: str, *, keyed: bool = False) -> None:
        """`keyed`: messages have timer keys."""
        self._tally = tally
        self._topic = topic
        self._keyed = keyed
        self._handed = 0
        self._pending: queue.Queue[_Sent | None] = queue.Queue(PENDING_MAX)
        self._failure: OSError | None = None
        # A daemon: Ctrl-C does not wait for what is not answered.
        self._reporter = threading.Thread(target=self._report_all, name="reporter", daemon=True)

    def __enter__(self) -> Self:
        self._reporter.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pending.put(None)
        self._reporter.join()
        if self._failure is not None:
            raise self._failure

    def send(self, producer: Producer, template: Template, entry: InputLine) -> bool:
        """Hands an entry to the producer; False when nobody reads our reports any more."""
        self._pending.put((entry, self._submit(producer, template, entry)))
        self._handed += 1
        return self._failure is None

    def left(self) -> str:
        """After Ctrl-C."""
        unknown = self._handed - self._tally.done - self._tally.failed
        rest = f"; {unknown:,} more have no answer yet: they may be stored" if unknown else ""
        return f"{self._tally}{rest}"

    def _submit(
        self, producer: Producer, template: Template, entry: InputLine
    ) -> PendingReceipt | DuemqError:
        if entry.error is not None:
            return entry.error
        try:
            return producer.submit(self._topic, entry.body, **template.options(entry))
        except DuemqError as error:
            return error

    def _report_all(self) -> None:
        while (sent := self._pending.get()) is not None:
            if self._failure is None:
                try:
                    self._report(*sent)
                except OSError as error:
                    self._failure = error

    def _report(self, entry: InputLine, pending: PendingReceipt | DuemqError) -> None:
        name = f"message {entry.line}"
        row: dict[str, Any] = {"topic": self._topic}
        if isinstance(pending, DuemqError):
            self._tally.fail(row | {"line": entry.line}, name, pending)
            return
        try:
            receipt = pending.result()
        except DuemqError as error:
            named = {"message_id": pending.message_id, "line": entry.line}
            if isinstance(error, TimerExists):
                named |= {"handle": error.handle, "due_ms": error.due_ms}
            self._tally.fail(row | named, name, error)
            return
        self._tally.add(*_receipt_row(receipt, keyed=self._keyed))


def _receipt_row(receipt: Receipt, *, keyed: bool) -> tuple[dict[str, Any], str]:
    """A receipt for programs and for people."""
    row: dict[str, Any] = {"message_id": receipt.message_id, "topic": receipt.topic}
    if receipt.handle is None:
        row |= {"broker": receipt.broker, "queue": receipt.queue, "offset": receipt.offset}
        place = f"{receipt.broker}/{receipt.queue} @ {receipt.offset}"
        return row, f"{receipt.message_id}  {place}"
    row |= {"handle": receipt.handle, "due_ms": receipt.due_ms}
    text = f"{receipt.message_id}  due {local_time(receipt.due_ms or 0)}  {receipt.handle}"
    if keyed:
        row["replaced"] = receipt.replaced
        text += f"  instead of {receipt.replaced}" if receipt.replaced else ""
    return row, text


def _check_sources(body: str | None, file: Path | None) -> None:
    if (body is None) == (file is None):
        raise click.UsageError("Give BODY, - for lines of standard input, or --file: one of them.")
    if file is not None and file.suffix.lower() not in (".csv", ".jsonl"):
        raise click.UsageError(f"--file must end in .csv or .jsonl, not {file.name!r}.")


def _template(topic: str, options: dict[str, Any], properties: tuple[str, ...]) -> Template:
    fixed: SendOptions = {
        "key": options["key"],
        "tag": options["tag"],
        "ordering_key": options["ordering_key"],
        "delay": options["delay"],
        "deliver_at": options["at"],
        "delay_level": options["delay_level"],
        "timer_key": options["timer_key"],
        "if_absent": options["if_absent"],
    }
    named: dict[_FromColumn, str | None] = {
        "key": options["key_column"],
        "tag": options["tag_column"],
        "ordering_key": options["ordering_key_column"],
        "delay": options["delay_column"],
        "deliver_at": options["at_column"],
        "timer_key": options["timer_key_column"],
    }
    columns = {argument: column for argument, column in named.items() if column is not None}
    due = [n for n in ("delay", "deliver_at", "delay_level") if fixed.get(n) is not None]
    due += [n for n in ("delay", "deliver_at") if n in columns]
    if len(due) > 1:
        raise click.UsageError("Give one of --delay, --at and --delay-level.")
    template = Template(topic, fixed, columns, named_properties(properties))
    if options["if_absent"] and not template.keyed:
        raise click.UsageError("--if-absent goes with --timer-key.")
    return template


def named_properties(pairs: tuple[str, ...]) -> dict[str, str]:
    """Of --property; raises UsageError."""
    properties = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--property must be NAME=VALUE, not {pair!r}.")
        properties[name] = value
    return properties


@contextmanager
def _opened(output: Output, body: str | None, file: Path | None) -> Iterator[Iterator[InputLine]]:
    if body == "-":
        yield inputs.from_lines(inputs.counted(input_bytes(), lambda size: None))
    elif file is not None:
        size = file.stat().st_size
        with (
            file.open("rb") as lines,
            progress(output, file.name, size, of_bytes=True) as advance,
        ):
            read = inputs.from_csv if file.suffix.lower() == ".csv" else inputs.from_jsonl
            yield read(inputs.counted(lines, advance))
    else:
        yield inputs.from_argument(body or "")
