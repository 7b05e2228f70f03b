"""`duemq group`: consumer groups: who is in them, how far they are, where they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import click

from duemq.administering.asking import refuse_missing
from duemq.descriptions import GroupDescription, MemberDescription, Progress
from duemq.errors import InvalidArgument
from duemq.protocol.names import is_retry, is_system
from duemq.protocol.retry_policy import RETRIES_MAX, RetryPolicy
from duemq_cli import completion
from duemq_cli.commands import offsets
from duemq_cli.exits import Exit
from duemq_cli.session import (
    Session,
    confirmed,
    if_not_exists_option,
    known,
    pass_session,
    session_options,
    yes_option,
)
from duemq_cli.text import age, duration, exact_duration, local_time

NOTHING_CHANGED = "nothing was changed"

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def group() -> None:
    """Consumer groups: members that share a topic's queues.

    \b
    A group that stands still or lags:
      duemq group show billing                      who has which queue, lag, retries
      duemq message find orders --key 4711          what became of one message
    One that must read again, or skip what waits (members may go on running):
      duemq group reset billing --topic orders --to -2h --dry-run
      duemq group reset billing --topic orders --to -2h
      duemq group skip billing --topic orders
    """


# ── looking ──────────────────────────────────────────────────────────────────────────


@group.command("list")
@click.option("--system", is_flag=True, help="With those of DueMQ itself, such as %TIMER%.")
@click.option("--no-lag", is_flag=True, help="Do not ask how far each is behind.")
@session_options
@pass_session
def list_groups(session: Session, /, system: bool, no_lag: bool) -> Exit:
    """List all groups, and how far they are behind.

    `lag` counts messages, `age` is how long the oldest of them has waited; of groups that you may
    not consume in neither is told.  The exit code is 5 if a broker is away: what it knows is not in
    there.  With --json: group, members, generation, coordinator, lag, lag_ms; and
    {missing_brokers}.
    """
    with session.admin() as admin:
        found, missing = known(lambda: admin.groups(lag=not no_lag))
    rows = (
        {
            "group": each.name,
            "members": each.members,
            "generation": each.generation,
            "coordinator": each.coordinator,
            "lag": each.lag,
            "lag_ms": each.lag_ms,
            "age": age(each.lag_ms),
        }
        for each in found
        if system or not is_system(each.name)
    )
    if session.json:
        rows = ({name: row[name] for name in row if name != "age"} for row in rows)
    columns = ("group", "members", "generation", "coordinator", "lag", "age")
    session.output.table(columns, rows, empty="no groups yet", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


@group.command()
@click.argument("name", shell_complete=completion.groups)
@session_options
@pass_session
def show(session: Session, /, name: str) -> Exit:
    """Show NAME: its members, and queue by queue who has it, how far it is, what is left.

    Rates are those of the last minute; `lag` counts messages, `age` is how long the oldest of them
    has waited; `in flight` are those handed out and not committed.  The exit code is 5 if a broker
    is away: what it knows is not in there.

    With --json, lines told apart by `kind`: one `group` (members, coordinator, generation,
    strategy, lag, lag_ms, in_flight, consumed_per_s, sent_back, retries_waiting, dead_letters,
    dead_letters_kept, retries_max, retry_delays_ms, retry_exponential, without_settings,
    waits_until_ms), a `member` each (member, client, topics, queues, last_heartbeat_ms,
    session_timeout_ms, incarnation, leaving), a `queue` each (topic, broker, queue, member,
    generation, offset, min_offset, max_offset, lag, lag_ms, in_flight, settled, consumed_per_s,
    last_commit_ms); and {missing_brokers}, [{broker, error}].
    """
    with session.admin() as admin:
        found = admin.describe_group(name)
    if session.json:
        session.output.table((), _rows(found), empty="")
    else:
        _print(session, found)
    session.output.missing(found.missing)
    return Exit.PARTIAL if found.missing else Exit.OK


def _rows(found: GroupDescription) -> Iterator[dict[str, Any]]:
    policy = found.retry or RetryPolicy()
    yield {
        "kind": "group",
        "group": found.name,
        "members": len(found.members),
        "coordinator": found.coordinator,
        "generation": found.generation,
        "strategy": found.strategy,
        "lag": found.lag,
        "lag_ms": found.lag_ms,
        "in_flight": found.in_flight,
        "consumed_per_s": round(found.consumed_per_s, 1),
        "sent_back": found.sent_back,
        "retries_waiting": found.retries_waiting,
        "dead_letters": found.dead_letters,
        "dead_letters_kept": found.dead_letters_kept,
        "retries_max": policy.retries_max,
        "retry_delays_ms": policy.delays_ms,
        "retry_exponential": policy.exponential and asdict(policy.exponential),
        "without_settings": found.without_settings,
        "waits_until_ms": found.waits_until_ms,
    }
    yield from (_member_row(found.name, member) for member in found.members)
    yield from (_queue_row(found.name, each) for each in found.progress)


def _member_row(name: str, member: MemberDescription) -> dict[str, Any]:
    return {
        "kind": "member",
        "group": name,
        "member": member.member_id,
        "client": member.client,
        "topics": member.topics,
        "queues": [
            {"topic": topic, "broker": broker, "queue": queue}
            for topic, broker, queue in member.queues
        ],
        "last_heartbeat_ms": member.last_heartbeat_ms,
        "session_timeout_ms": member.session_timeout_ms,
        "incarnation": member.incarnation or None,
        "leaving": member.leaving,
    }


def _queue_row(name: str, each: Progress) -> dict[str, Any]:
    return {
        "kind": "queue",
        "group": name,
        "topic": each.topic,
        "broker": each.broker,
        "queue": each.queue,
        "member": each.member_id,
        "generation": each.generation,
        "offset": each.offset,
        "min_offset": each.min_offset,
        "max_offset": each.max_offset,
        "lag": each.lag,
        "lag_ms": each.lag_ms,
        "in_flight": each.in_flight,
        "settled": each.settled,
        "consumed_per_s": round(each.consumed_per_s, 1),
        "last_commit_ms": each.last_commit_ms,
    }


def _print(session: Session, found: GroupDescription) -> None:
    say = session.output.line
    say(
        f"{found.name}: {len(found.members)} members, coordinator {found.coordinator or 'none'}, "
        f"generation {found.generation}, strategy {found.strategy or '-'}"
    )
    say(
        f"  lag {found.lag:,} messages, the oldest {age(found.lag_ms) or duration(0)} old; "
        f"{found.consumed_per_s:,.1f} a second; {found.in_flight:,} in flight"
    )
    say(
        f"  {found.sent_back:,} sent back since the brokers started, "
        f"{found.retries_waiting:,} wait for their time; "
        f"{found.dead_letters_kept:,} dead letters kept"
    )
    say(f"  retries: {policy_text(found.retry)}")
    if found.waits_until_ms:
        until = local_time(found.waits_until_ms)
        say(f"  queues wait until {until} at most for members that may still have them")
    if found.without_settings:
        brokers = ", ".join(found.without_settings)
        say(f"  not at {brokers}, which came later: `duemq group update {found.name}`")
    for member in found.members:
        state = "  static" if member.incarnation else ""
        state += "  leaving" if member.leaving else ""
        topics = ", ".join(
            f"{topic} ({text})" if text not in ("", "*") else topic
            for topic, text in member.topics.items()
            if not is_retry(topic)  # which every member reads
        )
        say(f"  {member.member_id}  {member.client}{state}  {topics}")
    now_ms = time.time_ns() // 1_000_000
    rows = (
        {
            "topic": each.topic,
            "queue": f"{each.broker}/{each.queue}",
            "member": each.member_id,
            "offset": each.offset,
            "end": each.max_offset,
            "lag": each.lag,
            "age": age(each.lag_ms),
            "in_flight": each.in_flight,
            "per_s": each.consumed_per_s,
            "committed": each.last_commit_ms
            and f"{duration(max(0, now_ms - each.last_commit_ms))} ago",
        }
        for each in found.progress
    )
    columns = (
        *("topic", "queue", "member", "offset", "end", "lag", "age"),
        *("in_flight", "per_s", "committed"),
    )
    session.output.table(columns, rows, empty="no queues")


def policy_text(policy: RetryPolicy | None) -> str:
    """A retry policy for people."""
    if policy is None:
        return "-"
    if policy.exponential:
        first = exact_duration(policy.exponential.initial_ms)
        longest = exact_duration(policy.exponential.max_ms)
        delays = f"{first} x {policy.exponential.multiplier:g}, at most {longest}"
    else:
        delays = " ".join(map(exact_duration, policy.delays_ms))
    return f"{policy.retries_max}, after {delays or '-'}"


# ── settings ─────────────────────────────────────────────────────────────────────────


def policy_options(command: F) -> F:
    """Adds the options that say how failed messages come again."""
    retries = click.option(
        "--retries-max",
        type=click.IntRange(0, RETRIES_MAX),
        help="Deliveries after the first; then it is a dead letter.",
    )
    delays = click.option(
        "--delays",
        metavar="'10s 1m …'",
        help="Before each retry; the last one for all beyond.",
    )
    exponential = click.option(
        "--exponential",
        type=(str, float, str),
        metavar="FIRST FACTOR LONGEST",
        help="In place of --delays, such as: 5s 2 2h",
    )
    return retries(delays(exponential(command)))


@group.command()
@click.argument("name")
@policy_options
@if_not_exists_option
@session_options
@pass_session
def create(
    session: Session,
    /,
    name: str,
    retries_max: int | None,
    delays: str | None,
    exponential: tuple[str, float, str] | None,
    if_not_exists: bool,
) -> Exit:
    """Make the group NAME at every broker, before its first member comes.

    Groups need not be made, unless brokers run with auto_create_groups off; but so they can have
    retries of their own, or a place to start from (`duemq group reset`).  What is not given is as
    the brokers are set.  While a broker is away nothing is made (exit code 3).  The exit code is 1
    if the group is there.  With --if-not-exists it is 0 then, and what is there is printed; brokers
    that lack it get it so, and what is in force is the group's own everywhere from then on: how
    brokers are set counts for it no more.  With --json: group, retries_max, retry_delays_ms,
    retry_exponential.

    \b
    Examples:
      duemq group create billing
      duemq group create billing --retries-max 5 --delays '1s 10s 1m'
      duemq group create billing --exponential 5s 2 2h
    """
    with session.admin() as admin:
        session.changes()
        groups, missing = known(admin.groups)
        if any(each.name == name for each in groups):
            if not if_not_exists:  # 1, as of `topic create`: there is nothing wrong with the name
                text = f"group {name!r} exists: `duemq group update` changes it"
                session.output.error(InvalidArgument(text, field="name", value=name))
                return Exit.FAILED
            found = admin.describe_group(name)
            policy = found.retry or RetryPolicy()
            if found.without_settings:
                admin.put_group(name, **_as_it_is(policy))
        else:
            refuse_missing(missing, NOTHING_CHANGED)
            policy = admin.put_group(
                name, retries_max=retries_max, retry_delays=delays, exponential=exponential
            )
    _told(session, name, policy)
    return Exit.OK


@group.command()
@click.argument("name", shell_complete=completion.groups)
@policy_options
@session_options
@pass_session
def update(
    session: Session,
    /,
    name: str,
    retries_max: int | None,
    delays: str | None,
    exponential: tuple[str, float, str] | None,
) -> None:
    """Change the retries of the group NAME at every broker; what is not given stays.

    With no option it makes the group known, as it is, at brokers that were added since it was made.
    What stays is the group's own from then on: how brokers are set counts for it no more.
    Messages that already wait for a retry come when they were to come.  While a broker is away
    nothing is changed (exit code 3).  With --json as `create`.

    \b
    Example:
      duemq group update billing --retries-max 3
    """
    with session.admin() as admin:
        session.changes()
        found = admin.describe_group(name)
        refuse_missing(found.missing, NOTHING_CHANGED)  # the settings may be there alone
        wanted = _as_it_is(found.retry or RetryPolicy())
        if retries_max is not None:
            wanted["retries_max"] = retries_max
        if delays is not None or exponential is not None:
            wanted |= {"retry_delays": delays, "exponential": exponential}
        policy = admin.put_group(name, **wanted)
    _told(session, name, policy)


def _as_it_is(policy: RetryPolicy) -> dict[str, Any]:
    """To put it once more."""
    delays = [delay / 1000 for delay in policy.delays_ms] or None
    named = {"retry_delays": delays, "exponential": policy.exponential}
    return {"retries_max": policy.retries_max, **named}


def _told(session: Session, name: str, policy: RetryPolicy) -> None:
    row = {
        "group": name,
        "retries_max": policy.retries_max,
        "retry_delays_ms": policy.delays_ms,
        "retry_exponential": policy.exponential and asdict(policy.exponential),
    }
    session.output.record(row, f"group {name}: retries {policy_text(policy)}")


@group.command()
@click.argument("name", shell_complete=completion.groups)
@yes_option
@session_options
@pass_session
def delete(session: Session, /, name: str, yes: bool) -> Exit:
    """Forget the group NAME: settings, offsets, and the retries that are due.  Dead letters stay.

    Retries that wait for their time are kept until the group sends something back again.  Refused
    while it has members.  With --json: group, deleted.
    """
    if not confirmed(session, f"Forget group {name}, its offsets and retries?", yes=yes):
        return Exit.FAILED
    session.changes()
    with session.admin() as admin:
        admin.delete_group(name)
    session.output.record({"group": name, "deleted": True}, f"group {name} deleted")
    return Exit.OK


for command in (offsets.reset, offsets.skip, offsets.clone):
    group.add_command(command)
