"""`python -m duemq_analytics report`: the traces of a cluster as tables and a page.

Exit codes: 0 done; 1 the traces could not be read; 2 wrong usage, or Java or a package is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duemq.errors import DuemqError, InvalidArgument, Rejected, TopicNotFound
from duemq.protocol.names import TRACE_TOPIC
from duemq.settings import default_nameserver
from duemq_analytics import options
from duemq_analytics.source.client import QueueClient

BATCH_SPANS_MAX = 512
"""Spans in one trace message, at most."""

QUICK_SPANS_MAX = 250_000
"""Up to here a quickly compiled Spark beats a well optimized one."""

REACH_TIMEOUT_S = 10
"""For the first answer of the cluster."""

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; answers the exit code."""
    arguments = _parser().parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="duemq-spark-"))
    try:
        return _report(arguments, scratch)
    except InvalidArgument as error:
        return _failed(arguments, error, 2)
    except DuemqError as error:
        return _failed(arguments, error, 1)
    except ModuleNotFoundError as error:
        text = f"{error.name} is missing: pip install duemq-analytics"
        return _failed(arguments, text, 2)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m duemq_analytics")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="aggregate the traces into Parquet tables and one HTML page",
        description="Reads spans from a cluster's trace topic, or from a folder that an earlier "
        "report wrote, and writes OUTPUT/report.html and the tables spans, operations, "
        "end_to_end and lateness (Parquet).",
    )
    source = report.add_mutually_exclusive_group()
    source.add_argument(
        "--nameserver",
        metavar="HOST:PORT[,…]",
        default=default_nameserver(),
        help="cluster to read (default: DUEMQ_NAMESERVER, else %(default)s)",
    )
    source.add_argument("--spans", metavar="DIR", type=Path, help="read Parquet spans instead")
    report.add_argument("--output", metavar="DIR", type=Path, required=True, help="made if missing")
    report.add_argument("--topic", action="append", help="only this topic; may be repeated")
    report.add_argument("--trace-topic", default=TRACE_TOPIC, help="default: %(default)s")
    report.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def _report(arguments: argparse.Namespace, scratch: Path) -> int:
    from duemq_analytics import session

    try:
        session.require_java()
        quick = _size(arguments) <= QUICK_SPANS_MAX
        spark = session.start("duemq trace report", scratch, quick=quick)
    except session.JavaMissing as error:
        return _failed(arguments, error, 2)
    try:
        return _write(arguments, spark)
    finally:
        spark.stop()


def _size(arguments: argparse.Namespace) -> int:
    """About how many spans there are; says what is wrong with the source before Java starts."""
    if arguments.spans is not None:
        from pyarrow import dataset

        if not arguments.spans.is_dir():
            raise InvalidArgument(
                f"--spans: {arguments.spans} is no folder", field="spans", value=arguments.spans
            )
        spans: int = dataset.dataset(arguments.spans, format="parquet").count_rows()
        return spans
    settings = options.parse(
        {"nameserver": arguments.nameserver, "timeoutSeconds": str(REACH_TIMEOUT_S)},
        topic=arguments.trace_topic,
    )
    try:
        with QueueClient(settings.nameservers, settings.timeout_s) as client:
            queues = client.queues(settings)
    except TopicNotFound as error:
        raise Rejected(
            f"there are no traces: topic {settings.topic} does not exist. Turn tracing on with "
            "--tracing duemq for services and DUEMQ_TRACING=duemq for clients"
        ) from error
    return sum(queue.past - queue.first for queue in queues) * BATCH_SPANS_MAX


def _write(arguments: argparse.Namespace, spark: SparkSession) -> int:
    from pyspark.errors import PySparkException

    from duemq_analytics import report

    try:
        spans = _spans(arguments, spark)
        if arguments.spans is None:
            spans = report.land(spark, spans, arguments.output)
        summary = report.write(spans, arguments.output, now=datetime.now(UTC))
    except PySparkException as error:
        return _failed(arguments, _cause(str(error)), 1)
    if arguments.json:
        print(json.dumps(_result(summary)))
    else:
        print(f"{summary.spans:,} spans of {len(summary.topics)} topics: {summary.html}")
    return 0


def _spans(arguments: argparse.Namespace, spark: SparkSession) -> DataFrame:
    if arguments.spans is not None:
        spans = spark.read.parquet(str(arguments.spans))
    else:
        reader = spark.read.format("duemq-spans").option("nameserver", arguments.nameserver)
        spans = reader.option("topic", arguments.trace_topic).load()
    return spans.where(spans.topic.isin(arguments.topic)) if arguments.topic else spans


def _result(summary: Any) -> dict[str, Any]:
    return {
        "event": "report",
        "html": str(summary.html),
        "tables": [str(table) for table in summary.tables],
        "spans": summary.spans,
        "topics": list(summary.topics),
        "first": summary.first.isoformat() if summary.first else None,
        "last": summary.last.isoformat() if summary.last else None,
    }


def _cause(text: str) -> str:
    """The last line of a worker's Python traceback: what the reader itself said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("duemq.errors.")]
    return told[-1].partition(": ")[2] if told else lines[0] if lines else "Spark failed"


def _failed(arguments: argparse.Namespace, error: object, code: int) -> int:
    if arguments.json:
        print(json.dumps({"error": str(error)}))
    print(f"trace report: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
