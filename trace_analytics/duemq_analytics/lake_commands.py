"""Jobs over a lake: `land`, `compact` and `report --lake` of `python -m duemq_analytics`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duemq.errors import InvalidArgument, Rejected
from duemq.protocol import due
from duemq.protocol.names import TRACE_TOPIC
from duemq.settings import default_nameserver
from duemq_analytics import options, output, session
from duemq_analytics.failures import cause
from duemq_analytics.progress import StepProgress, tasks_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from duemq_analytics.lake.span_table import Batch
    from duemq_analytics.report import Summary

EVERY_DEFAULT = "1m"
EVERY_MS_MIN = 1_000
LENGTH_MAX = timedelta(days=36_500)
KEEP_MIN = timedelta(hours=3)
"""A minute is counted again up to an hour after it, of messages that were sent up to an hour before
it; and what is landed is not of this moment."""

AHEAD_MAX = timedelta(days=1)
"""Minutes that are further ahead are of wrong clocks: `--keep` does not keep them."""

MESSAGES_PER_BATCH = 10_000
"""Of the trace topic; each holds up to 512 spans."""


QUICK_SPANS_MAX = 250_000
"""Up to here a quickly compiled Spark beats a well optimized one."""

LAKE_QUICK_SPANS_MAX = 10_000_000
"""The same of a lake, whose spans are counted in a few short jobs.  Measured with 1M: 35 s of CPU
instead of 60."""

Tell = Callable[[argparse.Namespace, "Summary", str], None]
"""Prints the result of a report; the last is Spark's master."""


class Stopped(Exception):
    """SIGTERM: the job ends; what it has not finished is done again by the next one."""


def add_land(commands: Any) -> None:
    """The command `land`."""
    parser = commands.add_parser(
        "land",
        help="land the spans of the trace topic in a lake, exactly once",
        description="Reads the trace topic as a stream and writes OUTPUT/spans by date and hour "
        "(Parquet).  Offsets are kept in OUTPUT/_checkpoint: each run goes on where the last one "
        "ended, however it ended.  Messages that cannot be decoded go to OUTPUT/quarantine.",
    )
    parser.add_argument(
        "--nameserver",
        metavar="HOST:PORT[,…]",
        default=default_nameserver(),
        help="cluster to read (default: DUEMQ_NAMESERVER, else %(default)s)",
    )
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="the lake: a folder all tasks reach"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="land what is there now, then end")
    how.add_argument(
        "--every",
        metavar="TIME",
        default=EVERY_DEFAULT,
        type=every_s,
        help="look for new spans so often, until SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--messages-per-batch",
        type=messages_per_batch,
        default=MESSAGES_PER_BATCH,
        metavar="N",
        help="trace messages (512 spans each) that are landed at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-lost",
        action="store_true",
        help="go on with what is there where messages were deleted before they were landed, or a "
        "broker is lost; else that ends the job",
    )
    parser.add_argument("--trace-topic", default=TRACE_TOPIC, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print a JSON object a batch")
    parser.set_defaults(run=land)


def add_compact(commands: Any) -> None:
    """The command `compact`."""
    parser = commands.add_parser(
        "compact",
        help="merge a lake's small files, drop what is old",
        description="Counts what is new, as a report does; then merges small files of spans "
        "and of quarantine by hour, and runs of the tables.  Safe beside a landing job.",
    )
    parser.add_argument("--lake", metavar="DIR", required=True, help="what `land` has written")
    parser.add_argument(
        "--keep",
        metavar="TIME",
        type=kept,
        help="drop spans, quarantine and minutes of hours that ended so long ago, like 30d, at "
        "least 3h, and minutes more than a day ahead (default: keep all)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=compact)


def length(text: str) -> timedelta:
    """A length of time like 2h or 30d; for argparse."""
    try:
        found = timedelta(milliseconds=due.delay_ms(text))
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from None
    if found > LENGTH_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {LENGTH_MAX.days:,} days")
    return found


def kept(text: str) -> timedelta:
    """A length of time that `compact` may keep; for argparse."""
    found = length(text)
    if found < KEEP_MIN:
        raise argparse.ArgumentTypeError(
            f"{text!r} is shorter than {KEEP_MIN // timedelta(hours=1)}h: minutes that are counted "
            "again would lack messages"
        )
    return found


def every_s(text: str) -> float:
    """A time like 1m or 30s in seconds; for argparse."""
    try:
        milliseconds = due.delay_ms(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from None
    if milliseconds < EVERY_MS_MIN:
        raise argparse.ArgumentTypeError(f"{text!r} is shorter than {EVERY_MS_MIN} ms")
    return milliseconds / 1_000


def messages_per_batch(text: str) -> int:
    """A number of trace messages; for argparse."""
    try:
        return options.integer("messages-per-batch", text, options.OFFSETS_PER_TRIGGER_LIMIT)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from None


def land(arguments: argparse.Namespace, scratch: Path) -> int:
    """Runs until all is landed or, without --once, until SIGTERM; answers the exit code."""
    from duemq_analytics.lake import commits, landing

    lake = folder("output", arguments.output)
    wanted = landing.Landing(
        arguments.nameserver,
        arguments.trace_topic,
        lake,
        None if arguments.once else arguments.every,
        arguments.messages_per_batch,
        fail_on_data_loss=not arguments.skip_lost,
    )
    signal.signal(signal.SIGTERM, _stop)
    with commits.lock(lake, "landing"):
        try:
            # Java only moves bytes here: nothing for its optimizing compiler.
            return with_spark(
                "duemq trace land",
                scratch,
                lambda spark: _land(arguments, spark, wanted),
                StepProgress(quiet=arguments.json),
                quick=True,
            )
        except Stopped:  # before the query was there
            return 0


def _land(arguments: argparse.Namespace, spark: SparkSession, wanted: Any) -> int:
    from duemq_analytics.lake import landing

    spans = undecodable = 0

    def said(batch: Batch) -> None:
        nonlocal spans, undecodable
        spans += batch.spans
        undecodable += batch.undecodable
        if arguments.json:
            print(json.dumps({"event": "batch", **_figures(batch)}), flush=True)
        else:
            print(f"{batch.key}: {batch.spans:,} spans", file=sys.stderr, flush=True)

    query = landing.start(spark, wanted, said)
    try:
        query.awaitTermination()
    except (Stopped, KeyboardInterrupt):
        pass  # A batch that is cut short is landed by the next run.
    finally:
        query.stop()
    figures = {"spans": spans, "undecodable": undecodable}
    if arguments.json:
        print(json.dumps({"event": "landed", "lake": str(wanted.lake), **figures}), flush=True)
    else:
        print(f"{spans:,} spans landed in {wanted.lake}")
        if undecodable:
            print(f"{undecodable:,} messages could not be decoded: see quarantine")
    return 0


def report(arguments: argparse.Namespace, scratch: Path, tell: Tell) -> int:
    """Of a lake; answers the exit code."""
    from duemq_analytics import lake_report
    from duemq_analytics.lake import commits

    lake = existing("lake", arguments.lake)

    def write(spark: SparkSession) -> int:
        summary = lake_report.write(
            spark,
            lake,
            arguments.output,
            now=datetime.now(UTC),
            since=arguments.since,
            topics=arguments.topic or (),
            recompute=arguments.recompute,
            progress=StepProgress(tasks_of(spark), quiet=arguments.json),
        )
        tell(arguments, summary, spark.sparkContext.master)
        return 0

    with commits.lock(lake, "aggregating"):
        quick = not arguments.recompute and _uncounted(lake) <= LAKE_QUICK_SPANS_MAX
        return with_spark(
            "duemq trace report",
            scratch,
            write,
            StepProgress(quiet=arguments.json),
            quick=quick,
            sources=False,
        )


def compact(arguments: argparse.Namespace, scratch: Path) -> int:
    """Counts, merges, drops; answers the exit code."""
    from duemq_analytics.lake import commits
    from duemq_analytics.lake.aggregates import Aggregates
    from duemq_analytics.lake.parquet_spans import ParquetSpans
    from duemq_analytics.lake.span_table import Compacted

    lake = existing("lake", arguments.lake)
    now = datetime.now(UTC)
    keep = arguments.keep and (kept_from(now, arguments.keep), now + AHEAD_MAX)
    keep_from = keep and keep[0]

    def run(spark: SparkSession) -> int:
        spans = ParquetSpans(lake)
        aggregates = Aggregates(lake, spans)
        progress = StepProgress(tasks_of(spark), quiet=arguments.json)
        dropped = Compacted(0, 0, 0)
        if keep_from is not None:
            # A full disk lets nothing be counted or merged.  No minute that stays needs these.
            dropped = spans.expire(aggregates.settled(), keep_from - KEEP_MIN)
        aggregates.update(spark, progress)
        with progress.step("compacting"):
            done = dropped + spans.compact(spark, aggregates.settled(), keep_from)
            aggregates.compact(spark, keep)
        if arguments.json:
            print(json.dumps({"event": "compacted", "lake": str(lake), **asdict(done)}))
        else:
            before, after = done.files_before, done.files_after
            print(f"{before:,} files are {after:,}; {done.expired:,} expired: {lake}")
        return 0

    with commits.lock(lake, "aggregating"):
        return with_spark(
            "duemq trace compact", scratch, run, StepProgress(quiet=arguments.json), sources=False
        )


def kept_from(now: datetime, keep: timedelta) -> datetime:
    """The hour that had not ended `keep` before `now`: files are of hours, minutes go with them."""
    return (now - keep).astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def existing(option: str, path: str) -> Path:
    """The folder of a lake that is there; raises InvalidArgument."""
    lake = folder(option, path)
    if not (lake / "_batches").is_dir():
        raise InvalidArgument(
            f"--{option}: nothing was landed in {path}: duemq trace land --output {path} does",
            field=option,
            value=path,
        )
    return lake


def _uncounted(lake: Path) -> int:
    """Spans that no run has counted."""
    from duemq_analytics.lake.aggregates import Aggregates
    from duemq_analytics.lake.parquet_spans import ParquetSpans

    spans = ParquetSpans(lake)
    settled = Aggregates(lake, spans).settled()
    return sum(batch.spans for batch in spans.batches() if batch.key not in settled)


def _figures(batch: Batch) -> dict[str, Any]:
    return {"key": batch.key, "spans": batch.spans, "undecodable": batch.undecodable}


def with_spark(
    name: str,
    scratch: Path,
    run: Callable[[SparkSession], int],
    progress: StepProgress,
    **how: Any,
) -> int:
    """Runs a job in a session of its own; what Spark says of a failure is one line."""
    from py4j.protocol import Py4JError
    from pyarrow import ArrowException
    from pyspark.errors import PySparkException

    with progress.step("starting Spark"):
        spark = session.start(name, scratch, **how)
    try:
        return run(spark)
    except (PySparkException, Py4JError, ArrowException, ConnectionRefusedError) as error:
        raise Rejected(session.java_ended(spark, error) or cause(error)) from error
    finally:
        session.stop(spark)


def folder(option: str, path: str) -> Path:
    """The folder of a lake; raises InvalidArgument where it would be in an object store."""
    path = _without_scheme(path)
    if output.is_uri(path):
        raise InvalidArgument(
            f"--{option}: {path} is no folder: a lake lies where files can be renamed, on a disk "
            "or a volume that all tasks reach",
            field=option,
            value=path,
            limit="a folder",
        )
    return Path(path).absolute()


def require_no_lake(option: str, path: str) -> None:
    """Raises InvalidArgument where a topic's report would put its spans in place of landed ones."""
    if (Path(_without_scheme(path)) / "_batches").is_dir():
        raise InvalidArgument(
            f"--{option}: {path} is a lake, and a report of the topic would write its spans in "
            f"place of those landed there: name another folder, or report --lake {path}",
            field=option,
            value=path,
            limit="no lake",
        )


def _without_scheme(path: str) -> str:
    if not path.startswith("file:"):
        return path
    return "/" + path.removeprefix("file:").lstrip("/")


def _stop(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # a second one would break off the end
    raise Stopped
