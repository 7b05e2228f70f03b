"""`duemq trace`: what the traces tell."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click

from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options


@click.group()
def trace() -> None:
    """Latency, rates and lateness from the cluster's own traces."""


@trace.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("duemq-report"),
    show_default=True,
    help="Folder for the report and its tables (Parquet).",
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@session_options
@pass_session
def report(session: Session, output: Path, topics: tuple[str, ...]) -> int:
    """Aggregate the spans of %TRACE% with Spark: Parquet tables and a one-file HTML report.

    Spans are there when services and clients trace to DueMQ: `duemq up --tracing duemq`, and
    DUEMQ_TRACING=duemq for clients.  Needs Java 17 and the distribution duemq-analytics.

    \b
    Example:
      duemq trace report --output ./report
    """
    if importlib.util.find_spec("pyspark") is None:
        session.output.error("trace report needs pyspark: pip install duemq-analytics")
        return Exit.FAILED
    command = [sys.executable, "-m", "duemq_analytics", "report"]
    command += ["--nameserver", session.nameserver, "--output", str(output)]
    for topic in topics:
        command += ["--topic", topic]
    if session.json:
        command += ["--json"]
    # Neither the job nor Spark's workers may import what lies in the current folder.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    # The job prints the result or its error itself; a process of its own, as Spark brings Java.
    return subprocess.run(command, env=environment, check=False).returncode
