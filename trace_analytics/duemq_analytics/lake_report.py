"""The report of a lake: the same page, made of its minutes instead of spans.

New batches are counted first; then only the tables are read, whatever was landed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duemq_analytics import charts, output
from duemq_analytics.answers.buckets import MINUTE_S, WHOLE_S
from duemq_analytics.answers.percentiles import CURVE, NAMED
from duemq_analytics.lake import measures
from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.progress import Progress
from duemq_analytics.report import (
    Row,
    Summary,
    Table,
    bucket_s,
    busiest,
    in_order,
    ms,
    page,
    rows_of,
    table_of,
    text,
)

GRACE_S = 300
"""A message is a suspect when it was expected so long before the newest span."""

EXAMPLES_SHOWN = 20

_US_PER_MS = 1_000
_PAGE_TABLES = {"duration": "operations", "end_to_end": "end_to_end", "lateness": "lateness"}


def write(
    spark: SparkSession,
    lake: Path,
    folder: str,
    *,
    now: datetime,
    since: timedelta | None = None,
    topics: Sequence[str] = (),
    recompute: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Brings the lake's tables up to date and writes FOLDER/report.html.

    `since`: only the minutes of so long before `now`.  Hold the lock `aggregating`.
    """
    progress = progress or Progress()
    spans = ParquetSpans(lake)
    aggregates = Aggregates(lake, spans)
    run = (aggregates.rebuild if recompute else aggregates.update)(spark, progress)
    wanted = _wanted(now - since if since is not None else None, topics)
    minutes = aggregates.minutes(spark).where(wanted).cache()
    try:
        with progress.step("merging minutes"):
            facts = _facts(minutes)
            fine_s = max(MINUTE_S, bucket_s(facts["first"], facts["last"])) if facts["spans"] else 0
            old = F.col("bucket_ts") <= F.timestamp_micros(F.lit(_settled_us(run.newest_us)))
            lost = F.when(old, F.col("unreceived")).otherwise(0)
            merged = measures.merged(
                minutes.withColumn("unreceived", lost), sorted({WHOLE_S, fine_s})
            )
            found = [_shown(row) for row in merged.drop("sketch").toArrow().to_pylist()]
            examples = aggregates.examples(spark).where(wanted)
            picked = _examples(examples.where((F.col("kind") == "slowest") | old))
    finally:
        minutes.unpersist()
    rows = {
        name: in_order([row for row in found if row["measure"] == measure])
        for measure, name in _PAGE_TABLES.items()
    }
    facts["topics"] = busiest(rows["operations"])
    facts["undecodable"] = spans.totals()["undecodable"]
    whole = rows_of(found, WHOLE_S)
    html = output.child(folder, "report.html")
    with progress.step("drawing"):
        drawn = page(facts, rows, fine_s, now, _tiles(whole), _tables(whole, picked))
        output.write_text(spark, html, drawn)
    return Summary(
        html,
        (str(lake / "minutes"), str(lake / "examples")),
        facts["spans"],
        facts["undecodable"],
        tuple(facts["topics"]),
        facts["first"],
        facts["last"],
    )


def _wanted(begin: datetime | None, topics: Sequence[str]) -> Column:
    chosen = F.col("topic").isin(list(topics)) if topics else F.lit(True)
    if begin is None:
        return chosen
    minute = begin.astimezone(UTC).replace(second=0, microsecond=0)
    return chosen & (F.col("bucket_ts") >= F.lit(minute))


def _settled_us(newest_us: int) -> int:
    """The last minute, Unix µs, whose messages should have come by the newest span."""
    return newest_us - GRACE_S * 1_000_000 - measures.US_PER_MINUTE


def _facts(minutes: DataFrame) -> Row:
    of_spans = minutes.where(F.col("measure") == "duration")
    facts: Row = (
        of_spans.agg(
            F.coalesce(F.sum("spans"), F.lit(0)).alias("spans"),
            F.min("bucket_ts").alias("first"),
            F.max("bucket_ts").alias("last"),
        )
        .toArrow()
        .to_pylist()[0]
    )
    for name in ("first", "last"):
        facts[name] = charts.moment(facts[name]) if facts[name] is not None else None
    if facts["last"] is not None:
        facts["last"] += timedelta(seconds=MINUTE_S)
    return facts


def _shown(row: Mapping[str, Any]) -> Row:
    """A merged row as the page takes it."""
    curve = None if row["curve_us"] is None else [us / _US_PER_MS for us in row["curve_us"]]
    shown = {**row, "curve": curve, "stage": row["operation"]}
    shown["error_rate"] = row["errors"] / row["spans"] if row["spans"] else 0.0
    shown["max_ms"] = None if row["max_us"] is None else row["max_us"] / _US_PER_MS
    for percentile in NAMED:
        value = None if curve is None else curve[CURVE.index(percentile)]
        shown[f"p{percentile}_ms"] = value
    return shown


def _examples(examples: DataFrame) -> list[Row]:
    """The slowest of all, and the suspects that were sent last."""
    found: list[Row] = []
    for kind, order in (("slowest", F.desc("us")), ("suspect", F.desc("sent_ts"))):
        rows = examples.where(F.col("kind") == kind).orderBy(order, "message_id")
        found += rows.limit(EXAMPLES_SHOWN).toArrow().to_pylist()
    return found


def _tiles(whole: Sequence[Row]) -> list[tuple[str, str]]:
    def total(name: str) -> int:
        return sum(row[name] for row in whole)

    return [
        ("sent, never received", charts.number(total("unreceived"))),
        ("retries", charts.number(total("retries"))),
        ("dead letters", charts.number(total("dead_letters"))),
    ]


def _tables(whole: Sequence[Row], examples: Sequence[Row]) -> list[Table]:
    by_topic = sorted(whole, key=lambda row: (row["topic"], row["consumer_group"] or ""))
    return [
        table_of(
            "Deliveries",
            "Messages that were accepted, and those of them that no callback has had: suspects. "
            "Cancelled ones are among them, and so are those of consumers that do not trace.",
            (
                ("topic", "topic", text),
                ("accepted", "messages", charts.number),
                ("never received", "unreceived", charts.number),
            ),
            [row for row in by_topic if row["measure"] == "delivery"],
        ),
        table_of(
            "Retries and dead letters",
            "Calls after a message's first one, and messages that were given up.",
            (
                ("topic", "topic", text),
                ("operation", "operation", text),
                ("group", "consumer_group", text),
                ("retries", "retries", charts.number),
                ("dead letters", "dead_letters", charts.number),
            ),
            [row for row in by_topic if row["retries"] or row["dead_letters"]],
        ),
        table_of(
            "Slowest messages",
            "From the start of the send to the start of the first callback.",
            (*_MESSAGE, ("end to end", "us", lambda us: ms(us / _US_PER_MS))),
            [row for row in examples if row["kind"] == "slowest"],
        ),
        table_of(
            "Suspects",
            "Sent, and never received so far; the latest ones.",
            tuple(column for column in _MESSAGE if column[1] != "consumer_group"),
            [row for row in examples if row["kind"] == "suspect"],
        ),
    ]


def _time(value: datetime) -> str:
    return f"{charts.moment(value):%Y-%m-%d %H:%M:%S.%f}"[:-3]


_MESSAGE = (
    ("topic", "topic", text),
    ("message", "message_id", text),
    ("group", "consumer_group", text),
    ("sent (UTC)", "sent_ts", _time),
)
