"""`duemq trace`: what the traces tell."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from duemq.settings import nameservers_of
from duemq_analytics import loading
from duemq_analytics.options import OFFSETS_PER_TRIGGER_LIMIT
from duemq_analytics.show_command import show
from duemq_cli import times
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options


def _ago(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A length of time; with the sign that other commands want, too."""
    return times.delay(context, param, value and value.removeprefix("-"))


@click.group()
def trace() -> None:
    """Latency, rates and lateness from the cluster's own traces: landed, aggregated, reported."""


trace.add_command(show)


@trace.command()
@click.option(
    "--output",
    metavar="DIR",
    default="duemq-report",
    show_default=True,
    help="Folder, or a URI like s3a://bucket/folder, for the report and its tables (Parquet).",
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--lake", metavar="DIR", help="Of what `duemq trace land` has landed there.")
@click.option("--since", metavar="TIME", callback=_ago, help="Only the last 2h, 7d, …")
@session_options
@pass_session
def report(
    session: Session, output: str, topics: tuple[str, ...], lake: str | None, since: str | None
) -> int:
    """Aggregate the spans of %TRACE% with Spark: Parquet tables and a one-file HTML report.

    With --lake what is new there is counted, then only the lake's tables are read.

    Spans are there when services and clients trace to DueMQ: `duemq up --tracing duemq`, and
    DUEMQ_TRACING=duemq for clients.  Needs Java 17 and the distribution duemq-analytics.

    The exit code of this command, of `land` and of `compact` is 1 if it failed, also where the
    cluster cannot be reached, and 2 for wrong usage, or if Java or a package is missing.

    \b
    Examples:
      duemq trace report --since 2h --output ./report
      duemq trace report --lake ./lake --since 2h
    """
    arguments = ["--output", output]
    for topic in topics:
        arguments += ["--topic", topic]
    arguments += ["--since", since] if since else []
    source = _cluster(session) if lake is None else ["--lake", lake]
    return _job(session, "report", [*source, *arguments])


@trace.command()
@click.option(
    "--output", metavar="DIR", required=True, help="The lake: a folder that all tasks reach."
)
@click.option("--once", is_flag=True, help="Land what is there now, then end.")
@click.option(
    "--every",
    metavar="TIME",
    callback=times.delay,
    help="Look for new spans so often (1m), until Ctrl-C or SIGTERM.",
)
@click.option(
    "--messages-per-batch",
    "messages",
    type=click.IntRange(1, OFFSETS_PER_TRIGGER_LIMIT),
    help="Trace messages (512 spans each) that are landed at a time (10,000).",
)
@click.option(
    "--skip-lost", is_flag=True, help="Go on where messages were deleted or a broker is lost."
)
@session_options
@pass_session
def land(
    session: Session,
    output: str,
    once: bool,
    every: str | None,
    messages: int | None,
    skip_lost: bool,
) -> int:
    """Land the spans of %TRACE% in a lake, each exactly once, by date and hour (Parquet).

    Goes on where the last run ended, however it ended.

    \b
    Examples:
      duemq trace land --output ./lake --once
      duemq trace land --output ./lake --every 30s
    """
    if once and every:
        raise click.UsageError("--once and --every exclude each other")
    arguments = ["--output", output, *(["--once"] if once else [])]
    arguments += ["--every", every] if every else []
    arguments += ["--messages-per-batch", str(messages)] if messages else []
    arguments += ["--skip-lost"] if skip_lost else []
    return _job(session, "land", [*_cluster(session), *arguments])


@trace.command()
@click.option("--lake", metavar="DIR", required=True, help="What `duemq trace land` has written.")
@click.option(
    "--keep",
    metavar="TIME",
    callback=times.delay,
    help="Drop hours that ended so long ago, like 30d; 3h or more.",
)
@session_options
@pass_session
def compact(session: Session, lake: str, keep: str | None) -> int:
    """Merge a lake's small files, drop what is old; safe beside a landing job.

    \b
    Example:
      duemq trace compact --lake ./lake --keep 30d
    """
    return _job(session, "compact", ["--lake", lake, *(["--keep", keep] if keep else [])])


@trace.command()
@session_options
@pass_session
def prepare(session: Session) -> int:
    """Let `report`, `land` and `compact` start sooner: keeps the Java classes that they need.

    Some 200 MB in ~/.cache/duemq (XDG_CACHE_HOME), once for a Java and a Spark.
    """
    return _job(session, "prepare", [])


def _cluster(session: Session) -> list[str]:
    """With all ports: other commands take addresses without."""
    return ["--nameserver", ",".join(nameservers_of(session.nameserver))]


def _job(session: Session, name: str, arguments: list[str]) -> int:
    """Becomes the job, which prints its result or its error itself: signals are for it then."""
    if importlib.util.find_spec("pyspark") is None:
        session.output.error(f"trace {name} needs pyspark: pip install duemq-analytics")
        return Exit.FAILED
    command = [sys.executable, "-m", "duemq_analytics", name, *arguments]
    if session.json:
        command += ["--json"]
    # Neither the job nor Spark's workers may import what lies in the current folder.
    environment = {**session.environment(), "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    with loading.held_back():
        return os.execve(sys.executable, command, environment)
