"""`duemq group reset|skip|clone`: where groups go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from duemq import Admin
from duemq.descriptions import OffsetChange
from duemq.protocol import checks
from duemq_cli import completion
from duemq_cli.exits import Exit
from duemq_cli.session import Session, confirmed, known, pass_session, session_options, yes_option
from duemq_cli.times import moment

F = TypeVar("F", bound=Callable[..., Any])


def dry_run_option(command: F) -> F:
    """Adds `--dry-run`."""
    return click.option("--dry-run", is_flag=True, help="Only print what would change.")(command)


@click.command()
@click.argument("name", shell_complete=completion.groups)
@click.option("--topic", required=True, shell_complete=completion.topics, help="Whose queues.")
@click.option(
    "--to",
    metavar="earliest|latest|TIME",
    callback=moment("earliest", "latest"),
    help="An end, or a time: the first message stored then or later.",
)
@click.option("--offset", type=click.IntRange(0), help="In place of --to.")
@click.option("--queue", "queues", metavar="BROKER/N", multiple=True, help="Only these queues.")
@dry_run_option
@yes_option
@session_options
@pass_session
def reset(
    session: Session,
    /,
    name: str,
    topic: str,
    to: str | None,
    offset: int | None,
    queues: tuple[str, ...],
    dry_run: bool,
    yes: bool,
) -> Exit:
    """Move the group NAME to another place in a topic: back to read again, or on to skip.

    Members need not stop: they lose the queues and go on from the new place within about a second.
    What they have in hand at that moment they may finish.  Other queues are not disturbed.  TIME is
    RFC 3339 with a time zone, epoch milliseconds, or how long ago: -1h, -2d, -1h30m.

    While a broker is away nothing is moved (exit code 3), unless --queue names others; a dry run
    shows what the others know (exit code 5).  With --json, a line a queue: group, topic, broker,
    queue, before, after, min_offset, max_offset, dry_run; and {missing_brokers}.

    \b
    Examples:
      duemq group reset billing --topic orders --to earliest --dry-run
      duemq group reset billing --topic orders --to -1h
      duemq group reset billing --topic orders --to 2030-01-01T06:00:00+01:00
      duemq group reset billing --topic orders --offset 4711 --queue broker-0/2
    """
    if (to is None) == (offset is None):
        raise click.UsageError("Give one of --to and --offset.")
    places = [_place(text) for text in queues] or None

    def move(admin: Admin, dry: bool) -> list[OffsetChange]:
        return admin.reset_offsets(name, topic, to, offset=offset, queues=places, dry_run=dry)

    return _move(session, name, move, dry_run=dry_run, yes=yes)


@click.command()
@click.argument("name", shell_complete=completion.groups)
@click.option(
    "--topic",
    shell_complete=completion.topics,
    help="Only this one; otherwise all that the group has read.",
)
@dry_run_option
@yes_option
@session_options
@pass_session
def skip(session: Session, /, name: str, topic: str | None, dry_run: bool, yes: bool) -> Exit:
    """Skip what waits for the group NAME: it goes on with what is sent from now on.

    Its retries still come.  Otherwise as `duemq group reset --to latest`.

    \b
    Example:
      duemq group skip billing --topic orders --dry-run
    """
    return _move(
        session,
        name,
        lambda admin, dry: admin.skip_backlog(name, topic, dry_run=dry),
        dry_run=dry_run,
        yes=yes,
    )


@click.command()
@click.argument("name", shell_complete=completion.groups)
@click.argument("to_name")
@click.option("--topic", shell_complete=completion.topics, help="Only this one.")
@dry_run_option
@yes_option
@session_options
@pass_session
def clone(
    session: Session, /, name: str, to_name: str, topic: str | None, dry_run: bool, yes: bool
) -> Exit:
    """Give the group TO_NAME the offsets of the group NAME, so that it goes on where that one is.

    What NAME has sent back is not taken along: TO_NAME gets those messages too where they lie past
    the offset.  Prints as `duemq group reset`.

    \b
    Example:
      duemq group clone billing billing-v2
    """
    return _move(
        session,
        to_name,
        lambda admin, dry: admin.clone_offsets(name, to_name, topic, dry_run=dry),
        dry_run=dry_run,
        yes=yes,
    )


def _move(
    session: Session,
    name: str,
    move: Callable[[Admin, bool], list[OffsetChange]],
    *,
    dry_run: bool,
    yes: bool,
) -> Exit:
    """Prints what changes; asks before it does where somebody can answer."""
    with session.admin() as admin:
        planned, missing = known(lambda: move(admin, True))
        if dry_run:
            _print_changes(session, name, planned, dry_run=True)
            session.output.missing(missing)
            return Exit.PARTIAL if missing else Exit.OK
        if not session.json:
            _print_changes(session, name, planned, dry_run=True)
        if not confirmed(session, f"Move group {name} so?", yes=yes, missing=missing):
            return Exit.FAILED
        session.changes()
        done = move(admin, False)
    if session.json:
        _print_changes(session, name, done, dry_run=False)
    else:
        session.output.note(f"group {name} moved in {len(done)} queues")
    return Exit.OK


def _print_changes(
    session: Session, name: str, changes: list[OffsetChange], *, dry_run: bool
) -> None:
    rows = (
        {
            "group": name,
            "topic": each.topic,
            "broker": each.broker,
            "queue": each.queue,
            "before": each.before,
            "after": each.after,
            "change": None if each.before is None else f"{each.after - each.before:+,}",
            "min_offset": each.min_offset,
            "max_offset": each.max_offset,
            "dry_run": dry_run,
        }
        for each in changes
    )
    columns = (
        *("topic", "broker", "queue", "before", "after", "change"),
        *("min_offset", "max_offset"),
    )
    if session.json:
        plain = ({key: value for key, value in row.items() if key != "change"} for row in rows)
        session.output.table(columns, plain, empty="")
    else:
        session.output.table(columns, rows, empty="nothing to change")


def _place(text: str) -> tuple[str, int]:
    broker, slash, queue = text.rpartition("/")
    if not slash or not broker or not (queue.isascii() and queue.isdecimal()):
        raise checks.wrong("queue", text, "BROKER/N, such as broker-0/2")
    return broker, int(queue)
