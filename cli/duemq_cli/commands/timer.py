"""`duemq timer`: delayed messages on their way."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from duemq.descriptions import TimerCount, TimerOwner
from duemq_cli.exits import Exit
from duemq_cli.session import Session, known, pass_session, session_options
from duemq_cli.text import duration, local_time

BAR_CELLS = 40


@click.group()
def timer() -> None:
    """Delayed messages that are not due yet."""


@timer.command()
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True)
@session_options
@pass_session
def cancel(session: Session, handles: tuple[str, ...]) -> Exit:
    """Cancel delayed messages by the handles that `duemq send` printed.

    Answers cancelled (it will never be delivered), fired (too late) or unknown, a line a handle;
    the exit code is 0 only if all are cancelled.  With --json: handle, outcome.

    \b
    Example:
      duemq timer cancel dmq1AAECAwQFBgc…
    """
    session.changes()
    with session.admin() as admin:
        outcomes = [str(outcome.value) for outcome in admin.cancel(list(handles))]
    for handle, outcome in zip(handles, outcomes, strict=True):
        session.output.record({"handle": handle, "outcome": outcome}, f"{outcome}  {handle}")
    return Exit.OK if set(outcomes) == {"cancelled"} else Exit.FAILED


@timer.command()
@click.option("--topic", help="Only this topic.")
@session_options
@pass_session
def count(session: Session, /, topic: str | None) -> Exit:
    """Count delayed messages, topic by topic, exactly.

    accepted = pending + fired + cancelled + lost, always.  The exit code is 5 if a timer shard is
    away: its part is missing.  With --json, a line a topic: topic, pending, accepted, fired,
    cancelled, lost.  A topic "" stands for all beyond the 4,096 that a shard counts one by one.

    \b
    Example:
      duemq timer count --topic orders
    """
    with session.admin() as admin:
        found, missing = known(lambda: admin.count_timers(topic))
    columns = [field.name for field in dataclasses.fields(TimerCount)]
    session.output.table(columns, map(dataclasses.asdict, found), empty="no delayed messages")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


@timer.command()
@click.option("--topic", help="Only this topic.")
@session_options
@pass_session
def histogram(session: Session, /, topic: str | None) -> Exit:
    """Show how many delayed messages fall due when, exactly.

    What is overdue, then a day by minutes, a month by hours, and days; empty ones are left out.
    The exit code is 5 if a timer shard is away: its part is missing.  With --json, a line each:
    from_ms (0: overdue), to_ms, pending.

    \b
    Example:
      duemq timer histogram --topic orders
    """
    with session.admin() as admin:
        found, missing = known(lambda: admin.timer_histogram(topic))
    if session.json:
        session.output.table((), map(dataclasses.asdict, found), empty="")
    else:
        most = max((each.pending for each in found), default=1)
        rows = [
            {
                "due": local_time(each.from_ms) if each.from_ms else "overdue",
                "within": duration(each.to_ms - each.from_ms) if each.from_ms else "",
                "pending": each.pending,
                "share": "█" * max(1, round(each.pending / most * BAR_CELLS)),
            }
            for each in found
        ]
        columns = ("due", "within", "pending", "share")
        session.output.table(columns, rows, empty="no delayed messages")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


@timer.command()
@session_options
@pass_session
def owners(session: Session, /) -> Exit:
    """List who owns the queues of delayed messages, broker by broker.

    A queue belongs to the data directory of the timer service that claimed it first.  With --json,
    a line a queue: broker, queue, id, name, shard, shards, since_ms, last_seen_ms, released,
    refused, taken_over, waiting.
    """
    with session.admin() as admin:
        found, missing = known(admin.timer_owners)
    rows = [_owner_row(each) for each in found]
    columns = ("broker", "queue", "name", "shard", "seen", "waiting", "refused")
    if session.json:
        session.output.table((), rows, empty="")
    else:
        seen = [{**row, "seen": local_time(row["last_seen_ms"] or 0)} for row in rows]
        session.output.table(columns, seen, empty="no queues")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


def _owner_row(owner: TimerOwner) -> dict[str, Any]:
    row = dataclasses.asdict(owner)
    return {**row, "queue": row.pop("queue_id"), "id": f"{owner.id:016x}" if owner.id else ""}


@timer.command()
@click.argument("shard", type=click.IntRange(0))
@click.option("--accept-loss", is_flag=True, help="Do it; without, only say what would be lost.")
@session_options
@pass_session
def release(session: Session, /, shard: int, accept_loss: bool) -> Exit:
    """Give up the timer service of SHARD, because its data directory is lost.

    Its queues belong to that directory, and a service with another one is refused.  This lets the
    next one have them, and shuts the lost one out for good.  Lost is what the lost one had taken
    over and not delivered.  Without --accept-loss nothing is done, and the exit code is 1.  With
    --json, a line a queue, as of `duemq timer owners`.

    \b
    Example:
      duemq timer release 0 --accept-loss
    """
    with session.admin() as admin:
        found, missing = known(admin.timer_owners)
        owned = [each for each in found if each.id and each.shard == shard]
        if accept_loss or not owned:
            owned = admin.release_timer_shard(shard)
    for each in owned:
        session.output.record(_owner_row(each), _loss(each))
    session.output.missing(missing)
    if not accept_loss:
        session.output.note(
            "nothing was done.  If the data directory is lost, and not only away: stop the service"
            " that had it, wait a minute, and repeat this with --accept-loss"
        )
        return Exit.FAILED
    session.output.note("released: the next timer service of this shard gets these queues")
    return Exit.OK


def _loss(owner: TimerOwner) -> str:
    return (
        f"{owner.broker}, queue {owner.queue_id}: {owner.name} (id {owner.id:016x}) took"
        f" {owner.taken_over:,} delayed messages over; those it has not delivered are lost."
        f"  {owner.waiting:,} wait at the broker and go on"
    )
