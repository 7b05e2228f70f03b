"""`duemq timer hold`, `resume`, `holds`: delayed messages that are kept back for a while."""

from __future__ import annotations

import dataclasses

import click

from duemq import Admin
from duemq.descriptions import HeldTimers, ResumePolicy
from duemq.errors import DuemqError, TopicNotFound
from duemq_cli import completion, times
from duemq_cli.commands.timer.prefixes import key_prefix_option
from duemq_cli.exits import Exit
from duemq_cli.session import Session, known, pass_session, session_options
from duemq_cli.text import local_time

_topic = click.option(
    "--topic", required=True, metavar="TOPIC", shell_complete=completion.topics, help="Of this one."
)
_dry_run = click.option("--dry-run", is_flag=True, help="Only say how many it is about.")


LATER = ": what is sent to it once it is made is held, too"
_POLICIES = {each.value.replace("_", "-"): each for each in ResumePolicy}


@click.command()
@_topic
@key_prefix_option
@_dry_run
@session_options
@pass_session
def hold(session: Session, /, topic: str, key_prefix: str, dry_run: bool) -> Exit:
    """Keep a topic's delayed messages back, or those whose timer key begins so.

    From then on none of them is delivered but what was on its way; sending, cancelling and all else
    goes on.  They stay until `duemq timer resume`.  The topic need not be there yet; that no broker
    knows it is said.  The exit code is 5 if a timer shard is away: repeat it once the shard is
    there.  With --json: count (pending under it; null: more than can be counted in time), was_held,
    topic_known (null: a broker is away that may know it).

    \b
    Examples:
      duemq timer hold --topic reminders
      duemq timer hold --topic reminders --key-prefix customer-7/ --dry-run
    """
    if not dry_run:
        session.changes()
    with session.admin() as admin:
        found, missing = known(
            lambda: admin.hold_timers(topic, key_prefix=key_prefix, dry_run=dry_run)
        )
        is_known = _is_known(admin, topic)  # after the hold, which is urgent
    done = "would be held" if dry_run else "held"
    row = {**_row(found), "topic_known": is_known}
    session.output.record(row, f"{_count(found)} {done}{_before(found, 'held before')}")
    if is_known is False:
        session.output.note(f"no broker knows topic {topic}{'' if dry_run else LATER}")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


@click.command()
@click.argument("older_than", metavar="[TIME]", required=False, callback=times.delay)
@_topic
@key_prefix_option
@click.option(
    "--policy",
    type=click.Choice(list(_POLICIES)),
    default="all",
    show_default=True,
    help="What of the backlog goes.",
)
@_dry_run
@session_options
@pass_session
def resume(
    session: Session,
    /,
    older_than: str | None,
    topic: str,
    key_prefix: str,
    policy: str,
    dry_run: bool,
) -> Exit:
    """End a hold: what fell due meanwhile is delivered, the rest when it is due.

    Or only some of what fell due: of those with the same key the newest, of each timer shard (and
    all without one), or with drop-older-than those that were due no longer than TIME ago; the
    others are dropped.  It ends the hold of just this topic, or just this prefix.  The exit code is
    5 if a timer shard is away: repeat it once the shard is there.  With --json: count (pending
    under it; null: more than can be counted in time), was_held, dropped, done (false: still
    dropping, all is held until then, it goes on by itself, repeat it to see; or a timer shard is
    away).

    \b
    Examples:
      duemq timer resume --topic reminders
      duemq timer resume --topic reminders --policy drop-older-than 2h
    """
    if (older_than is None) == (_POLICIES[policy] is ResumePolicy.DROP_OLDER_THAN):
        raise click.UsageError("TIME goes with --policy drop-older-than, and that with TIME.")
    if not dry_run:
        session.changes()
    with session.admin() as admin:
        found, missing = known(
            lambda: admin.resume_timers(
                topic,
                key_prefix=key_prefix,
                policy=_POLICIES[policy],
                older_than=older_than,
                dry_run=dry_run,
            )
        )
    row = {**_row(found), "dropped": found.dropped, "done": found.done}
    session.output.record(row, _resumed(found, _POLICIES[policy], dry_run=dry_run))
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK


@click.command()
@session_options
@pass_session
def holds(session: Session, /) -> Exit:
    """List what is held.

    The exit code is 5 if a timer shard is away: its part is missing.  With --json, a line each:
    topic, key_prefix (empty: the whole topic), since_ms, resuming.
    """
    with session.admin() as admin:
        found, missing = known(admin.timer_holds)
    rows = map(dataclasses.asdict, found)
    if session.json:
        session.output.table((), rows, empty="", missing=missing)
    else:
        shown = ({**row, "since": local_time(row["since_ms"])} for row in rows)
        columns = ("topic", "key_prefix", "since")
        session.output.table(columns, shown, empty="nothing is held", missing=missing)
    return Exit.PARTIAL if missing else Exit.OK


def _is_known(admin: Admin, topic: str) -> bool | None:
    try:
        admin.describe_topic(topic)
    except TopicNotFound:
        return False
    except DuemqError:
        return None
    return True


def _resumed(found: HeldTimers, policy: ResumePolicy, *, dry_run: bool) -> str:
    """What becomes of them; `pending` has those that are dropped, too."""
    count = _count(found)
    if not found.was_held:
        text = f"{count}; not held, or not at every timer shard"
        if dry_run or policy is ResumePolicy.ALL:
            return text
        # Some shards may be done, and others still drop theirs.
        return f"{text}; {found.dropped:,} dropped{'' if found.done else ' so far, others wait'}"
    if policy is ResumePolicy.ALL:
        return f"{count} {'would go' if dry_run else 'go'} when they are due"
    if dry_run:
        return f"{count} under it; how many of them are dropped is told when it is done"
    if not found.done:
        return f"{found.dropped:,} dropped so far, all others wait"
    return f"{found.dropped:,} dropped; the others of {count} go when they are due"


def _row(found: HeldTimers) -> dict[str, object]:
    return {"count": found.pending, "was_held": found.was_held}


def _count(found: HeldTimers) -> str:
    return f"{'many' if found.pending is None else format(found.pending, ',')} delayed messages"


def _before(found: HeldTimers, text: str) -> str:
    return f" ({text})" if found.was_held else ""
