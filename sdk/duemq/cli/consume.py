"""`duemq consume`: a member of a group that prints what it receives."""

from __future__ import annotations

import base64
import logging
import signal
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import click

from duemq import Message, PushConsumer, Sql
from duemq.cli.exits import Exit
from duemq.cli.output import Output, local_time
from duemq.cli.seconds import Seconds
from duemq.cli.session import Session, pass_session, session_options
from duemq.consumer.outcomes import NotTaken
from duemq.consumer.settings import Order, StartFrom
from duemq.errors import DuemqError
from duemq.moments import epoch_ms


@click.command()
@click.argument("topic")
@click.option("--group", required=True, help="Members of a group share the topic's queues.")
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|TIME",
    default="latest",
    show_default=True,
    help="Where a group begins that was never here; otherwise it goes on where it was.",
)
@click.option("--tag", metavar="'A || B'", help="Only messages with one of these tags.")
@click.option("--sql", metavar="EXPR", help="Only messages whose properties fulfil this condition.")
@click.option(
    "--order",
    type=click.Choice(["queue", "key"]),
    help="One message of a queue, or of an ordering key, at a time; a failure holds it up.",
)
@click.option("--broadcast", is_flag=True, help="Get all messages, whatever the others get.")
@click.option(
    "--member",
    metavar="NAME",
    help="A name that keeps its queues while its process restarts; with --broadcast, its place.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--idle-timeout",
    type=Seconds(0, 31_536_000, min_open=True),
    metavar="S",
    help="End when nothing came for S seconds.",
)
@session_options
@pass_session
def consume(
    session: Session,
    topic: str,
    group: str,
    start: str,
    tag: str | None,
    sql: str | None,
    order: Order | None,
    broadcast: bool,
    member: str | None,
    count: int | None,
    idle_timeout: float | None,
) -> Exit:
    """Receive messages of TOPIC as a member of a group, until Ctrl-C, --count or --idle-timeout.

    What was printed is committed: the group goes on after it.  TIME is RFC 3339 with a time zone,
    epoch milliseconds, or how long ago: -1h, -2d.

    With --json each message is message_id, topic, broker, queue, offset, key, tag, body, attempt,
    born_ms, store_ms, due_ms, properties; a body that is not UTF-8 text is in body_base64, and body
    is null.  A message that the group had sent back has retry: origin_topic, origin_broker,
    origin_queue, origin_offset, first_failed_ms, last_failed_ms, error, group; its broker, queue
    and offset are those of %RETRY%GROUP.

    \b
    Examples:
      duemq consume greetings --group me --from earliest
      duemq consume greetings --group me --tag 'en || de' --count 10 --idle-timeout 5 --json
      duemq consume orders --group audit --from -1h --sql "price > 10 AND region IN ('eu', 'us')"
    """
    if tag is not None and sql is not None:
        raise click.UsageError("--tag and --sql exclude each other")
    printer = _Printer(session.output, count)
    consumer = PushConsumer(
        group,
        {topic: tag if sql is None else Sql(sql)},
        printer.receive,
        order=order,
        broadcast=broadcast,
        member_name=member,
        start_from=_start_of(start),
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


def _start_of(text: str) -> StartFrom:
    ends: dict[str, StartFrom] = {"earliest": "earliest", "latest": "latest"}
    return ends.get(text) or epoch_ms(text, round(time.time() * 1000), "--from")


class _Printer:
    """Prints messages; knows when it is enough.  `receive` runs in the consumer's one thread."""

    def __init__(self, output: Output, count: int | None) -> None:
        self.printed = 0
        self.failure: OSError | DuemqError | None = None
        self._output = output
        self._count = count
        self._last = time.monotonic()
        self._ended = False
        # Not an Event: a signal may come in its `wait` while that holds the lock that `set` takes.
        self._woken: SimpleQueue[None] = SimpleQueue()

    def receive(self, message: Message) -> None:
        """The callback."""
        if self._ended:
            raise NotTaken
        try:
            self._output.record(message_fields(message), _line(message))
        except OSError as error:  # the reader of our output is gone
            self.failure = error
            self._finish()
            raise NotTaken from error
        self.printed += 1
        self._last = time.monotonic()
        if self.printed == self._count:
            self._finish()

    def follow(self, consumer: PushConsumer) -> None:
        """Thread: notes what ends the consumer, if not we."""
        try:
            consumer.run()
        except (DuemqError, OSError) as error:
            self.failure = error
        self._finish()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._finish()

    def wait(self, idle_timeout: float | None) -> None:
        """Until it is enough, or nothing came for `idle_timeout` seconds."""
        self._last = time.monotonic()
        while not self._ended:
            left = None if idle_timeout is None else self._last + idle_timeout - time.monotonic()
            if left is not None and left <= 0:
                self._finish()
            else:
                with suppress(Empty):
                    self._woken.get(timeout=left)

    def _finish(self) -> None:
        # From here on messages are refused on purpose: that is not worth a warning.
        logging.getLogger("duemq.consumer").setLevel(logging.CRITICAL)
        self._ended = True
        self._woken.put(None)


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
    if message.retry is not None:
        fields["retry"] = message.retry._asdict()
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = base64.b64encode(message.body).decode()
    return fields


def _line(message: Message) -> str:
    body = message.body.decode(errors="backslashreplace")
    place = f"{message.broker}/{message.queue} @ {message.offset}"
    again = message.attempt if message.deliveries else None
    notes = {"key": message.key, "tag": message.tag, "attempt": again}
    named = " ".join(f"{name}={value}" for name, value in notes.items() if value)
    return f"{local_time(message.store_ms)}  {place}  {named}{'  ' if named else ''}{body}"
