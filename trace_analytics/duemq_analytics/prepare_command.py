"""`prepare`: an archive of the classes that a report needs, so that Spark starts sooner."""

from __future__ import annotations

import argparse
import json
import subprocess
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duemq.errors import Rejected
from duemq_analytics import java_archive, session, temporary
from duemq_analytics.bench import message
from duemq_analytics.lake_commands import with_spark
from duemq_analytics.progress import StepProgress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_ENDS_S_MAX = 120
_MESSAGES = 20


def add_prepare(commands: Any) -> None:
    """The command `prepare`."""
    parser = commands.add_parser(
        "prepare",
        help="let the other commands start sooner",
        description="Runs a report of made-up spans and keeps the Java classes that it needed, "
        "some 200 MB, in ~/.cache/duemq (XDG_CACHE_HOME).  Once for a Java and a Spark.",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=prepare)


def prepare(arguments: argparse.Namespace, scratch: Path) -> int:
    """Writes the archive; answers the exit code."""
    if session.submitted() or session.master_in_arguments():
        raise Rejected(
            "prepare starts a Java of its own: run it without spark-submit, and without a --master "
            "in PYSPARK_SUBMIT_ARGS"
        )
    archive = java_archive.place(session.require_java())
    if archive is None:
        raise Rejected("there is no folder to keep it in: set HOME or XDG_CACHE_HOME")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with temporary.folder(archive.parent) as folder:
        made = folder / archive.name
        _make(made, scratch, StepProgress(quiet=arguments.json))
        made.replace(archive)
    size = archive.stat().st_size
    if arguments.json:
        print(json.dumps({"event": "prepared", "archive": str(archive), "bytes": size}))
    else:
        print(f"{size / 1e6:,.0f} MB in {archive}")
    return 0


def _make(made: Path, scratch: Path, progress: StepProgress) -> None:
    try:
        with_spark(
            "duemq trace prepare",
            scratch,
            partial(_report, scratch=scratch),
            progress,
            quick=True,
            java_options=java_archive.making(made),
        )
        with progress.step("keeping what was loaded"):
            code = _end_java()
    finally:
        _kill_java()  # it would yet write, when this process ends
    if code or not made.is_file():
        raise Rejected("Java kept nothing: is there space for 200 MB, and is it a HotSpot?")


def _report(spark: SparkSession, scratch: Path) -> int:
    """The first report of a lake, and one more, which counts other things."""
    from duemq_analytics import lake_report
    from duemq_analytics.lake.parquet_spans import ParquetSpans
    from duemq_analytics.lake.span_writer import MESSAGES_SCHEMA

    now, lake = datetime.now(UTC), scratch / "lake"
    for run in range(2):
        rows = [("b", 0, i, message(i), now) for i in range(run, _MESSAGES, 2)]
        ParquetSpans(lake).land(f"prepare-{run:010}", spark.createDataFrame(rows, MESSAGES_SCHEMA))
        lake_report.write(spark, lake, str(scratch / "report"), now=now)
    return 0


def _end_java() -> int:
    """Java's exit code, when it has ended, which it does with its standard input."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        return int(gateway.proc.wait(JAVA_ENDS_S_MAX))
    except subprocess.TimeoutExpired:
        raise Rejected(f"Java has not ended within {JAVA_ENDS_S_MAX} s") from None


def _kill_java() -> None:
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    if gateway is not None:
        gateway.proc.kill()
        gateway.proc.wait()
