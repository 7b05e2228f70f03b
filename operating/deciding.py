"""`adopt` and `elect`, what an operator decides when the rules cannot; `add` and `remove`.

Each says first what would be lost, or happen.  It is done when that was seen and said once more: by
an answer at the terminal, or by options.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import click

from duemq_cli import streams
from duemq_cli.exits import Exit
from duemq_cli.session import Session
from duemq_server.operating.asking import Asking
from duemq_server.operating.groups import Replica
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.running.v1.stubs import ReplicationStub

Decide = Callable[[ReplicationStub, pb.DecideRequest], Awaitable[pb.Decided]]


def decide(
    session: Session,
    asking: Asking,
    replica: Replica,
    how: Decide,
    *,
    agreed: Callable[[], bool],
    remedy: str,
    losses: Sequence[str] = (),
) -> Exit:
    """Asks what would happen, then has it done if `agreed` says so; `remedy` is told if not.

    `losses` is what the replica that is asked does not know of.
    """
    answer = asking.one(replica, lambda to: how(to, pb.DecideRequest()))
    would = answer.text
    session.output.note(f"{replica}: {would}")
    for each in losses:
        session.output.note(each)
    if not agreed():
        text = "; ".join((would, *losses))
        row = {**_row(replica, answer), "text": text, "done": False, "remedy": remedy}
        session.output.record(row, f"nothing was done: {remedy}")
        return Exit.FAILED
    session.changes()
    answer = asking.one(replica, lambda to: how(to, pb.DecideRequest(confirmed=True)))
    done = "done" if answer.text == would else answer.text
    session.output.record(_row(replica, answer), f"{replica}: {done}")
    return Exit.OK if answer.done else Exit.FAILED


def asked(session: Session, question: str) -> bool:
    """Whether somebody at a terminal says yes; False without one."""
    if session.json or not streams.can_be_asked():
        return False
    return click.confirm(question, err=True)


def _row(replica: Replica, answer: pb.Decided) -> dict[str, object]:
    return {
        "group": replica.group,
        "name": replica.name,
        "address": replica.address,
        "done": answer.done,
        "text": answer.text,
    }
