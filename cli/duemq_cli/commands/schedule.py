"""`duemq schedule`: messages that repeat."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import click

from duemq.descriptions import CatchUp, DstPolicy, Schedule
from duemq_cli import completion, times
from duemq_cli.commands.send import named_properties
from duemq_cli.exits import Exit
from duemq_cli.printing import body_fields
from duemq_cli.session import Session, known, pass_session, session_options
from duemq_cli.text import exact_duration, local_time

_POLICIES = [each.value for each in CatchUp]


@click.group()
def schedule() -> None:
    """Messages that repeat: every so often, or as cron says."""


@schedule.command()
@click.argument("name")
@click.option("--topic", required=True, metavar="TOPIC", shell_complete=completion.topics)
@click.option("--body", required=True, help="Of each message.")
@click.option("--every", metavar="TIME", callback=times.delay, help="30s, 1h30m, 2d …; from 1s.")
@click.option("--cron", metavar="EXPR", help="Five fields, or six with seconds; or @daily …")
@click.option("--zone", metavar="ZONE", help="Of --cron, as Europe/Berlin; UTC if not given.")
@click.option(
    "--dst",
    type=click.Choice([each.value for each in DstPolicy]),
    default=DstPolicy.ONCE.value,
    show_default=True,
    help="What becomes of wall times that do not exist, or exist twice.",
)
@click.option(
    "--catch-up",
    type=click.Choice(_POLICIES),
    default=CatchUp.LATEST.value,
    show_default=True,
    help="What becomes of what could not be kept in time.",
)
@click.option(
    "--from", "start", metavar="TIME", callback=times.due_time, help="The first one, or later."
)
@click.option("--until", metavar="TIME", callback=times.due_time, help="The last one, or sooner.")
@click.option("--count", type=click.IntRange(1), help="So many messages at most.")
@click.option("--jitter", metavar="TIME", callback=times.delay, help="Each up to so much later.")
@click.option("--key", help="For look-up.")
@click.option("--tag", help="For filtering by consumers.")
@click.option("--property", "properties", metavar="K=V", multiple=True, help="May be repeated.")
@click.option("--if-absent", is_flag=True, help="Fail, instead of changing what NAME stands for.")
@session_options
@pass_session
def add(
    session: Session, /, name: str, body: str, properties: tuple[str, ...], **options: Any
) -> Exit:
    """Send a message to a topic again and again, or change what NAME stands for.

    Answers created, changed, unchanged (it was the same), or with --if-absent exists, with the exit
    code 1.  A change takes away what waits of the old one.  With --json: outcome, and as of
    `duemq schedule list`.

    --dst: once sends what does not exist as the clocks go forward, skip leaves it out, shift sends
    it as much later; what exists twice comes the first time, with twice both times.  --catch-up:
    all, the latest, or none that is late by more than a minute.

    \b
    Examples:
      duemq schedule add heartbeat --topic beats --body ping --every 30s
      duemq schedule add report --topic t --body go --cron '0 9 * * MON-FRI' --zone Europe/Berlin
      duemq schedule add sweep --topic jobs --body sweep --cron '0 3 * * *' --jitter 30m --count 10
    """
    if (options["every"] is None) == (options["cron"] is None):
        raise click.UsageError("Give one of --every and --cron.")
    session.changes()
    with session.admin() as admin:
        outcome, found = admin.put_schedule(
            name, body=os.fsencode(body), properties=named_properties(properties), **options
        )
    row = {"outcome": outcome, **_row(found)}
    session.output.record(row, f"{outcome}  {name}, next {_when(found)}")
    return Exit.FAILED if outcome == "exists" else Exit.OK


@schedule.command("list")
@session_options
@pass_session
def list_schedules(session: Session, /) -> Exit:
    """List all schedules.

    The exit code is 5 if a timer shard is away: its part is missing.  With
    --json, a line a schedule: name, topic, body, key, tag, properties, every_ms, cron, zone, dst,
    catch_up, start_ms, until_ms, count, jitter_ms, paused, ended, stored, next_due_ms; a body that
    is not UTF-8 text is in body_base64, and body is null.
    """
    with session.admin() as admin:
        found, missing = known(admin.schedules)
    if session.json:
        session.output.table((), map(_row, found), empty="", missing=missing)
    else:
        rows = [
            {"name": each.name, "topic": each.topic, "when": _rule(each), "next": _when(each)}
            for each in found
        ]
        columns = ("name", "topic", "when", "next")
        session.output.table(columns, rows, empty="no schedules yet", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


@schedule.command("next")
@click.argument("name")
@click.option(
    "--count", type=click.IntRange(1, 1_000), default=5, show_default=True, help="So many."
)
@session_options
@pass_session
def next_occurrences(session: Session, /, name: str, count: int) -> None:
    """List when the schedule NAME is due next, if nothing happens to it meanwhile.

    Of a paused one: from now on, without what it has missed.  With --json, a line each: at_ms,
    due_ms (with the jitter).

    \b
    Example:
      duemq schedule next report --count 10
    """
    with session.admin() as admin:
        found = admin.next_occurrences(name, count)
    for each in found:
        session.output.record(dataclasses.asdict(each), local_time(each.due_ms))


@schedule.command()
@click.argument("name")
@session_options
@pass_session
def pause(session: Session, /, name: str) -> None:
    """Stop the schedule NAME until it is resumed; what waits of it is taken away.

    With --json, as of `duemq schedule list`.
    """
    session.changes()
    with session.admin() as admin:
        found = admin.pause_schedule(name)
    session.output.record(_row(found), f"paused  {name}")


@schedule.command()
@click.argument("name")
@click.option(
    "--catch-up",
    type=click.Choice(_POLICIES),
    help="What becomes of what it has missed; its own policy if not given.",
)
@session_options
@pass_session
def resume(session: Session, /, name: str, catch_up: str | None) -> None:
    """Let the schedule NAME go on.

    With --json, as of `duemq schedule list`.

    \b
    Example:
      duemq schedule resume report --catch-up none
    """
    session.changes()
    with session.admin() as admin:
        found = admin.resume_schedule(name, catch_up=catch_up)
    session.output.record(_row(found), f"resumed  {name}, next {_when(found)}")


@schedule.command()
@click.argument("name")
@session_options
@pass_session
def delete(session: Session, /, name: str) -> Exit:
    """Delete the schedule NAME, and what waits of it.

    The exit code is 4 if there is none.  With --json: name, deleted.
    """
    session.changes()
    with session.admin() as admin:
        deleted = admin.delete_schedule(name)
    text = f"deleted  {name}" if deleted else f"there is no schedule {name}"
    session.output.record({"name": name, "deleted": deleted}, text)
    return Exit.OK if deleted else Exit.NOT_FOUND


def _row(found: Schedule) -> dict[str, Any]:
    return {**dataclasses.asdict(found), **body_fields(found.body)}


def _rule(found: Schedule) -> str:
    if found.cron:
        return f"{found.cron}  {found.zone}"
    return f"every {exact_duration(found.every_ms or 0)}"


def _when(found: Schedule) -> str:
    if found.paused:
        return "paused"
    if found.next_due_ms is not None:
        return local_time(found.next_due_ms)
    return "ended" if found.ended else "soon"
