"""`duemq message`: messages looked up, and the life of one."""

from __future__ import annotations

from typing import Any

import click

from duemq import Message
from duemq.administering.finding import LOOKUP_TIMEOUT_S
from duemq.administering.messages import LIMIT_MAX
from duemq.descriptions import MessageTrace
from duemq.protocol.names import is_dead_letter, is_retry
from duemq_cli import completion
from duemq_cli.exits import Exit
from duemq_cli.output import one_line
from duemq_cli.printing import message_fields
from duemq_cli.session import Session, pass_session, session_options
from duemq_cli.text import body_text, local_time, printable, shown
from duemq_cli.times import moment

BODY_CHARACTERS_SHOWN = 60


@click.group()
def message() -> None:
    """Messages: find them by key, id, time or offset, and see what became of one."""


@message.command()
@click.argument("topic", shell_complete=completion.topics)
@click.option("--key", help="With this key.")
@click.option("--id", "message_id", metavar="ID", help="With this message id.")
@click.option("--since", metavar="TIME", callback=moment(), help="Stored then or later.")
@click.option("--until", metavar="TIME", callback=moment(), help="Stored before.")
@click.option("--broker", help="Only on this broker.")
@click.option("--queue", type=click.IntRange(0), help="Only in the queues of this number.")
@click.option("--offset", type=click.IntRange(0), help="From there on, with --queue.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=64,
    show_default=True,
    help="At most so many.",
)
@session_options
@pass_session
def find(session: Session, /, topic: str, **wanted: Any) -> Exit:
    """Find messages of TOPIC that are kept, at all brokers; they are printed by store time.

    A key is found by an index.  An id that the SDK made is looked for around the time that it says,
    then, as any other id, in the whole log of the range: say --since where you can.  Of more than
    --limit, those first in their queues are printed.  TIME is RFC 3339 with a time zone, epoch
    milliseconds, or how long ago: -1h, -2d.

    The exit code is 4 if there is no such topic, or none with this --id; 5 if a broker is away, or
    did not answer to the end within --timeout (60 s).  With --json, lines as of `duemq consume`,
    and {missing_brokers}, [{broker, error}].

    \b
    Examples:
      duemq message find orders --key 4711
      duemq message find orders --id 5f0c…
      duemq message find orders --since -10m --limit 20
      duemq message find orders --broker broker-0 --queue 2 --offset 4711 --limit 1
      duemq message find '%DLQ%billing'
    """
    with session.admin() as admin:
        timeout_s = session.timeout_s or LOOKUP_TIMEOUT_S
        found = admin.find_messages(topic, timeout_s=timeout_s, **wanted)
    output = session.output
    if session.json:
        output.table((), map(message_fields, found.messages), empty="", missing=found.missing)
    else:
        columns, rows = ("stored", "place", "id", "key", "tag", "body"), map(_row, found.messages)
        output.table(columns, rows, empty="no such message is kept", missing=found.missing)
    output.say_if_more(found.more, wanted["limit"])
    if found.missing:
        return Exit.PARTIAL
    return Exit.NOT_FOUND if wanted["message_id"] and not found.messages else Exit.OK


def _row(each: Message) -> dict[str, Any]:
    body = body_text(each.body[: 4 * BODY_CHARACTERS_SHOWN])
    short = len(body) > BODY_CHARACTERS_SHOWN
    return {
        "stored": local_time(each.store_ms),
        "place": f"{each.broker}/{each.queue} @ {each.offset}",
        "id": each.message_id,
        "key": each.key,
        "tag": each.tag,
        "body": body[: BODY_CHARACTERS_SHOWN - 1] + "…" if short else body,
    }


@message.command()
@click.argument("topic", shell_complete=completion.topics)
@click.argument("message_id", metavar="ID")
@click.option(
    "--since",
    metavar="TIME",
    callback=moment(),
    help="It was not sent before: spares reading older logs.",
)
@session_options
@pass_session
def show(session: Session, /, topic: str, message_id: str, since: str | None) -> Exit:
    """Show the life of a message: stored when and where, what each group made of it, its retries.

    A group is `waiting` (not handed out since the broker started), `in-flight` (handed out, not
    committed), `consumed`, or `sent-back` (its copies, and the one that waits for its retry, tell
    when and why).  Of a delayed message
    that is not due the brokers know when it was accepted, and not whether it was cancelled.

    The exit code is 4 if nothing is known of it, 5 if a broker is away, or did not answer to the
    end of a look-up within --timeout (60 s), or if you may not read what a group sent back, or
    %TIMER%, where delayed messages and retries wait.  With --json, lines told apart by `kind`:
    `accepted`, `stored`, `retry`, `waiting` (for its retry) and `dead-letter` (each as of `duemq
    consume`, the last three with group, error, first_failed_ms, last_failed_ms), `delivery`
    (broker, queue, offset of the message, group, state, group_offset); and {missing_brokers}.

    \b
    Example:
      duemq message show orders 5f0c…
    """
    with session.admin() as admin:
        timeout_s = session.timeout_s or LOOKUP_TIMEOUT_S
        trace = admin.describe_message(topic, message_id, since=since, timeout_s=timeout_s)
    if session.json:
        session.output.table((), list(_life(trace)), empty="")
    else:
        for line in _story(trace):
            click.echo(line)
    session.output.missing(trace.missing)
    if not trace.found:
        session.output.note(f"nothing is known of message {message_id} of topic {topic}")
    if trace.missing:
        return Exit.PARTIAL
    return Exit.OK if trace.found else Exit.NOT_FOUND


def _life(trace: MessageTrace) -> list[dict[str, Any]]:
    rows = [{"kind": "accepted", **message_fields(each)} for each in trace.accepted]
    for stored in trace.stored:
        rows.append({"kind": "stored", **message_fields(stored.message)})
        rows += [
            {
                "kind": "delivery",
                "broker": stored.message.broker,
                "queue": stored.message.queue,
                "offset": stored.message.offset,
                "group": each.group,
                "state": each.state.value,
                "group_offset": each.offset,
            }
            for each in stored.groups
        ]
    rows += [
        {"kind": _kind(each), **message_fields(each), **_failure(each)}
        for each in (*trace.copies, *trace.waiting)
    ]
    return rows


def _kind(copy: Message) -> str:
    if is_dead_letter(copy.stored_topic):
        return "dead-letter"
    return "retry" if is_retry(copy.stored_topic) else "waiting"


def _failure(copy: Message) -> dict[str, Any]:
    story = copy.retry
    return {
        "group": story and story.group,
        "error": story and story.error,
        "first_failed_ms": story and story.first_failed_ms,
        "last_failed_ms": story and story.last_failed_ms,
    }


def _story(trace: MessageTrace) -> list[str]:
    lines = [
        f"{local_time(each.store_ms)}  accepted for a later time  {_where(each)}"
        for each in trace.accepted
    ]
    if trace.accepted and not trace.stored:
        lines.append("  not in its topic: it is not due yet, or was cancelled")
    for stored in trace.stored:
        kept = stored.message
        due = f", due {local_time(kept.due_ms)}" if kept.due_ms else ""
        lines.append(f"{local_time(kept.store_ms)}  stored  {_where(kept)}{due}")
        lines.append(
            f"  key {shown(kept.key)}, tag {shown(kept.tag)}, ordering key"
            f" {shown(kept.ordering_key)}, {len(kept.body):,} bytes"
        )
        lines += [
            f"  group {each.group}: {each.state.value} (it is at {each.offset})"
            for each in stored.groups
        ]
        if not stored.groups:
            lines.append("  no group has an offset in its queue")
    what = {
        "dead-letter": "dead letter of",
        "retry": "again for",
        "waiting": "sent back, waits for its time to come again for",
    }
    for copy in (*trace.copies, *trace.waiting):
        story = _failure(copy)
        lines.append(
            f"{local_time(copy.store_ms)}  {what[_kind(copy)]} group {story['group']}"
            f"  {_where(copy)},"
            f" delivered {copy.deliveries} times before:"
            f" {one_line(story['error']) if story['error'] else '-'}"
        )
    return lines


def _where(each: Message) -> str:
    return f"{each.broker} {printable(each.stored_topic)}/{each.queue} @ {each.offset}"
