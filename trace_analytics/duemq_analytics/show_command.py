"""`duemq trace show`: one message's waterfall, without Spark or Java."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta

import click

from duemq import PullConsumer
from duemq.descriptions import TopicDescription
from duemq.errors import InvalidArgument, MissingBroker, TopicNotFound
from duemq.protocol import due, message_ids, moments
from duemq.protocol.names import TRACE_TOPIC
from duemq_analytics.waterfall import drawing
from duemq_analytics.waterfall.message_spans import MessageSpans
from duemq_analytics.waterfall.places import CLOCKS_APART
from duemq_analytics.waterfall.trace_scan import TraceScan
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_cli.text import local_time

SINCE = "1h"
WIDTH = 100


@click.command()
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option(
    "--since",
    metavar="TIME",
    default=SINCE,
    show_default=True,
    help="Spans stored then or later: how long ago (2h, 7d), RFC 3339, or epoch milliseconds.",
)
@session_options
@pass_session
def show(session: Session, message_id: str, since: str) -> Exit:
    """Draw what happened to a message, from its sending to its callbacks: a bar for each span.

    Reads what %TRACE% has since then, twice; an id that the SDK made says when it was, and what was
    stored earlier is read only if nothing is found.  Times are ms from the first span's start.

    The exit code is 4 if there is no span of it, 5 if a broker is away.  With --json, a line for
    each span, with the columns of `duemq-spans`, and {missing_brokers}, [{broker, error}].

    \b
    Examples:
      duemq trace show 5f0c…
      duemq trace show 5f0c… --since 1d --json
    """
    now_ms = time.time_ns() // 1_000_000
    begins_ms = _begins_ms(since, message_id, now_ms)
    with session.admin() as admin:
        try:
            described = admin.describe_topic(TRACE_TOPIC)
        except TopicNotFound:
            session.output.note(f"no spans: there is no topic {TRACE_TOPIC}, nobody traces to it")
            return Exit.NOT_FOUND
    for since_ms in begins_ms:
        gathered, silent = _looked_through(session, described, message_id, since_ms)
        if gathered.found:
            break
    missing = (*described.missing, *silent)
    _print(session, gathered)
    session.output.note(
        f"{gathered.looked_at:,} spans stored since {local_time(since_ms)} were looked at"
        + (f", {len(gathered.undecodable):,} messages are no spans" if gathered.undecodable else "")
    )
    session.output.missing(missing)
    if missing:
        return Exit.PARTIAL
    return Exit.OK if gathered.found else Exit.NOT_FOUND


def _looked_through(
    session: Session, described: TopicDescription, message_id: str, since_ms: int
) -> tuple[MessageSpans, tuple[MissingBroker, ...]]:
    """The message's spans among those stored since then, and who went silent."""
    consumer = PullConsumer(nameserver=session.nameserver, settings=session.consumer_settings())
    gathered = MessageSpans(message_id)
    with TraceScan(consumer, described, since_ms) as scan:
        for look in (gathered.look_for_id, gathered.look_for_frames):
            for each in scan.messages():
                look(each.body, each.broker, each.queue, each.offset)
            if not gathered.found:
                break
    return gathered, scan.missing


def _print(session: Session, gathered: MessageSpans) -> None:
    spans = gathered.in_order()
    if session.json:
        session.output.table((), spans, empty="")
    elif spans:
        begin_ms = spans[0]["start_ns"] // 1_000_000
        click.echo(f"message {gathered.message_id}, from {local_time(begin_ms)}")
        width = shutil.get_terminal_size((WIDTH, 0)).columns
        click.echo("\n".join(drawing.lines(spans, width)))
    else:
        session.output.note(
            f"no spans of message {gathered.message_id}: not sampled, not traced to {TRACE_TOPIC}"
            " or stored earlier (--since)"
        )


def _begins_ms(since: str, message_id: str, now_ms: int) -> list[int]:
    """From when on spans are read, and if there are none of it, from when on then.

    Its producer's clock made the id, and may be ahead.  Raises InvalidArgument.
    """
    try:
        since_ms = now_ms - due.delay_ms(since)
    except InvalidArgument:
        since_ms = moments.epoch_ms(since, now_ms, "since")
    since_ms = max(0, since_ms)
    made_ms = message_ids.begun_ms(message_id)
    if made_ms is None or made_ms >= now_ms:
        return [since_ms]
    soonest_ms = made_ms - CLOCKS_APART // timedelta(milliseconds=1)
    return [soonest_ms, since_ms] if soonest_ms > since_ms else [since_ms]
