"""`duemq timer cancel --all`, `shift`, `move`: many delayed messages of a topic at once."""

from __future__ import annotations

from collections.abc import Callable

from duemq import Admin
from duemq_cli.exits import Exit
from duemq_cli.session import Session, confirmed, known

Change = Callable[[Admin, bool], int]


def change(
    session: Session, asked: str, done: str, run: Change, *, dry_run: bool, yes: bool
) -> Exit:
    """Counts, asks, and does it.  `asked`: "Cancel"; `done`: "cancelled"; `run`: of a dry run?"""
    with session.admin() as admin:
        if dry_run or not (yes or session.json):
            count, missing = known(lambda: run(admin, True))
        if not dry_run:
            if not (yes or session.json):
                question = f"{asked} {count:,} delayed messages?"
                if not confirmed(session, question, yes=False):
                    return Exit.FAILED
            session.changes()
            count, missing = known(lambda: run(admin, False))
    verb = f"would be {done}" if dry_run else done
    session.output.record({"count": count, "dry_run": dry_run}, f"{count:,} messages {verb}")
    session.output.missing(missing)
    return Exit.PARTIAL if missing else Exit.OK
