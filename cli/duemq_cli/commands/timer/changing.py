"""`duemq timer cancel`, `fire`, `reschedule`, `shift`: by handle, by key, or many at once."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import click

from duemq import CancelOutcome, FireOutcome, Rescheduled, RescheduleOutcome
from duemq.errors import DuemqError
from duemq_cli import completion, times
from duemq_cli.commands.offsets import dry_run_option
from duemq_cli.commands.timer import bulk
from duemq_cli.commands.timer.prefixes import key_prefix_option
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options, yes_option
from duemq_cli.text import local_time

F = TypeVar("F", bound=Callable[..., Any])


def _time_options(command: F) -> F:
    """Adds when what a bulk change is about is due."""
    moment: dict[str, Any] = {"metavar": "TIME", "callback": bulk.at_that_time}
    command = click.option("--to", "until", help="Due before.", **moment)(
        dry_run_option(yes_option(bulk.request_id_option(command)))
    )
    return click.option("--from", "since", help="Due then or later.", **moment)(command)


def _which_options(command: F) -> F:
    """Adds what a bulk change is about."""
    return key_prefix_option(_time_options(command))


_topic = click.option(
    "--topic", metavar="TOPIC", shell_complete=completion.topics, help="Of the timer keys."
)


@click.command()
@click.argument("handles", metavar="[HANDLE]...", nargs=-1)
@_topic
@click.option("--timer-key", "keys", metavar="KEY", multiple=True, help="May be repeated.")
@click.option("--all", "all_", is_flag=True, help="All that is pending of --topic.")
@_which_options
@session_options
@pass_session
def cancel(
    session: Session,
    /,
    handles: tuple[str, ...],
    topic: str | None,
    keys: tuple[str, ...],
    all_: bool,
    key_prefix: str,
    **job: Any,
) -> Exit:
    """Cancel delayed messages by the handles that `duemq send` printed, or by their timer keys.

    Answers cancelled (it will never be delivered), fired (too late) or unknown, a line a message;
    the exit code is 0 only if all are cancelled.  The handle of a message that was rescheduled,
    shifted or moved since is cancelled, too, and the message comes all the same: it has another
    one.  With --json: handle, outcome; by key topic, timer_key, outcome.

    With --all or --key-prefix: all that is pending of a topic by now, by due time, too; what comes
    meanwhile stays.  It goes on at the timer shards, and is not called off by Ctrl-C.  The exit
    code is 5 if one is away: its part is missing; with the --request-id that is printed then the
    same command goes on, for a day.  With --json: count, dry_run; request_id where a part is
    missing.

    \b
    Examples:
      duemq timer cancel dmq1AAECAwQFBgc…
      duemq timer cancel --topic reminders --timer-key order-17 --timer-key order-18
      duemq timer cancel --topic reminders --key-prefix customer-7/ --dry-run
      duemq timer cancel --topic reminders --all --from 2030-01-31T09:00:00Z --yes
    """
    if all_ or key_prefix:
        if topic is None or handles or keys or (all_ and key_prefix):
            raise click.UsageError("--all and --key-prefix go with --topic, and neither with both.")
        name = topic
        return bulk.change(
            session,
            "Cancel",
            "cancelled",
            lambda admin, **how: admin.cancel_pending(name, key_prefix=key_prefix, **how),
            **job,
        )
    if any(job.values()):
        raise click.UsageError(
            "--from, --to, --dry-run, --yes and --request-id go with --all or --key-prefix."
        )
    _one_of(bool(handles), topic, bool(keys))
    session.changes()
    with session.admin() as admin:
        outcomes = _told(session, handles, topic, keys, admin.cancel)
    return Exit.OK if outcomes == {CancelOutcome.CANCELLED} else Exit.FAILED


@click.command()
@click.option(
    "--topic", metavar="TOPIC", required=True, shell_complete=completion.topics, help="Of this one."
)
@click.option(
    "--by", metavar="TIME", required=True, callback=times.shift, help="Later: 1h; sooner: -5m …"
)
@_which_options
@session_options
@pass_session
def shift(
    session: Session,
    /,
    topic: str,
    by: str,
    key_prefix: str,
    **job: Any,
) -> Exit:
    """Make the delayed messages that are pending of TOPIC due later, or sooner.

    What would be due by now is due at once.  Each message has a new handle then.  Only what is
    pending by now is shifted, each once.  It goes on at the timer shards, and is not called off by
    Ctrl-C.  The exit code is 5 if one is away: its part is missing.  Say the same with the
    --request-id that is printed then, within a day, when it is there: without, the others would
    shift theirs again.  With --json: count, dry_run; request_id where a part is missing.

    \b
    Examples:
      duemq timer shift --topic reminders --by 1h --dry-run
      duemq timer shift --topic reminders --key-prefix customer-7/ --by -30m --yes
    """
    return bulk.change(
        session,
        f"Shift by {by}",
        "shifted",
        lambda admin, **how: admin.shift_pending(topic, by, key_prefix=key_prefix, **how),
        **job,
    )


@click.command()
@click.option(
    "--topic", metavar="TOPIC", required=True, shell_complete=completion.topics, help="Of this one."
)
@click.option(
    "--to-topic",
    metavar="TOPIC",
    required=True,
    shell_complete=completion.topics,
    help="Where they go instead.",
)
@_time_options
@session_options
@pass_session
def move(
    session: Session,
    /,
    topic: str,
    to_topic: str,
    **job: Any,
) -> Exit:
    """Let the delayed messages that are pending of TOPIC go to another one when they are due.

    Say because TOPIC was deleted: they wait for it for ever.  Each message has a new handle then.
    Messages with a timer key stay: send these anew.  Only what is pending by now is moved, each
    once.  It goes on at the timer shards, and is not called off by Ctrl-C.  The exit code is 5 if
    one is away: its part is missing; with the --request-id that is printed then the same command
    goes on, for a day.  With --json: count, dry_run; request_id where a part is missing.

    \b
    Examples:
      duemq timer move --topic reminders --to-topic reminders.v2 --dry-run
      duemq timer move --topic reminders --to-topic archive --from 2030-01-31T09:00:00Z --yes
    """
    return bulk.change(
        session,
        f"Move to {to_topic}",
        "moved",
        lambda admin, **how: admin.move_pending(topic, to_topic, **how),
        **job,
    )


def _told(
    session: Session,
    handles: tuple[str, ...],
    topic: str | None,
    keys: tuple[str, ...],
    ask: Callable[..., Any],
) -> set[enum.StrEnum]:
    """Prints what became of each: where not all are known, of those that are."""
    by_key = {} if topic is None else {"key": [(topic, key) for key in keys]}
    asked = () if by_key else (list(handles),)
    names, outcomes = handles or keys, dict[int, enum.StrEnum]()
    try:
        outcomes = dict(enumerate(ask(*asked, **by_key)))
    except DuemqError as error:
        outcomes = dict(error.answers)
        raise
    finally:
        for at, outcome in sorted(outcomes.items()):
            row = {"topic": topic, "timer_key": names[at]} if keys else {"handle": names[at]}
            session.output.record(row | {"outcome": outcome.value}, f"{outcome.value}  {names[at]}")
    return set(outcomes.values())


@click.command()
@click.argument("handles", metavar="[HANDLE]...", nargs=-1)
@_topic
@click.option("--timer-key", "keys", metavar="KEY", multiple=True, help="May be repeated.")
@session_options
@pass_session
def fire(
    session: Session, handles: tuple[str, ...], topic: str | None, keys: tuple[str, ...]
) -> Exit:
    """Deliver delayed messages now, each once, by their handles or their timer keys.

    Answers fired (by this command), fired_before or unknown, a line a message; the exit code is 0
    only if all are fired.  A cancel by the handle answers fired from then on.  In a topic that is
    held it waits until that is resumed.  With --json: handle, outcome; by key topic, timer_key,
    outcome.

    \b
    Examples:
      duemq timer fire dmq1AAECAwQFBgc…
      duemq timer fire --topic reminders --timer-key order-17 --timer-key order-18
    """
    _one_of(bool(handles), topic, bool(keys))
    session.changes()
    with session.admin() as admin:
        outcomes = _told(session, handles, topic, keys, admin.fire)
    return Exit.OK if outcomes == {FireOutcome.FIRED} else Exit.FAILED


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
    at: times.Due | None,
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
