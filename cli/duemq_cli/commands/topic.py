"""`duemq topic`: making, listing, looking at and deleting topics."""

from __future__ import annotations

import click

from duemq import Admin
from duemq.descriptions import TopicSummary
from duemq.errors import DuemqError, TopicExists
from duemq.protocol.limits import QUEUES_MAX
from duemq_cli import completion
from duemq_cli.commands import purge
from duemq_cli.exits import Exit
from duemq_cli.output import one_line
from duemq_cli.session import (
    Session,
    confirmed,
    if_not_exists_option,
    known,
    pass_session,
    session_options,
    yes_option,
)
from duemq_cli.text import local_time


@click.group()
def topic() -> None:
    """Topics: named streams of messages, spread over queues on all brokers."""


@topic.command()
@click.argument("name")
@click.option(
    "--queues",
    type=click.IntRange(0, QUEUES_MAX),
    default=0,
    help="On each broker; 0: the broker's default.",
)
@click.option(
    "--message-bytes-max",
    type=click.IntRange(0),
    default=0,
    help="Largest body; 0: the broker's default.",
)
@click.option("--broker", "brokers", multiple=True, help="Only on this one; may be repeated.")
@if_not_exists_option
@session_options
@pass_session
def create(
    session: Session,
    /,
    name: str,
    queues: int,
    message_bytes_max: int,
    brokers: tuple[str, ...],
    if_not_exists: bool,
) -> None:
    """Make the topic NAME on every broker.  Brokers make topics by themselves at the first send.

    One that is lost gets no queues, which the answer shows by its brokers: say the same again when
    it is back.  The exit code is 1 if no broker lacks the topic.  With --if-not-exists it is 0
    then, and what is there is printed: it is not changed.

    With --json: topic, queues, message_bytes_max, brokers.

    \b
    Examples:
      duemq topic create orders --queues 8
      duemq topic create ledger --queues 1 --broker broker-0      all messages in one order
    """
    session.changes()
    with session.admin() as admin:
        try:
            made = admin.create_topic(
                name, queues=queues, message_bytes_max=message_bytes_max, brokers=brokers or None
            )
        except TopicExists:
            there = _there(admin, name) if if_not_exists else None
            if there is None:
                raise
            made = there
    row = {
        "topic": made.name,
        "queues": made.queues,
        "message_bytes_max": made.message_bytes_max,
        "brokers": made.brokers,
    }
    where = ", ".join(made.brokers)
    session.output.record(row, f"topic {made.name}: {made.queues} queues on {where}")


def _there(admin: Admin, name: str) -> TopicSummary | None:
    found, _ = known(lambda: admin.topics(system=True))
    return next((each for each in found if each.name == name), None)


@topic.command("list")
@click.option("--system", is_flag=True, help="With those of DueMQ itself, such as %TIMER%.")
@session_options
@pass_session
def list_topics(session: Session, /, system: bool) -> Exit:
    """List all topics.

    The exit code is 5 if a broker is away: it may have others.  With --json: topic, queues,
    message_bytes_max (0: up to the brokers), brokers; and {missing_brokers}.
    """
    with session.admin() as admin:
        found, missing = known(lambda: admin.topics(system=system))
    rows = (
        {
            "topic": each.name,
            "queues": each.queues,
            "message_bytes_max": each.message_bytes_max or (0 if session.output.as_json else None),
            "brokers": each.brokers,
        }
        for each in found
    )
    session.output.table(
        ("topic", "queues", "message_bytes_max", "brokers"),
        rows,
        empty="no topics yet",
        missing=missing,
    )
    return Exit.PARTIAL if missing else Exit.OK


@topic.command()
@click.argument("name", shell_complete=completion.topics)
@session_options
@pass_session
def show(session: Session, /, name: str) -> Exit:
    """Show NAME queue by queue: what it holds, what comes in, when the last message came.

    Rates are those of the last minute.  The exit code is 5 if a broker is away: its queues are not
    in there.  With --json, a line a queue: topic, broker, queue, min_offset, max_offset, in_per_s,
    last_store_ms; and {missing_brokers}, [{broker, error}].

    \b
    Examples:
      duemq topic show orders
      duemq topic show '%DLQ%billing'               the dead letters of a group
    """
    with session.admin() as admin:
        found = admin.describe_topic(name)
    output = session.output
    limit = (
        f"{found.message_bytes_max:,} bytes" if found.message_bytes_max else "the broker's limit"
    )
    output.line(
        f"{found.name}: {found.messages:,} messages, {found.in_per_s:,.1f} a second, the last one"
        f" {local_time(found.last_store_ms or 0)}, bodies up to {limit}"
    )
    last = "last_store_ms" if output.as_json else "last_stored"
    rows = (
        {
            "topic": found.name,
            "broker": queue.broker,
            "queue": queue.queue,
            "min_offset": queue.min_offset,
            "max_offset": queue.max_offset,
            "in_per_s": round(queue.in_per_s, 1),
            last: queue.last_store_ms if output.as_json else local_time(queue.last_store_ms or 0),
        }
        for queue in found.queues
    )
    columns = ("broker", "queue", "min_offset", "max_offset", "in_per_s", last)
    output.table(columns, rows, empty="no queues")
    output.missing(found.missing)
    return Exit.PARTIAL if found.missing else Exit.OK


@topic.command()
@click.argument("name", shell_complete=completion.topics)
@yes_option
@session_options
@pass_session
def delete(session: Session, /, name: str, yes: bool) -> Exit:
    """Delete NAME and its messages on every broker.

    Delayed messages that are pending of it are kept, and wait for it: how many is said, and what
    can be done.  The exit code is 5 if a broker is away: delete it again when that is back.  With
    --json: topic, deleted, pending (delayed messages; null: not known); and {missing_brokers}.
    """
    if not confirmed(session, f"Delete topic {name} and its messages?", yes=yes):
        return Exit.FAILED
    session.changes()
    with session.admin() as admin:
        _, missing = known(lambda: admin.delete_topic(name))
        pending, unknown = _pending(admin, name)
    row = {"topic": name, "deleted": True, "pending": None if unknown else pending}
    session.output.record(row, f"topic {name} deleted")
    if pending:
        session.output.note(
            f"{pending:,}{' or more' if unknown else ''} delayed messages wait for it:"
            f" `duemq timer move --topic {name} --to-topic TOPIC` lets them go elsewhere (those"
            f" with a timer key stay), `duemq timer cancel --topic {name} --all` cancels them"
        )
    elif unknown:
        session.output.note(f"whether delayed messages wait for it is not known: {unknown}")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


def _pending(admin: Admin, name: str) -> tuple[int, str]:
    """How many delayed messages are known to wait for the topic; why there may be more."""
    try:
        counts, missing = known(lambda: admin.count_timers(name))
    except DuemqError as error:
        return 0, one_line(error)
    unknown = ", ".join(f"no answer of {each.name}: {each.error}" for each in missing)
    return sum(each.pending for each in counts), unknown


topic.add_command(purge.topic)
