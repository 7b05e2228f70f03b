"""`duemq consume`: a member of a group that prints what it receives."""

from __future__ import annotations

import base64
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

import click

from duemq import Message, PushConsumer
from duemq.cli.exits import Exit
from duemq.cli.output import Output, local_time
from duemq.cli.session import Session, pass_session, session_options
from duemq.consumer.settings import StartFrom
from duemq.errors import DuemqError


@click.command()
@click.argument("topic")
@click.option("--group", required=True, help="Members of a group share the topic's queues.")
@click.option(
    "--from",
    "start_from",
    type=click.Choice(["earliest", "latest"]),
    default="latest",
    show_default=True,
    help="Where a group begins that was never here; otherwise it goes on where it was.",
)
@click.option("--tag", metavar="'A || B'", help="Only messages with one of these tags.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--idle-timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="End when nothing came for S seconds.",
)
@session_options
@pass_session
def consume(
    session: Session,
    topic: str,
    group: str,
    start_from: StartFrom,
    tag: str | None,
    count: int | None,
    idle_timeout: float | None,
) -> Exit:
    """Receive messages of TOPIC as a member of a group, until Ctrl-C, --count or --idle-timeout.

    What was printed is committed: the group goes on after it.  With --json each message is
    message_id, topic, broker, queue, offset, key, tag, body, attempt, born_ms, store_ms, due_ms,
    properties; a body that is not UTF-8 text is in body_base64, and body is null.

    \b
    Examples:
      duemq consume greetings --group me --from earliest
      duemq consume greetings --group me --tag 'en || de' --count 10 --idle-timeout 5 --json
    """
    printer = _Printer(session.output, count)
    consumer = PushConsumer(
        group,
        {topic: tag},
        printer.receive,
        start_from=start_from,
        threads=1,
        nameserver=session.nameserver,
    )
    before = {n: signal.signal(n, printer.interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with session.traced(), consumer:
            threading.Thread(target=printer.follow, args=(consumer,), daemon=True).start()
            printer.wait(idle_timeout)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if printer.failure is not None:
        raise printer.failure
    if count is not None and printer.printed < count:
        session.output.note(f"{printer.printed} of {count} messages came")
    return Exit.OK


class _EnoughError(Exception):
    """Refuses a message that is not wanted any more, so that it is not committed."""


class _Printer:
    """Prints messages; knows when it is enough.  `receive` runs in the consumer's one thread."""

    def __init__(self, output: Output, count: int | None) -> None:
        self.printed = 0
        self.failure: OSError | DuemqError | None = None
        self._output = output
        self._count = count
        self._last = time.monotonic()
        self._end = threading.Event()

    def receive(self, message: Message) -> None:
        """The callback."""
        if self._end.is_set():
            raise _EnoughError
        try:
            self._output.record(message_fields(message), _line(message))
        except OSError as error:  # the reader of our output is gone
            self.failure = error
            self._finish()
            raise
        self.printed += 1
        self._last = time.monotonic()
        if self.printed == self._count:
            self._finish()

    def follow(self, consumer: PushConsumer) -> None:
        """Thread: notes what ends the consumer, if not we."""
        try:
            consumer.run()
        except DuemqError as error:
            self.failure = error
        self._finish()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._finish()

    def wait(self, idle_timeout: float | None) -> None:
        """Until it is enough, or nothing came for `idle_timeout` seconds."""
        self._last = time.monotonic()
        while not self._end.is_set():
            left = None if idle_timeout is None else self._last + idle_timeout - time.monotonic()
            if left is not None and left <= 0:
                self._finish()
            else:
                self._end.wait(left)

    def _finish(self) -> None:
        # From here on messages are refused on purpose: that is not worth a warning.
        logging.getLogger("duemq.consumer").setLevel(logging.CRITICAL)
        self._end.set()


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
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = base64.b64encode(message.body).decode()
    return fields


def _line(message: Message) -> str:
    body = message.body.decode(errors="backslashreplace")
    place = f"{message.broker}/{message.queue} @ {message.offset}"
    named = " ".join(
        f"{name}={value}" for name, value in (("key", message.key), ("tag", message.tag)) if value
    )
    return f"{local_time(message.store_ms)}  {place}  {named}{'  ' if named else ''}{body}"
