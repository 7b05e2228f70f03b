"""`duemq timer cancel`, `duemq timer reschedule`: by handle, or by the key of their owner."""

from __future__ import annotations

import click

from duemq import Admin, CancelOutcome, Rescheduled, RescheduleOutcome
from duemq_cli import completion, times
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_cli.text import local_time

_topic = click.option(
    "--topic", metavar="TOPIC", shell_complete=completion.topics, help="Of the timer keys."
)


@click.command()
@click.argument("handles", metavar="[HANDLE]...", nargs=-1)
@_topic
@click.option("--timer-key", "keys", metavar="KEY", multiple=True, help="May be repeated.")
@session_options
@pass_session
def cancel(
    session: Session, handles: tuple[str, ...], topic: str | None, keys: tuple[str, ...]
) -> Exit:
    """Cancel delayed messages by the handles that `duemq send` printed, or by their timer keys.

    Answers cancelled (it will never be delivered), fired (too late) or unknown, a line a message;
    the exit code is 0 only if all are cancelled.  With --json: handle, outcome; by key topic,
    timer_key, outcome.

    \b
    Examples:
      duemq timer cancel dmq1AAECAwQFBgc…
      duemq timer cancel --topic reminders --timer-key order-17 --timer-key order-18
    """
    _one_of(bool(handles), topic, bool(keys))
    session.changes()
    with session.admin() as admin:
        outcomes = _cancel(admin, handles, topic, keys)
    for name, outcome in zip(handles or keys, outcomes, strict=True):
        row = {"topic": topic, "timer_key": name} if keys else {"handle": name}
        session.output.record(row | {"outcome": outcome.value}, f"{outcome.value}  {name}")
    return Exit.OK if set(outcomes) == {CancelOutcome.CANCELLED} else Exit.FAILED


def _cancel(
    admin: Admin, handles: tuple[str, ...], topic: str | None, keys: tuple[str, ...]
) -> list[CancelOutcome]:
    if topic is None:
        return admin.cancel(list(handles))
    return admin.cancel(key=[(topic, key) for key in keys])


@click.command()
@click.argument("handle", required=False)
@_topic
@click.option("--timer-key", "key", metavar="KEY", help="Instead of HANDLE, with --topic.")
@click.option("--delay", metavar="TIME", callback=times.delay, help="From now: 5s, 1h30m …")
@click.option(
    "--at", metavar="RFC3339", callback=times.due_time, help="Deliver at 2030-01-31T09:00:00Z."
)
@session_options
@pass_session
def reschedule(
    session: Session,
    handle: str | None,
    topic: str | None,
    key: str | None,
    delay: str | None,
    at: int | None,
) -> Exit:
    """Give a delayed message another due time, by HANDLE or by its timer key.

    It is delivered once, at the old time or at the new one, and has a new handle.  Answers
    rescheduled, fired (too late) or unknown; the exit code is 0 only if it is rescheduled.  With
    --json: outcome, handle, due_ms.

    \b
    Examples:
      duemq timer reschedule dmq1AAECAwQFBgc… --delay 2h
      duemq timer reschedule --topic reminders --timer-key order-17 --at 2030-01-31T09:00:00Z
    """
    _one_of(handle is not None, topic, key is not None)
    if (delay is None) == (at is None):
        raise click.UsageError("Give --delay or --at.")
    session.changes()
    with session.admin() as admin:
        answer: Rescheduled
        if topic is not None and key is not None:
            answer = admin.reschedule(key=(topic, key), delay=delay, deliver_at=at)
        else:
            answer = admin.reschedule(handle or "", delay=delay, deliver_at=at)
    row = {"outcome": answer.outcome.value, "handle": answer.handle, "due_ms": answer.due_ms}
    text = answer.outcome.value
    if answer.due_ms is not None:
        text += f"  due {local_time(answer.due_ms)}  {answer.handle}"
    session.output.record(row, text)
    done = answer.outcome is RescheduleOutcome.RESCHEDULED
    return Exit.OK if done else Exit.FAILED


def _one_of(by_handle: bool, topic: str | None, by_key: bool) -> None:
    if by_handle == by_key or (topic is not None) != by_key:
        raise click.UsageError("Give HANDLE, or --topic and --timer-key.")
