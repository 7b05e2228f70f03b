"""`duemq timer cancel --all`, `shift`, `move`: many delayed messages of a topic at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import click

from duemq.errors import InvalidArgument
from duemq.protocol import moments
from duemq.protocol.timer_keys import REQUEST_ID_BYTES
from duemq_cli import times
from duemq_cli.exits import Exit
from duemq_cli.session import Session, confirmed, known

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Of the client, and by name: since, until, dry_run, request_id.
Change = Callable[..., int]


def _checked(_: click.Context, param: click.Parameter, value: str | None) -> bytes | None:
    """Raises InvalidArgument."""
    if value is None:
        return None
    try:
        given = bytes.fromhex(value)
    except ValueError:
        given = b""
    if len(given) != REQUEST_ID_BYTES or not any(given):
        raise InvalidArgument(
            f"{param.opts[-1]} {value!r} is no id of a request: one that was printed",
            field=param.name or "",
            value=value,
            limit=f"{2 * REQUEST_ID_BYTES} hexadecimal digits, not all of them 0",
        )
    return given


def at_that_time(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """As `times.moment`; how long ago becomes a time, which is the same when it is said again."""
    checked = times.moment()(context, param, value)
    if checked is None:
        return None
    epoch_ms = moments.epoch_ms(checked, time.time_ns() // 1_000_000, param.name or "")
    return (_EPOCH + timedelta(milliseconds=epoch_ms)).isoformat(timespec="milliseconds")


request_id_option = click.option(
    "--request-id",
    metavar="ID",
    callback=_checked,
    help="Go on with what was begun under it: nothing is done twice.",
)


def change(
    session: Session,
    asked: str,
    done: str,
    run: Change,
    *,
    dry_run: bool,
    yes: bool,
    request_id: bytes | None,
    **span: str | None,
) -> Exit:
    """Counts, asks, and does it.  `asked`: "Cancel"; `done`: "cancelled"; `span`: since, until."""
    times.check_span(span["since"], span["until"])
    job_id = request_id or os.urandom(REQUEST_ID_BYTES)
    go_on = f"to go on with it say the same with --request-id {job_id.hex()}"
    given = ("from", span["since"]), ("to", span["until"])
    go_on += "".join(f" --{name} {at}" for name, at in given if at)
    with session.admin() as admin:
        if dry_run or not (yes or session.json):
            count, missing = known(lambda: run(admin, dry_run=True, request_id=None, **span))
        if not dry_run:
            if not (yes or session.json):
                question = f"{asked} {count:,} delayed messages?"
                if not confirmed(session, question, yes=False, missing=missing):
                    return Exit.FAILED
            session.interruption.left = lambda: f"it goes on at the timer shards; {go_on}"
            count, missing = known(lambda: run(admin, dry_run=False, request_id=job_id, **span))
    verb = f"would be {done}" if dry_run else done
    row: dict[str, object] = {"count": count, "dry_run": dry_run}
    if missing and not dry_run:
        row["request_id"] = job_id.hex()
    session.output.record(row, f"{count:,} messages {verb}")
    session.output.missing(missing)
    if missing and not dry_run:
        session.output.note(f"{go_on}: without it all that is pending by then is {done}")
    return Exit.PARTIAL if missing else Exit.OK
