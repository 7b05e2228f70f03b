"""`duemq tail`: the end of a topic, without a group."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import click

from duemq import Message, PullConsumer, Sql
from duemq.descriptions import TopicDescription
from duemq.errors import (
    MissingBroker,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
)
from duemq.protocol.balance import MessageQueue
from duemq_cli import completion
from duemq_cli.exits import Exit
from duemq_cli.printing import MessagePrinter, raw_option
from duemq_cli.session import Session, pass_session, session_options

LINES_DEFAULT = 10
LINES_MAX = 100_000
# Read beyond those wanted before they are sorted out: of each queue as many are read.
SORTED_EACH = 1_000
POLL_S = 0.2
# A broker that sends nothing for so long before the end of its queues is away.
SILENCE_S_MAX = 10.0
# Between two looks for queues that are new; what they hold is printed from their first message on.
LOOK_EVERY_S = 5.0


@click.command()
@click.argument("topic", shell_complete=completion.topics)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, LINES_MAX),
    default=LINES_DEFAULT,
    show_default=True,
    metavar="N",
    help="The last N messages.",
)
@click.option("-f", "--follow", is_flag=True, help="Then print what comes, until Ctrl-C.")
@click.option("--tag", metavar="'A || B'", help="Of these, those with one of these tags.")
@click.option("--sql", metavar="EXPR", help="Of these, those that fulfil this condition.")
@raw_option
@session_options
@pass_session
def tail(
    session: Session,
    /,
    topic: str,
    lines: int,
    follow: bool,
    tag: str | None,
    sql: str | None,
    raw: bool,
) -> Exit:
    """Print the last messages of TOPIC, by the time they were stored, and with -f what comes.

    No group: nothing is committed, nobody gets less for it.  Prints as `duemq consume`.  The exit
    code is 5 if a broker is away: what it holds is not in there; 130 after Ctrl-C.

    \b
    Examples:
      duemq tail orders
      duemq tail orders -n 100 --json
      duemq tail orders -n 0 -f --sql "price > 10"
    """
    if tag is not None and sql is not None:
        raise click.UsageError("--tag and --sql exclude each other")
    printer = MessagePrinter(session.output, raw)
    with session.admin() as admin:
        found = admin.describe_topic(topic)
    reader = _Reader(session, printer, found, (tag or "") if sql is None else Sql(sql))
    session.interruption.left = lambda: f"{reader.printed:,} messages printed"
    with reader.consumer:
        missing = (*found.missing, *reader.print_last(lines))
        session.output.missing(missing)
        if follow:
            reader.follow(missing)
    return Exit.PARTIAL if missing else Exit.OK


class _Reader:
    """Reads all queues of a topic from near their ends."""

    def __init__(
        self, session: Session, printer: MessagePrinter, found: TopicDescription, wanted: str | Sql
    ) -> None:
        self.printed = 0
        self.consumer = PullConsumer(
            nameserver=session.nameserver, settings=session.consumer_settings()
        )
        self._session = session
        self._printer = printer
        self._topic = found.name
        self._wanted = wanted
        self._ends = {MessageQueue(found.name, q.broker, q.queue): q for q in found.queues}
        # Also of queues that are left out, while their brokers are away.
        self._known: dict[MessageQueue, int] = {}

    def print_last(self, lines: int) -> tuple[MissingBroker, ...]:
        """The last messages of all queues.  Answers the brokers that went silent meanwhile."""
        ends = {queue: end.max_offset for queue, end in self._ends.items()}
        self._read_from(
            {q: max(end.min_offset, end.max_offset - lines) for q, end in self._ends.items()}
        )
        last: list[Message] = []
        deadline = time.monotonic() + SILENCE_S_MAX
        while behind := [queue for queue in ends if self.consumer.position(queue) < ends[queue]]:
            for message in self._kept():
                if message.offset < ends[_queue_of(message)]:
                    last.append(message)
                deadline = time.monotonic() + SILENCE_S_MAX
            if len(last) > 2 * lines + SORTED_EACH:
                last = _newest(last, lines)
            if time.monotonic() > deadline:
                break
        self._print(_newest(last, lines))
        silent = sorted({queue.broker for queue in behind})
        return tuple(MissingBroker(broker, "it went silent") for broker in silent)

    def _kept(self) -> Sequence[Message]:
        """What comes next; where retention was faster it goes on behind that."""
        try:
            return self.consumer.poll(POLL_S)
        except OffsetOutOfRange:
            self.go_on()
            return ()

    def follow(self, missing: Iterable[MissingBroker]) -> None:
        """What comes after the ends, until somebody interrupts."""
        told = {each.name for each in missing}
        self._read_from({queue: end.max_offset for queue, end in self._ends.items()})
        look_at = time.monotonic() + LOOK_EVERY_S
        while True:
            try:
                self._print(self.consumer.poll(LOOK_EVERY_S))
            except TopicReplaced as error:
                self._session.output.note(f"{error}; goes on with that one")
                for queue, offset in self._positions().items():
                    self.consumer.seek(queue, offset)
            except OffsetOutOfRange as error:  # retention was faster
                self._session.output.note(f"{error}; goes on with what is there")
                self.go_on()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + LOOK_EVERY_S
            with suppress(TopicNotFound, QueueNotFound, Unavailable):  # it is tried again
                self._read_new(self.consumer.queues(self._topic))
            away = self.consumer.missing
            self._session.output.missing([each for each in away if each.name not in told])
            told = {each.name for each in away}

    def _read_new(self, there: Collection[MessageQueue]) -> None:
        """Reads the queues that have come, too, and of the others those that are there now.

        No others can be assigned: their brokers would be asked.
        """
        if self.consumer.assignment.issuperset(there):
            return
        self._known |= self._positions()
        self._read_from({queue: self._known.get(queue, 0) for queue in there})

    def _read_from(self, starts: Mapping[MessageQueue, int]) -> None:
        # From the ends first, so that nothing is pulled that is not wanted.
        self.consumer.assign(list(starts), filter=self._wanted, start_from="latest")
        for queue, offset in starts.items():
            self.consumer.seek(queue, offset)

    def _positions(self) -> dict[MessageQueue, int]:
        return {queue: self.consumer.position(queue) for queue in self.consumer.assignment}

    def go_on(self) -> None:
        """Goes on within what the queues have now; where a broker is away, as it was."""
        with self._session.admin() as admin:
            now = {(q.broker, q.queue): q for q in admin.describe_topic(self._topic).queues}
        for queue, position in self._positions().items():
            found = now.get((queue.broker, queue.queue_id))
            if found is not None:
                position = min(max(position, found.min_offset), found.max_offset)
            self.consumer.seek(queue, position)

    def _print(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._printer.print(message)
            self.printed += 1


def _queue_of(message: Message) -> MessageQueue:
    return MessageQueue(message.stored_topic, message.broker, message.queue)


def _newest(messages: list[Message], count: int) -> list[Message]:
    """By the time they were stored."""
    messages.sort(key=lambda each: (each.store_ms, each.broker, each.queue, each.offset))
    return messages[max(0, len(messages) - count) :]
