"""`duemq timer`: delayed messages on their way."""

from __future__ import annotations

import click

from duemq import Admin
from duemq.cli.exits import Exit
from duemq.cli.session import Session, pass_session, session_options


@click.group()
def timer() -> None:
    """Delayed messages that are not due yet."""


@timer.command()
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True)
@session_options
@pass_session
def cancel(session: Session, handles: tuple[str, ...]) -> Exit:
    """Cancel delayed messages by the handles that `duemq send` printed.

    Answers cancelled (it will never be delivered), fired (too late) or unknown, a line a handle;
    the exit code is 0 only if all are cancelled.  With --json: handle, outcome.

    \b
    Example:
      duemq timer cancel dmq1AAECAwQFBgc…
    """
    with Admin(session.nameserver) as admin:
        outcomes = [str(outcome.value) for outcome in admin.cancel(list(handles))]
    for handle, outcome in zip(handles, outcomes, strict=True):
        session.output.record({"handle": handle, "outcome": outcome}, f"{outcome}  {handle}")
    return Exit.OK if set(outcomes) == {"cancelled"} else Exit.FAILED
