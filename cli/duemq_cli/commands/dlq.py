"""`duemq dlq`: the messages that a group has given up, and sending them again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from duemq import Admin, DuemqError, Receipt
from duemq.administering.letters.resending import Letter, target_of
from duemq.errors import MissingBroker, PartialAnswer, TopicNotFound
from duemq.protocol.names import dead_letter_topic
from duemq_cli import completion, interrupts
from duemq_cli.commands import purge
from duemq_cli.commands.tally import Tally, progress, quiet_option
from duemq_cli.exits import Exit
from duemq_cli.output import one_line
from duemq_cli.printing import message_fields
from duemq_cli.session import Session, known, pass_session, session_options
from duemq_cli.streams import is_terminal
from duemq_cli.text import body_text, local_time, printable
from duemq_cli.times import moment

BODY_CHARACTERS_SHOWN = 2_000

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def dlq() -> None:
    """Dead letters: messages that a group could not process.  List them, send them again."""


def _selection(command: F) -> F:
    """The options by which dead letters are chosen."""
    options = [
        click.option("--id", "message_id", metavar="ID", help="The one with this message id."),
        click.option("--key", help="Those with this key."),
        click.option(
            "--since", metavar="TIME", callback=moment(), help="Those that died then or later."
        ),
        click.option("--until", metavar="TIME", callback=moment(), help="Those that died before."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _limit(default: int | None) -> Callable[[F], F]:
    return click.option(
        "--limit",
        type=click.IntRange(1),
        default=default,
        show_default=default is not None,
        help="At most so many, those first that died first.",
    )


@dlq.command("list")
@click.argument("group", shell_complete=completion.groups)
@_selection
@click.option("--all", "everything", is_flag=True, help="Those, too, that were sent again.")
@_limit(100)
@session_options
@pass_session
def list_letters(
    session: Session, /, group: str, everything: bool, limit: int, **wanted: Any
) -> Exit:
    """List the dead letters of GROUP that were not sent again, by the time they died.

    TIME is RFC 3339 with a time zone, epoch milliseconds, or how long ago: -1h, -2d.  The exit code
    is 4 if there is no such group, or no letter with this --id; 5 if a broker is away, after the
    letters of the others.  With --json, a line a letter: as of `duemq consume`, without body and
    properties, and group, deliveries, resent, first_failed_ms, last_failed_ms, error, origin
    {topic, broker, queue, offset}.

    \b
    Examples:
      duemq dlq list billing
      duemq dlq list billing --since -1h --key 4711
    """
    output = session.output
    with session.admin() as admin:
        # One that is named is shown whatever became of it.
        resent = None if everything or wanted["message_id"] else False
        letters = admin.dead_letters(group, limit=limit + 1, resent=resent, **wanted)
        found, away = _taken(letters)
    if session.json:
        output.table((), (_fields(group, each, body=False) for each in found[:limit]), empty="")
    else:
        columns = ("died", "id", "topic", "key", "tag", "deliveries", "resent", "error")
        output.table(columns, map(_row, found[:limit]), empty="no dead letters")
    output.say_if_more(len(found) > limit, limit)
    if away is not None:
        raise away
    return Exit.NOT_FOUND if wanted["message_id"] and not found else Exit.OK


@dlq.command()
@click.argument("group", shell_complete=completion.groups)
@_selection
@_limit(10)
@session_options
@pass_session
def show(session: Session, /, group: str, limit: int, **wanted: Any) -> Exit:
    """Show dead letters of GROUP whole: why and when they died, where they lay, their body.

    Options and exit codes as of `duemq dlq list`.  With --json, lines as there, with body (or
    body_base64) and properties.

    \b
    Example:
      duemq dlq show billing --id 5f0c…
    """
    with session.admin() as admin:
        found, away = _taken(admin.dead_letters(group, limit=limit + 1, **wanted))
    for letter in found[:limit]:
        session.output.record(_fields(group, letter), "\n".join(_story(letter)))
    if not found:
        session.output.note("no such dead letter")
    session.output.say_if_more(len(found) > limit, limit)
    if away is not None:
        raise away
    return Exit.NOT_FOUND if wanted["message_id"] and not found else Exit.OK


@dlq.command()
@click.argument("group", shell_complete=completion.groups)
@_selection
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--new", is_flag=True, help="Of these, only those that were not sent again.")
@_limit(None)
@click.option(
    "--to",
    "to_topic",
    metavar="TOPIC",
    shell_complete=completion.topics,
    help="Where to; without, where each was sent to first.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be sent again.")
@quiet_option
@session_options
@pass_session
def resend(
    session: Session,
    /,
    group: str,
    everything: bool,
    new: bool,
    to_topic: str | None,
    dry_run: bool,
    quiet: bool,
    **wanted: Any,
) -> Exit:
    """Send dead letters of GROUP again: one, those of a key, those of a time, or all.

    Each becomes a new message with the body, key, tag, ordering key and properties of the dead one,
    and the property duemq-dead-letter-id, its id.  All groups of the topic receive it.  Dead
    letters stay until retention or `duemq dlq purge` takes them, and are marked: what is sent again
    twice is there twice, unless --new says so.  What dies meanwhile is left for the next time.
    Ctrl-C and SIGTERM end it when what is under way is marked.

    The exit code is 1 if one could not be sent, 4 if there is no such group or letter, 5 if a
    broker is away: its letters are left.  With --json, a line a letter: dead_letter_id, group,
    died_ms, and message_id, topic, broker, queue, offset of the new one, or error; in a dry run
    topic only.

    \b
    Examples:
      duemq dlq resend billing --id 5f0c…
      duemq dlq resend billing --since 2026-03-01T10:00:00Z --until -5m --dry-run
      duemq dlq resend billing --all --to orders-repaired
    """
    chosen = [wanted[name] for name in ("message_id", "key", "since", "until")]
    if everything == any(value is not None for value in chosen):
        raise click.UsageError("Choose by --id, --key, --since, --until, or say --all.")
    output = session.output
    wanted["resent"] = False if new else None
    quiet = quiet or (not session.json and not wanted["message_id"] and is_terminal(sys.stdout))
    tally = Tally(output, quiet=quiet and not dry_run, verb="sent again")
    sent = _Sent(tally, group)
    session.interruption.left = lambda: str(tally)
    with (
        interrupts.handled(signal.SIGTERM, _interrupt),
        session.traced(),
        session.admin() as admin,
    ):
        if dry_run:
            missing = sent.would(admin.dead_letters(group, **wanted), to_topic)
            output.note(f"{tally.done:,} would be sent again")
        else:
            total = _total(admin, group, wanted["limit"]) if everything else wanted["limit"]
            with progress(output, group, total, of_bytes=False) as advance:

                def on_sent(letter: Letter, outcome: Receipt | DuemqError) -> None:
                    sent.note(letter, outcome)
                    advance(1)

                session.interruption.left = lambda: (
                    f"{tally}; some more may be, which --new leaves out"
                )
                _, missing = known(
                    lambda: admin.resend_dead_letters(
                        group, to_topic=to_topic, on_sent=on_sent, **wanted
                    )
                )
            tally.sum_up()
            if not (tally.done or tally.failed or missing):
                output.note("no such dead letter")
    output.missing(missing)
    if tally.failed:
        return Exit.FAILED
    if missing:
        return Exit.PARTIAL
    return Exit.NOT_FOUND if wanted["message_id"] and not tally.done else Exit.OK


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler: what is under way is marked first, as after Ctrl-C."""
    raise KeyboardInterrupt


class _Sent:
    """Prints what becomes of each letter."""

    def __init__(self, tally: Tally, group: str) -> None:
        self._tally = tally
        self._group = group

    def would(self, letters: Iterator[Letter], to_topic: str | None) -> tuple[MissingBroker, ...]:
        """A dry run; answers the brokers that are away."""
        try:
            for letter in letters:
                try:
                    topic = target_of(letter, to_topic)
                except DuemqError as error:
                    self._tally.fail(self._named(letter), letter.message_id, error)
                    continue
                row = {**self._named(letter), "topic": topic}
                self._tally.add(row, f"{printable(letter.message_id)}  → {topic}")
        except PartialAnswer as error:
            return error.missing
        return ()

    def note(self, letter: Letter, outcome: Receipt | DuemqError) -> None:
        """It was sent again, or not."""
        if isinstance(outcome, DuemqError):
            self._tally.fail(self._named(letter), letter.message_id, outcome)
            return
        place = {
            "message_id": outcome.message_id,
            "topic": outcome.topic,
            "broker": outcome.broker,
            "queue": outcome.queue,
            "offset": outcome.offset,
        }
        where = f"{outcome.topic} {outcome.broker}/{outcome.queue} @ {outcome.offset}"
        line = f"{printable(letter.message_id)}  → {where}  {outcome.message_id}"
        self._tally.add({**self._named(letter), **place}, line)

    def _named(self, letter: Letter) -> dict[str, Any]:
        return {
            "dead_letter_id": letter.message_id,
            "group": self._group,
            "died_ms": letter.store_ms,
        }


def _taken(letters: Iterator[Letter]) -> tuple[list[Letter], DuemqError | None]:
    """What came, and what ended it before all had come."""
    found: list[Letter] = []
    try:
        for letter in letters:
            found.append(letter)  # noqa: PERF402  # kept when the next one fails
    except DuemqError as error:
        if not found:
            raise
        return found, error
    return found, None


def _total(admin: Admin, group: str, limit: int | None) -> int | None:
    """How many dead letters there are now, for a progress bar."""
    try:
        count = admin.describe_topic(dead_letter_topic(group)).messages
    except TopicNotFound:
        return None
    return count if limit is None else min(count, limit)


def _row(letter: Letter) -> dict[str, Any]:
    return {
        "died": local_time(letter.store_ms),
        "id": letter.message_id,
        "topic": letter.topic,
        "key": letter.key,
        "tag": letter.tag,
        "deliveries": letter.deliveries,
        "resent": "yes" if letter.resent else None,
        "error": letter.retry.error if letter.retry else None,
    }


def _fields(group: str, letter: Letter, *, body: bool = True) -> dict[str, Any]:
    """A dead letter as `--json` prints it."""
    fields = message_fields(letter)
    for name in () if body else ("body", "body_base64", "properties"):
        fields.pop(name, None)
    story = letter.retry
    fields |= {"group": group, "deliveries": letter.deliveries, "resent": letter.resent}
    if story is not None:
        fields |= {
            "first_failed_ms": story.first_failed_ms,
            "last_failed_ms": story.last_failed_ms,
            "error": story.error,
            "origin": {
                "topic": story.origin_topic,
                "broker": story.origin_broker,
                "queue": story.origin_queue,
                "offset": story.origin_offset,
            },
        }
    return fields


def _story(letter: Letter) -> Iterator[str]:
    """A dead letter for people."""
    yield printable(letter.message_id)
    named = {"key": letter.key, "tag": letter.tag, "ordering key": letter.ordering_key}
    for name, value in named.items():
        if value:
            yield f"  {name:<13} {printable(value)}"
    story = letter.retry
    if story is not None:
        place = f"{story.origin_broker}/{story.origin_queue} @ {story.origin_offset}"
        yield f"  {'sent to':<13} {story.origin_topic}  {place}"
        yield f"  {'failed first':<13} {local_time(story.first_failed_ms)}"
        died = local_time(story.last_failed_ms)
        yield f"  {'died':<13} {died}, delivered {letter.deliveries} times"
        yield f"  {'because':<13} {one_line(story.error) if story.error else '-'}"
    if letter.resent:
        yield f"  {'sent again':<13} yes"
    yield f"  {'dead letter':<13} {letter.broker}/{letter.queue} @ {letter.offset}"
    for name, value in letter.properties.items():
        yield f"  {'property':<13} {printable(name)} = {printable(value)}"
    body = body_text(letter.body)
    more = f" … ({len(letter.body):,} bytes)" if len(body) > BODY_CHARACTERS_SHOWN else ""
    yield f"  {'body':<13} {body[:BODY_CHARACTERS_SHOWN]}{more}"


dlq.add_command(purge.dead_letters)
