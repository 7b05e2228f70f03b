"""`duemq replica`, and `duemq broker`, which is the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from duemq.errors import DuemqError
from duemq_cli.exits import Exit
from duemq_cli.session import Session, confirmed, pass_session, session_options, yes_option
from duemq_cli.text import local_time
from duemq_server.operating.asking import Asking
from duemq_server.operating.deciding import asked, decide
from duemq_server.operating.groups import Replica, split
from duemq_server.operating.rows import (
    COLUMNS,
    as_status,
    changes_of,
    exit_of,
    for_people,
    only_others_have,
)
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1.stubs import ReplicationStub

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def replica() -> None:
    """Replicas of brokers and timer services: how they are, who leads.

    GROUP is a broker or a timer service, as `duemq cluster show` lists it; GROUP/NAME one of its
    replicas.  HOST:PORT does instead where no nameserver knows it.  All exit codes are those of
    `duemq --help`; 5: not every replica answered.

    \b
    Examples:
      duemq replica status broker-0
      duemq replica lead broker-0/b
      duemq replica history timer-0
      duemq replica remove broker-0/c
    """


@click.group()
def broker() -> None:
    """Replicas of brokers: the commands of `duemq replica`."""


def _command(function: F) -> F:
    """Adds a command to both groups, with the options that every command has."""
    command = click.command()(session_options(pass_session(function)))
    for group in (replica, broker):
        group.add_command(command)
    return function


def _asking(session: Session) -> Asking:
    settings = session.client_settings
    return Asking(session.nameserver, settings.request_timeout_s, settings.tls)


@_command
@click.argument("group")
def status(session: Session, /, group: str) -> Exit:
    """What each replica of GROUP says of itself.

    With --json, a line each: group, name, address, error, and, if it answered, disk, role (joining,
    follower, learner, preparing, leader), epoch (of the record), log_epoch (of who led when the end
    of its log was written; 0: an older release), log_start, log_end, durable, committed, applied
    (positions in the log), reason (why it takes no part), record (of the group, as it saw it last;
    null: there is none).
    """
    asking = _asking(session)
    replicas = asking.group(group)
    answers = asking.statuses(replicas)
    rows = [as_status(*each) for each in zip(replicas, answers, strict=True)]
    if session.json:
        session.output.table((), rows, empty="")
    else:
        session.output.table(COLUMNS, map(for_people, rows), empty="nobody")
    return exit_of(rows)


@_command
@click.argument("group")
def history(session: Session, /, group: str) -> Exit:
    """Who led GROUP when, and why that changed, as its replicas remember it.

    Each remembers its latest changes of role.  With --json, a line a change, the oldest first:
    group, name, at_ms, role, epoch, reason; and a line with an error a replica that did not answer.
    """
    asking = _asking(session)
    replicas = asking.group(group)
    answers = asking.statuses(replicas)
    rows = [as_status(*each) for each in zip(replicas, answers, strict=True)]
    silent = [row for row in rows if row["error"]]
    changes = sorted(changes_of(zip(replicas, answers, strict=True)), key=lambda row: row["at_ms"])
    if session.json:
        session.output.table((), [*changes, *silent], empty="")
    else:
        shown = ({**row, "at": local_time(row["at_ms"])} for row in changes)
        session.output.table(("at", "name", "role", "epoch", "reason"), shown, empty="no changes")
        for row in silent:
            named = row["name"] or row["address"]
            session.output.note(f"duemq: incomplete, no answer of {named}: {row['error']}")
    return exit_of(rows)


@_command
@click.argument("replica", metavar="GROUP/NAME")
def lead(session: Session, /, replica: str) -> Exit:
    """Let the replica NAME lead GROUP: it must be in sync.

    Whoever leads now hands over; what is being sent waits for about a tenth of a second, and
    nothing is lost.  With --json, an object: group, name, epoch.

    \b
    Example:
      duemq replica lead broker-0/b
    """
    group, name = split(replica)
    asking = _asking(session)
    leader = asking.leader(group)
    session.changes()
    request = pb.HandOverRequest(to=name)
    answer = asking.one(leader, lambda to: to.HandOver(request, timeout=asking.timeout_s))
    row = {"group": group, "name": answer.leader, "epoch": answer.epoch}
    session.output.record(row, f"{group}/{answer.leader} leads, epoch {answer.epoch}")
    return Exit.OK


@_command
@click.argument("replica", metavar="GROUP/NAME|HOST:PORT")
@click.option("--accept-loss", is_flag=True, help="What only others have is lost, knowingly.")
@yes_option
def adopt(session: Session, /, replica: str, accept_loss: bool, yes: bool) -> Exit:
    """The group's record is gone, or was set back: this replica's log is the group's from now on.

    `duemq replica status GROUP` says which replica has the last epoch in its log and, of those, the
    longest log: adopt that one.  What only others have is lost: where one has more, leads still, or
    does not answer, it is done with --accept-loss alone, and the group is a new store then, as
    after `duemq replica elect`; the answer says what is left to be done.  Says what would happen
    and asks; without a terminal it is done with --yes alone.  With --json, an object: group, name,
    address, done, text; remedy, where nothing was done.

    \b
    Examples:
      duemq replica adopt broker-0/a
      duemq replica adopt broker-0/a --accept-loss --yes
    """
    asking = _asking(session)
    chosen = asking.replica(replica)
    losses = _only_others_have(asking, chosen)
    refused = bool(losses) and not accept_loss

    def ask(to: ReplicationStub, request: pb.DecideRequest) -> Awaitable[pb.Decided]:
        request.accept_loss = bool(losses)
        return to.Adopt(request, timeout=asking.timeout_s)

    return decide(
        session,
        asking,
        chosen,
        ask,
        agreed=lambda: not refused and (yes or asked(session, "Adopt it?")),
        remedy=f"say {'--accept-loss' if refused else '--yes'} to have it done",
        losses=losses,
    )


def _only_others_have(asking: Asking, chosen: Replica) -> list[str]:
    try:
        others = asking.others(chosen)
    except DuemqError as error:
        return [f"{error}: what only others have is lost"]
    own, *answers = asking.statuses([chosen, *others])
    if isinstance(own, DuemqError):
        raise own
    return only_others_have(own, zip(others, answers, strict=True))


@_command
@click.argument("replica", metavar="GROUP/NAME|HOST:PORT")
@click.option("--accept-loss", is_flag=True, help="What this replica lacks is lost, knowingly.")
@yes_option
def elect(session: Session, /, replica: str, accept_loss: bool, yes: bool) -> Exit:
    """Nobody in sync is left: let this replica lead, although it may lack what was acknowledged.

    Says what would be lost, and which other one has more.  It is done with --accept-loss, and after
    a question where there is a terminal and no --yes.  The group is a new store then: producers,
    timers and offsets of what is lost never meet the new history, and up to a second of delayed
    messages may come twice.  To brokers a timer service is another one then, and waits for
    `duemq timer release SHARD`.  With --json, as `duemq replica adopt`.

    \b
    Examples:
      duemq replica elect broker-0/b
      duemq replica elect broker-0/b --accept-loss
    """
    asking = _asking(session)
    chosen = asking.replica(replica)
    return decide(
        session,
        asking,
        chosen,
        lambda to, request: to.Elect(request, timeout=asking.timeout_s),
        agreed=lambda: accept_loss and confirmed(session, "Let it lead?", yes=yes),
        remedy="say --accept-loss to have it done",
        losses=_only_others_have(asking, chosen),
    )


@_command
@click.argument("group")
@click.argument("name")
@yes_option
def add(session: Session, /, group: str, name: str, yes: bool) -> Exit:
    """Make NAME a member of GROUP: its process joins, catches up and is in sync then.

    That process runs with the settings of the others, a data directory of its own, `replica` NAME
    and `replicas` of all names; the members that count are those of the group's record.  Says what
    would happen and asks; without a terminal it is done with --yes alone.  HOST:PORT of the leader
    does for GROUP, also while it only prepares to lead.  With --json, as `duemq replica adopt`.

    \b
    Example:
      duemq replica add broker-0 d
    """
    request = pb.ChangeMembersRequest(add=name)
    return _change_members(session, group, name, request, "Add it?", yes=yes)


@_command
@click.argument("replica", metavar="GROUP/NAME")
@click.option(
    "--accept", is_flag=True, help="Fewer than min_insync may be left, and nothing accepted then."
)
@yes_option
def remove(session: Session, /, replica: str, accept: bool, yes: bool) -> Exit:
    """Take the replica NAME out of GROUP: it counts for nothing from now on.

    What it holds stays on its disk; its process may run on, and says that it is no member.  The
    leader cannot be removed: let another one lead first.  Where fewer than min_insync would be in
    sync it is refused without --accept: nothing is accepted then until more are.  Says what would
    happen and asks; without a terminal it is done with --yes alone.  With --json, as
    `duemq replica adopt`.

    \b
    Examples:
      duemq replica remove broker-0/c
      duemq replica remove broker-0/b --accept --yes
    """
    group, name = split(replica)
    request = pb.ChangeMembersRequest(remove=name, accepted=accept)
    return _change_members(session, group, name, request, "Remove it?", yes=yes)


def _change_members(
    session: Session,
    group: str,
    name: str,
    wanted: pb.ChangeMembersRequest,
    question: str,
    *,
    yes: bool,
) -> Exit:
    asking = _asking(session)

    def change(to: ReplicationStub, request: pb.DecideRequest) -> Awaitable[pb.Decided]:
        wanted.confirmed = request.confirmed
        return to.ChangeMembers(wanted, timeout=asking.timeout_s)

    return decide(
        session,
        asking,
        Replica(group, name, asking.leader(group).address),  # the leader is asked
        change,
        agreed=lambda: yes or asked(session, question),
        remedy="say --yes to have it done",
    )
