"""`duemq timer`: delayed messages on their way."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import click

from duemq.descriptions import TimerCount, TimerDescription, TimerOwner, TimerState
from duemq.errors import DuemqError, MissingBroker, PartialAnswer
from duemq_cli import completion
from duemq_cli.commands.timer.changing import cancel, fire, move, reschedule, shift
from duemq_cli.commands.timer.holding import hold, holds, resume
from duemq_cli.commands.timer.prefixes import key_prefix_option
from duemq_cli.exits import Exit
from duemq_cli.histogram import COLUMNS, histogram_rows
from duemq_cli.session import Session, known, pass_session, session_options
from duemq_cli.text import body_text, local_time, printable
from duemq_cli.times import moment


@click.group()
def timer() -> None:
    """Delayed messages that are not due yet."""


timer.add_command(cancel)
timer.add_command(fire)
timer.add_command(reschedule)
timer.add_command(shift)
timer.add_command(move)
timer.add_command(hold)
timer.add_command(resume)
timer.add_command(holds)


@timer.command()
@click.option("--topic", shell_complete=completion.topics, help="Only this topic.")
@session_options
@pass_session
def count(session: Session, /, topic: str | None) -> Exit:
    """Count delayed messages, topic by topic, exactly.

    accepted = pending + fired + cancelled + replaced + dropped + lost, always; held are those of
    the pending ones that fell due and are kept back (duemq timer hold).  The exit code is 5 if a
    timer shard is away: its part is missing.  With --json, a line a topic: topic, pending,
    accepted, fired, cancelled, replaced, lost, held, dropped.  A topic "" stands for all beyond the
    4,096 that a shard counts one by one.

    \b
    Example:
      duemq timer count --topic orders
    """
    with session.admin() as admin:
        found, missing = known(lambda: admin.count_timers(topic))
    columns = [field.name for field in dataclasses.fields(TimerCount)]
    rows = map(dataclasses.asdict, found)
    session.output.table(columns, rows, empty="no delayed messages", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


@timer.command()
@click.option("--topic", shell_complete=completion.topics, help="Only this topic.")
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
        session.output.table((), map(dataclasses.asdict, found), empty="", missing=missing)
    else:
        rows = histogram_rows(found)
        session.output.table(COLUMNS, rows, empty="no delayed messages", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


@timer.command()
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True)
@session_options
@pass_session
def get(session: Session, /, handles: tuple[str, ...]) -> Exit:
    """Show what became of delayed messages: pending, held, fired, cancelled or unknown.

    Held: it fell due, and is kept back.  Of those that are pending or held all is shown.  The exit
    code is 0 only if all are; 3 if a timer shard is away, after what the others say.  With --json,
    a line a handle: handle, timer_key, topic, key, due_ms, state; of a pending one also tag,
    message_id, properties, and body, or body_base64 where it is not UTF-8 text.

    \b
    Example:
      duemq timer get dmq1AAECAwQFBgc…
    """
    found: list[TimerDescription] = []
    try:
        with session.admin() as admin:
            found = admin.get_timers(list(handles))
    except DuemqError as error:
        found = [error.answers[at] for at in sorted(error.answers)]
        raise
    finally:
        _show_timers(session, found)
    pending = all(each.state in (TimerState.PENDING, TimerState.HELD) for each in found)
    return Exit.OK if pending else Exit.FAILED


def _show_timers(session: Session, found: list[TimerDescription]) -> None:
    for each in found:
        shown = f"{each.state.value}  {local_time(each.due_ms)}  {each.handle}"
        if each.body is not None:
            shown += f"  {printable(each.topic or '')}  {body_text(each.body)}"
        session.output.record({**_timer_row(each), **_details(each)}, shown)


@timer.command("list")
@click.option("--topic", required=True, shell_complete=completion.topics, help="Of this topic.")
@key_prefix_option
@click.option("--from", "since", metavar="TIME", callback=moment(), help="Due then or later.")
@click.option("--to", "until", metavar="TIME", callback=moment(), help="Due before.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most.")
@session_options
@pass_session
def list_(session: Session, /, topic: str, key_prefix: str, limit: int, **times: Any) -> Exit:
    """List a topic's delayed messages that are pending, in due order.

    What is pending all the while is listed once.  The exit code is 5 if a timer shard is away: its
    part is missing.  With --json, a line each: handle, timer_key, topic, key, due_ms, state.

    \b
    Examples:
      duemq timer list --topic orders --limit 20
      duemq timer list --topic orders --key-prefix customer-7/ --to 2030-01-31T09:00:00Z
    """
    rows: list[dict[str, Any]] = []
    missing: tuple[MissingBroker, ...] = ()
    with session.admin() as admin:
        try:
            found = admin.list_timers(topic, key_prefix=key_prefix, limit=limit + 1, **times)
            rows.extend(map(_timer_row, found))
        except PartialAnswer as error:
            missing = error.missing
    if session.json:
        session.output.table((), rows[:limit], empty="", missing=missing)
    else:
        shown = ({**row, "due": local_time(row["due_ms"])} for row in rows[:limit])
        columns = ("due", "state", "timer_key", "key", "handle")
        session.output.table(columns, shown, empty="no delayed messages", missing=missing)
    session.output.say_if_more(len(rows) > limit, limit)
    return Exit.PARTIAL if missing else Exit.OK


def _timer_row(timer: TimerDescription) -> dict[str, Any]:
    return {
        "handle": timer.handle,
        "timer_key": timer.timer_key,
        "topic": timer.topic,
        "key": timer.key,
        "due_ms": timer.due_ms,
        "state": timer.state.value,
    }


def _details(timer: TimerDescription) -> dict[str, Any]:
    """What only a pending one that was asked for by its handle shows."""
    if timer.body is None:
        return {}
    try:
        body = {"body": timer.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": base64.b64encode(timer.body).decode()}
    named = {"tag": timer.tag, "message_id": timer.message_id}
    return {**named, "properties": dict(timer.properties), **body}


@timer.command()
@session_options
@pass_session
def owners(session: Session, /) -> Exit:
    """List who owns the queues of delayed messages, broker by broker.

    A queue belongs to the data directory of the timer service that claimed it first.  The exit code
    is 5 if a broker is away: its queues are not in there.  With --json, a line a queue: broker,
    queue, id, name, shard, shards, since_ms, last_seen_ms, released, refused, taken_over, waiting;
    and one with queue null for a service that has no queue there any more, and may hold what it
    took over before.
    """
    with session.admin() as admin:
        found, missing = known(admin.timer_owners)
    rows = [_owner_row(each) for each in found]
    columns = ("broker", "queue", "name", "shard", "seen", "waiting", "refused")
    if session.json:
        session.output.table((), rows, empty="", missing=missing)
    else:
        seen = [{**row, "seen": local_time(row["last_seen_ms"] or 0)} for row in rows]
        session.output.table(columns, seen, empty="no queues", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


def _owner_row(owner: TimerOwner) -> dict[str, Any]:
    row = {"broker": owner.broker, "queue": owner.queue_id, **dataclasses.asdict(owner)}
    del row["queue_id"]
    return row | {"id": f"{owner.id:016x}" if owner.id else ""}


@timer.command()
@click.argument("shard", type=click.IntRange(0))
@click.option("--accept-loss", is_flag=True, help="Do it; without, only say what would be lost.")
@session_options
@pass_session
def release(session: Session, /, shard: int, accept_loss: bool) -> Exit:
    """Give up the timer service of SHARD, because its data directory is lost.

    Its queues belong to that directory, and a service with another one is refused.  This lets the
    next one have them, and shuts the lost one out for good.  Lost is what the lost one had taken
    over and not delivered, and what no broker knows of: messages under timer keys, schedules, holds
    that no other shard has.  Without --accept-loss nothing is done, and the exit code is 1.  With
    --json, a line a queue, as of `duemq timer owners`.

    \b
    Example:
      duemq timer release 0 --accept-loss
    """
    with session.admin() as admin:
        if accept_loss:
            session.changes()
        owned, missing = known(lambda: admin.release_timer_shard(shard, dry_run=not accept_loss))
    for each in owned:
        session.output.record(_owner_row(each), _loss(each))
    session.output.missing(missing)
    session.output.note(
        "lost with its data directory, too: messages under timer keys, and schedules, that it kept;"
        " no broker knows of them"
    )
    if not accept_loss:
        session.output.note(
            "nothing was done.  If the data directory is lost, and not only away: stop the service"
            " that had it, wait a minute, and repeat this with --accept-loss"
        )
        return Exit.FAILED
    session.output.note("released: the next timer service of this shard gets these queues")
    return Exit.OK


def _loss(owner: TimerOwner) -> str:
    if owner.queue_id is None:
        return (
            f"{owner.broker}: {owner.name} (id {owner.id:016x}) has no queue any more; what it took"
            " over before and has not delivered is lost"
        )
    return (
        f"{owner.broker}, queue {owner.queue_id}: {owner.name} (id {owner.id:016x}) took"
        f" {owner.taken_over:,} delayed messages over; those it has not delivered are lost."
        f"  {owner.waiting:,} wait at the broker and go on"
    )
