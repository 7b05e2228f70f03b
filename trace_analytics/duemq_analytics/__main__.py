"""`python -m duemq_analytics report`: the traces of a cluster as tables and a page.

Also as a job of `spark-submit`, whose master and settings then hold.

Exit codes: 0 done; 1 the traces could not be read, or nothing written; 2 wrong usage, or Java or a
package is missing; 130 interrupted; 143 ended by SIGTERM (`land`: 0).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from duemq_analytics import loading

if __name__ == "__main__":
    loading.begin()  # before what takes a second to load

from duemq.errors import Corrupt, DuemqError, InvalidArgument, Rejected, TopicNotFound
from duemq.protocol.names import TRACE_TOPIC
from duemq.settings import default_nameserver
from duemq_analytics import (
    bench,
    lake_commands,
    options,
    output,
    prepare_command,
    session,
    sink_bench,
    source_bench,
    temporary,
)
from duemq_analytics.failures import cause, one_line
from duemq_analytics.lake_commands import QUICK_SPANS_MAX
from duemq_analytics.progress import StepProgress, tasks_of
from duemq_analytics.source.client import QueueClient
from duemq_analytics.waterfall.places import CLOCKS_APART

INTERRUPTED = "interrupted"

SOURCE_OPTION = "failOnDataLoss=false"
# What a command has in its place.
INSTEAD = {"land": "--skip-lost", "report": "trace land --skip-lost, then trace report --lake"}

BATCH_SPANS_MAX = 512
"""Spans in one trace message, at most."""

PIECES_MAX = 5_000
"""Partitions in which a report reads the topic, and one a queue more: below `plan.PARTITIONS_MAX`,
however many messages there are.  Each process that traces may add one a second."""

REACH_TIMEOUT_S = 10
"""For the first answer of the cluster."""

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from duemq_analytics.report import Landed, Summary


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; answers the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        loading.over()
        with _ended_by_sigterm(), temporary.folder() as folder:
            code: int = arguments.run(arguments, folder)
            return code
    except InvalidArgument as error:
        return _failed(arguments, error, 2)
    except (DuemqError, OSError) as error:
        return _failed(arguments, error, 1)
    except session.JavaMissing as error:
        return _failed(arguments, error, 2)
    except ModuleNotFoundError as error:
        text = f"{error.name} is missing: pip install duemq-analytics"
        return _failed(arguments, text, 2)
    except KeyboardInterrupt:
        return _failed(arguments, INTERRUPTED, 130)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM raises SystemExit, so that what is temporary goes.

    Where somebody handles or ignores it already, it stays so.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one waits for nothing
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m duemq_analytics")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="aggregate the traces into Parquet tables and one HTML page",
        description="Reads spans from a cluster's trace topic, or from a folder that an earlier "
        "report wrote, and writes OUTPUT/report.html and the tables spans, quarantine, operations, "
        "end_to_end and lateness (Parquet).",
    )
    source = report.add_mutually_exclusive_group()
    source.add_argument(
        "--nameserver",
        metavar="HOST:PORT[,…]",
        default=default_nameserver(),
        help="cluster to read (default: DUEMQ_NAMESERVER, else %(default)s)",
    )
    source.add_argument("--spans", metavar="DIR", help="read Parquet spans instead")
    source.add_argument(
        "--lake",
        metavar="DIR",
        help="of what `land` has landed there: counts what is new, then reads the tables only",
    )
    report.add_argument(
        "--since", metavar="TIME", type=lake_commands.length, help="only the last 2h, 7d, …"
    )
    report.add_argument(
        "--recompute", action="store_true", help="with --lake: count all that is landed again"
    )
    report.add_argument(
        "--output",
        metavar="DIR",
        required=True,
        help="made if missing; DIRs are folders or whatever Hadoop has, like s3a://bucket/folder",
    )
    report.add_argument("--topic", action="append", help="only this topic; may be repeated")
    report.add_argument("--trace-topic", default=TRACE_TOPIC, help="default: %(default)s")
    report.add_argument("--json", action="store_true", help="print the result as one JSON object")
    report.set_defaults(run=_report)
    lake_commands.add_land(commands)
    lake_commands.add_compact(commands)
    prepare_command.add_prepare(commands)
    bench.add_bench(commands)
    sink_bench.add_sink_bench(commands)
    source_bench.add_source_bench(commands)
    return parser


def _report(arguments: argparse.Namespace, scratch: Path) -> int:
    if arguments.lake is not None:
        return lake_commands.report(arguments, scratch, _tell)
    if arguments.recompute:
        raise InvalidArgument("--recompute goes with --lake", field="recompute")
    if arguments.spans is None:
        lake_commands.require_no_lake("output", arguments.output)
    if not session.submitted():
        session.require_java()
    begin = None if arguments.since is None else datetime.now(UTC) - arguments.since
    spans, reading = _size(arguments, begin)
    quick = spans <= QUICK_SPANS_MAX
    with StepProgress(quiet=arguments.json).step("starting Spark"):
        spark = session.start(
            "duemq trace report", scratch, quick=quick, sources=arguments.spans is None
        )
    try:
        return _write(arguments, spark, begin, reading)
    finally:
        session.stop(spark)


def _size(
    arguments: argparse.Namespace, begin: datetime | None
) -> tuple[int, Mapping[str, object]]:
    """About how many spans there are, and options to read those that started since `begin`.

    Says what is wrong with the source before Java starts.
    """
    if arguments.spans is not None:
        return _rows_of(arguments.spans), {}
    starting = options.EARLIEST
    settings = options.parse(
        {"nameserver": arguments.nameserver, "timeoutSeconds": str(REACH_TIMEOUT_S)},
        topic=arguments.trace_topic,
    )
    try:
        with QueueClient.of(settings) as client:
            queues = client.queues(settings)
            if begin is not None:
                since_ms = round((begin - CLOCKS_APART).timestamp() * 1_000)
                starts = client.starts_since(settings.topic, queues, since_ms)
                queues = [replace(q, first=starts[q.broker][str(q.queue)]) for q in queues]
                starting = json.dumps(starts)
    except TopicNotFound as error:
        raise Rejected(
            f"there are no traces: topic {settings.topic} does not exist. Turn tracing on with "
            "--tracing duemq for services and DUEMQ_TRACING=duemq for clients"
        ) from error
    messages = sum(queue.past - queue.first for queue in queues)
    piece = max(options.TRACE_RECORDS_PER_PARTITION, -(-messages // PIECES_MAX))
    reading = {"startingOffsets": starting, "maxRecordsPerPartition": piece}
    return messages * BATCH_SPANS_MAX, reading


def _rows_of(folder: str) -> int:
    """Of Parquet files in a local folder; those elsewhere are taken for many."""
    import pyarrow as pa
    from pyarrow import dataset

    if output.is_uri(folder):
        return QUICK_SPANS_MAX + 1
    if not Path(folder).is_dir():
        raise InvalidArgument(f"--spans: {folder} is no folder", field="spans", value=folder)
    try:
        rows: int = dataset.dataset(folder, format="parquet").count_rows()
    except pa.ArrowException as error:
        raise Corrupt(f"--spans: {one_line(error)}", field="spans", value=folder) from error
    return rows


def _write(
    arguments: argparse.Namespace,
    spark: SparkSession,
    begin: datetime | None = None,
    reading: Mapping[str, object] | None = None,
) -> int:
    from py4j.protocol import Py4JError
    from pyarrow import ArrowException
    from pyspark.errors import PySparkException

    from duemq_analytics import report

    # Under spark-submit both streams are one: what a program reads must be the result alone.
    progress = StepProgress(tasks_of(spark), quiet=arguments.json)
    try:
        landed = _land(arguments, spark, progress, begin, reading or {})
        summary = report.write(landed, arguments.output, now=datetime.now(UTC), progress=progress)
    except (PySparkException, Py4JError, ArrowException, ConnectionRefusedError) as error:
        return _failed(arguments, session.java_ended(spark, error) or cause(error), 1)
    _tell(arguments, summary, spark.sparkContext.master)
    return 0


def _tell(arguments: argparse.Namespace, summary: Summary, master: str) -> None:
    if arguments.json:
        print(json.dumps(_result(summary) | {"master": master}))
        return
    print(f"{summary.spans:,} spans of {len(summary.topics)} topics: {summary.html}")
    if summary.undecodable:
        print(f"{summary.undecodable:,} messages could not be decoded: see quarantine")


def _land(
    arguments: argparse.Namespace,
    spark: SparkSession,
    progress: StepProgress,
    begin: datetime | None,
    reading: Mapping[str, object],
) -> Landed:
    """The spans that started since `begin`; of the topic, with the options `reading`."""
    from pyspark.sql import functions as F

    from duemq_analytics import report
    from duemq_analytics.source import schema

    wanted = F.col("topic").isin(arguments.topic) if arguments.topic else F.lit(True)
    if begin is not None:
        wanted &= F.col("start_ts") >= F.lit(begin)
    if arguments.spans is not None:
        # Not as the files have it: older ones lack columns.
        spans = spark.read.schema(schema.ddl(schema.SPANS)).parquet(arguments.spans)
        return report.Landed(spans.where(wanted))
    reader = spark.read.format("duemq-spans").option("nameserver", arguments.nameserver)
    reader = reader.option("topic", arguments.trace_topic).options(**reading)
    rows = reader.option("undecodable", "rows").load()
    kept = rows.where(wanted | rows.undecodable_reason.isNotNull())
    with progress.step("reading spans"):
        return report.land(spark, kept, arguments.output, datetime.now(UTC))


def _result(summary: Summary) -> dict[str, Any]:
    return {
        "event": "report",
        "html": summary.html,
        "tables": list(summary.tables),
        "spans": summary.spans,
        "undecodable": summary.undecodable,
        "topics": list(summary.topics),
        "first": summary.first.isoformat() if summary.first else None,
        "last": summary.last.isoformat() if summary.last else None,
    }


def _failed(arguments: argparse.Namespace, error: object, code: int) -> int:
    # What the source names is an option of its own, which no command here has.
    instead = INSTEAD.get(arguments.command, SOURCE_OPTION)
    fields = _fields(error)
    fields["message"] = fields["message"].replace(SOURCE_OPTION, instead)
    if arguments.json:
        print(json.dumps({"error": fields}))
    said = str(error).replace(SOURCE_OPTION, instead)
    print(f"trace {arguments.command}: {said}", file=sys.stderr)
    return code


def _fields(error: object) -> dict[str, str]:
    """As all commands of `duemq` say it."""
    if error == INTERRUPTED:
        return {"code": "INTERRUPTED", "message": INTERRUPTED}
    if not isinstance(error, DuemqError):
        return {"code": "FAILED", "message": str(error)}
    fields = {"code": error.code.name, "message": error.message}
    named = {"field": error.field, "value": error.value, "limit": error.limit}
    return fields | {name: str(value) for name, value in named.items() if value}


if __name__ == "__main__":
    sys.exit(main())
