"""`duemq group`: consumer groups and how far they are."""

from __future__ import annotations

import click

from duemq import Admin
from duemq.cli.session import Session, pass_session, session_options


@click.group()
def group() -> None:
    """Consumer groups: members that share a topic's queues."""


@group.command("list")
@click.option("--system", is_flag=True, help="With those of DueMQ itself, such as %TIMER%.")
@session_options
@pass_session
def list_groups(session: Session, /, system: bool) -> None:
    """List all groups.  With --json: group, members, generation, coordinator."""
    with Admin(session.nameserver) as admin:
        found = [each for each in admin.groups() if system or not each.name.startswith("%")]
    columns = ("group", "members", "generation", "coordinator")
    rows = (
        dict(
            zip(columns, (each.name, each.members, each.generation, each.coordinator), strict=True)
        )
        for each in found
    )
    session.output.table(columns, rows, empty="no groups yet")


@group.command()
@click.argument("name")
@session_options
@pass_session
def show(session: Session, /, name: str) -> None:
    """Show NAME queue by queue: who has it, how far it is, what is left.

    With --json, a line a queue: group, topic, broker, queue, member, offset, min_offset,
    max_offset, lag.
    """
    with Admin(session.nameserver) as admin:
        found = admin.describe_group(name)
    session.output.note(
        f"{found.name}: {len(found.members)} members, coordinator {found.coordinator or 'none'}, "
        f"generation {found.generation}, strategy {found.strategy or '-'}, lag {found.lag:,}"
    )
    for member in found.members:
        session.output.note(f"  {member.member_id}  {member.client}")
    rows = (
        {
            "group": found.name,
            "topic": each.topic,
            "broker": each.broker,
            "queue": each.queue,
            "member": each.member_id,
            "offset": each.offset,
            "min_offset": each.min_offset,
            "max_offset": each.max_offset,
            "lag": each.lag,
        }
        for each in found.progress
    )
    columns = ("topic", "broker", "queue", "member", "offset", "max_offset", "lag")
    session.output.table(columns, rows, empty="no queues")
