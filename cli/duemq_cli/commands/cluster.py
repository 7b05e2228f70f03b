"""`duemq cluster`: what runs, and how it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from duemq.descriptions import (
    BrokerDescription,
    ClusterDescription,
    Forgotten,
    ReplicaDescription,
    TimerStats,
)
from duemq.errors import MissingBroker
from duemq_cli.commands.offsets import dry_run_option
from duemq_cli.exits import Exit
from duemq_cli.session import (
    Session,
    confirmed,
    known,
    pass_session,
    session_options,
    yes_option,
)
from duemq_cli.text import local_time


@click.group()
def cluster() -> None:
    """The cluster: nameservers, brokers, timer shards."""


@cluster.command()
@session_options
@pass_session
def show(session: Session, /) -> Exit:
    """Show every member and its state; the exit code is 0 only if all answered.

    A broker that vanished is shown as lost until the nameservers forget it (an hour, unless they
    are set otherwise).  A timer shard that nobody serves is a row with an error; so is a timer
    service that reports a problem.  One that leaves takes no messages over any more, and may be
    stopped when it has none pending.  Replicas follow, as the one that leads sees them; one that
    is not in sync, or is silent, makes the exit code 1, too.  With --json, a line a member: kind,
    name, address, error, and what that kind tells; of a timer service that leaves, shard is not
    below shards; of a lost broker lost_ms, since when; of a replica (name is its own) group, role
    (leader, follower, learner, away), in_sync, epoch, lag_bytes, lag_s, since_ms, reason.
    """
    with session.admin() as admin:
        found = admin.cluster()
    rows, replicas = list(_rows(found)), list(_replicas(found))
    if session.json:
        session.output.table((), [*rows, *replicas], empty="")
    else:
        shown = ({**row, "state": _state(row)} for row in rows)
        session.output.table(("kind", "name", "address", "state"), shown, empty="nobody")
        if replicas:
            _show_replicas(session, replicas)
        for name in _unled(found):
            session.output.note(
                f"{name}: its replicas say what they wait for: duemq replica status {name}"
            )
    wrong = any(row["error"] or row.get("problems") for row in (*rows, *replicas))
    return Exit.FAILED if wrong else Exit.OK


@cluster.command()
@click.argument("name")
@click.option("--timer", is_flag=True, help="NAME is a timer service.")
@dry_run_option
@yes_option
@session_options
@pass_session
def forget(session: Session, /, name: str, timer: bool, dry_run: bool, yes: bool) -> Exit:
    """Give up the broker NAME, which is lost and will not come back.

    While the nameservers remember a lost broker, no answer counts as whole.  This is the
    operator's word that it is out of service: what it stored is out of reach, answers are whole
    without it, and ordering keys leave its queues.  If it comes back it is there again.  One that
    lives is refused: stop it first; if only some nameservers heard it in the end, the error names
    those that have given it up.  The exit code is 4 if no nameserver remembers it, 5 if a
    nameserver did not answer, or, of a timer service, a broker: repeat it then.  With --json, an
    object: name, timer, address, lost_ms, topics (topic, queues, elsewhere; null: not known),
    dry_run, missing_nameservers.

    \b
    Examples:
      duemq cluster forget broker-2 --dry-run
      duemq cluster forget timer-1 --timer --yes
    """
    brokers: Sequence[MissingBroker] = ()
    with session.admin() as admin:
        found = admin.forget(name, timer=timer, dry_run=True)
        _say_what_goes(session, found)
        if not dry_run:
            if not confirmed(session, f"Give {name} up for good?", yes=yes):
                return Exit.FAILED
            session.changes()
            # What it had is known before it is forgotten; of this only who did not answer is news.
            done, brokers = known(lambda: admin.forget(name, timer=timer))
            found = dataclasses.replace(found, missing=done.missing)
    if session.json:
        session.output.record(_forgotten_row(found, dry_run), "")
    else:
        session.output.line(f"{name}: {'would be' if dry_run else 'is'} given up")
    for nameserver in found.missing:
        session.output.note(
            f"duemq: incomplete, no answer of nameserver {nameserver.address}:"
            f" {nameserver.error}; call again when it is there"
        )
    if brokers:
        session.output.missing(brokers)
        session.output.note("duemq: nameservers know; call again when these brokers are there")
    return Exit.PARTIAL if found.missing or brokers else Exit.OK


def _say_what_goes(session: Session, found: Forgotten) -> None:
    how = "stopped" if found.stopped else "fell silent"
    kind = "timer service" if found.timer else "broker"
    session.output.note(
        f"{kind} {found.name}, at {found.address}, {how} at {local_time(found.lost_ms)}"
    )
    if found.timer:
        session.output.note(
            "out of reach: the delayed messages that only it keeps; its queues are another's after"
            " `duemq timer release`"
        )
    elif found.topics is None:
        session.output.note("out of reach: what it stored; no nameserver remembers which topics")
    for each in found.topics or ():
        others = "others have theirs" if each.elsewhere else "nobody else serves the topic"
        session.output.note(f"out of reach: {each.queues} queues of {each.topic}; {others}")


def _forgotten_row(found: Forgotten, dry_run: bool) -> dict[str, Any]:
    row = dataclasses.asdict(found)
    missing = row.pop("missing")
    named = [{"nameserver": each["address"], "error": each["error"]} for each in missing]
    return {**row, "dry_run": dry_run, "missing_nameservers": named}


def _rows(found: ClusterDescription) -> Iterator[dict[str, Any]]:
    for nameserver in found.nameservers:
        address = nameserver.address
        yield {
            "kind": "nameserver",
            "name": address,
            "address": address,
            "error": nameserver.error,
        }
    yield from map(_broker, found.brokers)
    yield from map(_timer, found.timers)


def _broker(broker: BrokerDescription) -> dict[str, Any]:
    return {
        "kind": "broker",
        "name": broker.name,
        "address": broker.address,
        "error": broker.error,
        "lost_ms": broker.lost_ms,
        "version": broker.version,
        "started_ms": broker.started_ms,
        "store_id": f"{broker.store_id:016x}",
        "read_only": broker.read_only,
        "log_start_position": broker.log_start_position,
        "log_durable_position": broker.log_durable_position,
        "checkpoint_position": broker.checkpoint_position,
        "delay_levels_ms": broker.delay_levels_ms,
    }


def _timer(timer: TimerStats) -> dict[str, Any]:
    return {
        "kind": "timer",
        "name": timer.name,
        "address": timer.address,
        "error": timer.error,
        "shard": timer.shard,
        "shards": timer.shards,
        "accepted": timer.accepted,
        "pending": timer.pending,
        "fired": timer.fired,
        "cancelled": timer.cancelled,
        "in_flight": timer.in_flight,
        "near": timer.near,
        "next_due_ms": timer.next_due_ms,
        "lateness_p50_ms": timer.lateness_p50_ms,
        "lateness_p99_ms": timer.lateness_p99_ms,
        "lateness_max_ms": timer.lateness_max_ms,
        "lost": timer.lost,
        "replaced": timer.replaced,
        "dropped": timer.dropped,
        "problems": list(timer.problems),
        "stuck": [
            {"topic": each.topic, "timers": each.timers, "reason": each.reason}
            for each in timer.stuck
        ],
    }


def _replicas(found: ClusterDescription) -> Iterator[dict[str, Any]]:
    # Of a lost broker they are as they were: nobody leads who could tell.
    brokers = (each for each in found.brokers if each.lost_ms is None)
    members: list[BrokerDescription | TimerStats] = [*brokers, *found.timers]
    for member in members:
        for replica in member.replicas:
            yield {
                "kind": "replica",
                "group": member.name,
                **dataclasses.asdict(replica),
                "error": _why(replica),
            }


def _unled(found: ClusterDescription) -> Iterator[str]:
    """Whose leader does not answer: others of its replicas may."""
    members: list[BrokerDescription | TimerStats] = [*found.brokers, *found.timers]
    return (each.name for each in members if each.error and each.replicas)


def _why(replica: ReplicaDescription) -> str | None:
    """What is wrong with it."""
    if replica.role == "away":  # it may count as in sync until that is changed
        return f"away: {replica.reason or 'nothing is heard of it'}"
    if replica.in_sync:  # who is silent may lack nothing, and nothing is accepted without it
        return f"in sync, and {replica.reason}" if replica.reason else None
    return f"not in sync: {replica.reason or 'it catches up'}"


def _show_replicas(session: Session, replicas: list[dict[str, Any]]) -> None:
    """One table more, for people."""
    shown = (
        {
            **row,
            "replica": f"{row['group']}/{row['name']}",
            "in_sync": "yes" if row["in_sync"] else "no",
            "lag": f"{row['lag_bytes']:,} B, {row['lag_s']:.1f} s" if row["lag_bytes"] else "",
            "since": local_time(row["since_ms"]) if row["since_ms"] else "",
        }
        for row in replicas
    )
    session.output.line("")
    columns = ("replica", "role", "in_sync", "epoch", "lag", "address", "since", "reason")
    session.output.table(columns, shown, empty="")


def _state(row: dict[str, Any]) -> str:
    """A member's state for people."""
    if row.get("lost_ms"):
        return f"lost since {local_time(row['lost_ms'])}: {row['error']}"
    if row["error"]:
        return f"no answer: {row['error']}" if row["address"] else str(row["error"])
    if row["kind"] == "broker":
        held = (row["log_durable_position"] - row["log_start_position"]) / 1e6
        return f"log {held:,.1f} MB{', read-only' if row['read_only'] else ''}"
    if row["kind"] == "timer":
        stuck = (f"{x['timers']:,} of {x['topic']} are stuck: {x['reason']}" for x in row["stuck"])
        lost = f"lost {row['lost']:,}, " if row["lost"] else ""
        replaced = f"replaced {row['replaced']:,}, " if row["replaced"] else ""
        leaves = "leaves, " if row["shard"] >= row["shards"] else ""
        figures = (
            f"{leaves}pending {row['pending']:,}, {lost}fired {row['fired']:,}, "
            f"cancelled {row['cancelled']:,}, {replaced}late p99 {row['lateness_p99_ms']:.0f} ms"
        )
        return "; ".join((*row["problems"], figures, *stuck))
    return "answers"
