"""Messages, printed: a line each for people, an object each for programs, or the bodies alone."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from duemq import Message
from duemq_cli.output import Output
from duemq_cli.streams import is_terminal
from duemq_cli.text import body_text, local_time, printable

F = TypeVar("F", bound=Callable[..., Any])


def raw_option(command: F) -> F:
    """Adds `--raw`."""
    return click.option(
        "--raw",
        is_flag=True,
        help="Print bodies alone, byte for byte, a newline after each; not to a terminal.",
    )(command)


class MessagePrinter:
    """Prints messages in one of the forms."""

    def __init__(self, output: Output, raw: bool) -> None:
        """Raises UsageError where --raw would write what a stranger sent to a terminal, and where
        there is nowhere to print."""
        if raw and output.as_json:
            raise click.UsageError("--raw and --json exclude each other")
        if sys.stdout is None:  # what nobody can have seen must not count as consumed
            raise click.UsageError("standard output is closed: nothing could be printed")
        if raw and is_terminal(sys.stdout):
            raise click.UsageError("--raw writes bytes as they are: not to a terminal")
        self._output = output
        self._raw = raw

    def print(self, message: Message) -> None:
        """Raises OSError if nobody reads."""
        if self._raw:
            click.echo(message.body)
        else:
            self._output.record(message_fields(message), message_line(message))


def message_fields(message: Message) -> dict[str, Any]:
    """A message as `--json` prints it."""
    fields: dict[str, Any] = {
        "message_id": message.message_id,
        "topic": message.topic,
        "broker": message.broker,
        "queue": message.queue,
        "offset": message.offset,
        "key": message.key,
        "tag": message.tag,
        "body": None,
        "attempt": message.attempt,
        "born_ms": message.born_ms,
        "store_ms": message.store_ms,
        "due_ms": message.due_ms,
        "properties": dict(message.properties),
    }
    if message.timer_key is not None:
        fields["timer_key"] = message.timer_key
    if message.retry is not None:
        fields["retry"] = message.retry._asdict()
    return fields | body_fields(message.body)


def body_fields(body: bytes) -> dict[str, str | None]:
    """A body as `--json` prints it: one that is no UTF-8 text is in body_base64, and body null."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": base64.b64encode(body).decode()}


def message_line(message: Message) -> str:
    """A message as people read it."""
    place = f"{message.broker}/{message.queue} @ {message.offset}"
    again = message.attempt if message.deliveries else None
    notes = {"key": message.key, "tag": message.tag, "attempt": again}
    named = " ".join(f"{name}={printable(str(value))}" for name, value in notes.items() if value)
    body = body_text(message.body)
    return f"{local_time(message.store_ms)}  {place}  {named}{'  ' if named else ''}{body}"
