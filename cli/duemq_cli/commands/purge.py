"""`duemq topic purge` and `duemq dlq purge`: messages taken away."""

from __future__ import annotations

from collections.abc import Callable

import click

from duemq import Admin
from duemq.descriptions import PurgedQueue
from duemq_cli import completion
from duemq_cli.commands.offsets import dry_run_option
from duemq_cli.exits import Exit
from duemq_cli.session import Session, confirmed, known, pass_session, session_options, yes_option

_Purge = Callable[[Admin, bool], list[PurgedQueue]]


@click.command("purge")
@click.argument("name", shell_complete=completion.topics)
@dry_run_option
@yes_option
@session_options
@pass_session
def topic(session: Session, /, name: str, dry_run: bool, yes: bool) -> Exit:
    """Take all messages of the topic NAME away, for every group; what comes from now on stays.

    Offsets go on, and groups with them.  The space comes back with the brokers' retention.  The
    exit code is 5 if a broker is away: purge again when it is back.  With --json, a line a queue:
    topic, broker, queue, offset (the first that is left), messages, dry_run; and {missing_brokers}.

    \b
    Examples:
      duemq topic purge orders --dry-run
      duemq topic purge orders --yes
    """
    return _purge(
        session,
        f"topic {name}",
        lambda admin, dry: admin.purge_topic(name, dry_run=dry),
        dry_run=dry_run,
        yes=yes,
    )


@click.command("purge")
@click.argument("group", shell_complete=completion.groups)
@dry_run_option
@yes_option
@session_options
@pass_session
def dead_letters(session: Session, /, group: str, dry_run: bool, yes: bool) -> Exit:
    """Take all dead letters of GROUP away.  What dies from now on stays.

    Prints and ends as `duemq topic purge`; the exit code is 4 if there is no such group.

    \b
    Example:
      duemq dlq purge billing --dry-run
    """
    return _purge(
        session,
        f"the dead letters of group {group}",
        lambda admin, dry: admin.purge_dead_letters(group, dry_run=dry),
        dry_run=dry_run,
        yes=yes,
    )


def _purge(session: Session, what: str, purge: _Purge, *, dry_run: bool, yes: bool) -> Exit:
    with session.admin() as admin:
        queues, missing = known(lambda: purge(admin, True))
        count = sum(each.messages for each in queues)
        if not dry_run:
            question = f"Purge {what}: {count:,} messages?"
            if not confirmed(session, question, yes=yes, missing=missing):
                return Exit.FAILED
            session.changes()
            queues, missing = known(lambda: purge(admin, False))
            count = sum(each.messages for each in queues)
    if session.json:
        session.output.table((), (_row(each, dry_run) for each in queues), empty="")
    else:
        session.output.line(f"{what}: {count:,} messages {'would go' if dry_run else 'purged'}")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


def _row(each: PurgedQueue, dry_run: bool) -> dict[str, object]:
    return {
        "topic": each.topic,
        "broker": each.broker,
        "queue": each.queue,
        "offset": each.offset,
        "messages": each.messages,
        "dry_run": dry_run,
    }
