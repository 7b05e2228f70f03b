"""`duemq consume`: a member of a group that prints what it receives."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

import click

from duemq import Message, PushConsumer, Sql
from duemq.consumer.settings import Order, StartFrom
from duemq.errors import DuemqError, TopicNotFound
from duemq.outcomes import NotTaken
from duemq.protocol.moments import epoch_ms
from duemq_cli import completion, interrupts
from duemq_cli.exits import Exit
from duemq_cli.interrupts import WAIT_S_MAX
from duemq_cli.printing import MessagePrinter, raw_option
from duemq_cli.session import Session, pass_session, session_options
from duemq_cli.times import Seconds, moment

_LOG = logging.getLogger("duemq.consumer")


@click.command()
@click.argument("topic", shell_complete=completion.topics)
@click.option(
    "--group",
    required=True,
    shell_complete=completion.groups,
    help="Members of a group share the topic's queues.",
)
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|TIME",
    callback=moment("earliest", "latest"),
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
    "member_name",
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
@raw_option
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
    member_name: str | None,
    count: int | None,
    idle_timeout: float | None,
    raw: bool,
) -> Exit:
    """Receive messages of TOPIC as a member of a group, until Ctrl-C, --count or --idle-timeout.

    What was printed is committed: the group goes on after it.  TIME is RFC 3339 with a time zone,
    epoch milliseconds, or how long ago: -1h, -2d.  To look without a group: `duemq tail`.

    A topic that is not there is waited for.

    The exit code is 130 after Ctrl-C, 4 if there was no such topic at the end, 5 if it ended while
    a broker of the topic was away.  With --json each message is message_id, topic, broker, queue,
    offset, key, tag, body, attempt, born_ms, store_ms, due_ms, properties; a body that is not UTF-8
    text is in body_base64, and body is null.  One that was delayed under a timer_key has that.  A
    message that the group had sent back has retry: origin_topic, origin_broker, origin_queue,
    origin_offset, first_failed_ms, last_failed_ms, error, group; its broker, queue and offset are
    those of %RETRY%GROUP.

    \b
    Examples:
      duemq consume greetings --group me --from earliest
      duemq consume greetings --group me --tag 'en || de' --count 10 --idle-timeout 5 --json
      duemq consume orders --group audit --from -1h --sql "price > 10 AND region IN ('eu', 'us')"
    """
    if tag is not None and sql is not None:
        raise click.UsageError("--tag and --sql exclude each other")
    printer = _Printer(MessagePrinter(session.output, raw), count)
    session.interruption.left = lambda: printer.left(group)
    consumer = PushConsumer(
        group,
        {topic: tag if sql is None else Sql(sql)},
        printer.receive,
        order=order,
        broadcast=broadcast,
        member_name=member_name,
        start_from=_start_of(start),
        threads=1,
        nameserver=session.nameserver,
        settings=session.consumer_settings(),
    )
    with (
        _log_as_it_was(),
        interrupts.handled(signal.SIGTERM, printer.interrupt),
        session.traced(),
        _closing(consumer, printer),
    ):
        session.output.warn_missing(consumer.missing)
        _say_if_absent(session, topic)
        threading.Thread(target=printer.follow, args=(consumer,), daemon=True).start()
        printer.wait(idle_timeout)
    if printer.failure is not None:
        raise printer.failure
    if count is not None and printer.printed < count:
        session.output.note(f"{printer.printed} of {count} messages came")
    if printer.printed == count:
        return Exit.OK
    missing = session.missing(topic)
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


def _say_if_absent(session: Session, topic: str) -> None:
    try:
        session.missing(topic)
    except TopicNotFound as error:
        session.output.note(f"{error.message} yet: it is waited for")


@contextmanager
def _log_as_it_was() -> Iterator[None]:
    """`_Printer` silences it at its end."""
    level = _LOG.level
    try:
        yield
    finally:
        _LOG.setLevel(level)


@contextmanager
def _closing(consumer: PushConsumer, printer: _Printer) -> Iterator[None]:
    """`printer` knows that it is closed before Ctrl-C, which may have ended it, is heard of."""
    try:
        consumer.start()
    except KeyboardInterrupt:  # it has closed; messages may have come before it could tell
        printer.closed = printer.printed > 0 and printer.failure is None
        raise
    try:
        yield
    finally:
        consumer.close()
        printer.closed = printer.failure is None


def _start_of(text: str) -> StartFrom:
    ends: dict[str, StartFrom] = {"earliest": "earliest", "latest": "latest"}
    return ends.get(text) or epoch_ms(text, round(time.time() * 1000), "--from")


class _Printer:
    """Prints messages; knows when it is enough.  `receive` runs in the consumer's one thread."""

    def __init__(self, messages: MessagePrinter, count: int | None) -> None:
        self.printed = 0
        self.failure: OSError | DuemqError | None = None
        self.closed = False
        """What was printed is committed, and the group left."""
        self._messages = messages
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
            self._messages.print(message)
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
        try:
            while not self._ended:
                left = WAIT_S_MAX
                if idle_timeout is not None:
                    left = min(left, self._last + idle_timeout - time.monotonic())
                if left <= 0:
                    self._finish()
                else:
                    with suppress(Empty):
                        self._woken.get(timeout=left)
        finally:
            self._finish()  # also if Ctrl-C ends it: nothing more is printed

    def left(self, group: str) -> str:
        """After Ctrl-C."""
        count = f"{self.printed:,} messages printed"
        if self.closed:
            return f"{count} and committed, group {group} left"
        return f"{count}; group {group} was not told: the last of them may come again"

    def _finish(self) -> None:
        if not self._ended:
            # From here on messages are refused on purpose: that is not worth a warning.
            _LOG.setLevel(logging.CRITICAL)
        self._ended = True
        self._woken.put(None)
