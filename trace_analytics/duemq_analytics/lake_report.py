"""The report of a lake: the same page, made of its minutes instead of spans.

New batches are counted first; then only the tables are read, whatever was landed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duemq_analytics import charts, output
from duemq_analytics.answers.buckets import MINUTE_S, WHOLE_S
from duemq_analytics.answers.errors import added_up
from duemq_analytics.answers.percentiles import CURVE, NAMED
from duemq_analytics.lake import measures
from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import File
from duemq_analytics.page.document import Content, document
from duemq_analytics.page.waterfalls import chosen
from duemq_analytics.progress import StepProgress
from duemq_analytics.report import (
    Row,
    Summary,
    Worst,
    bucket_s,
    busiest,
    facts_of,
    in_order,
    most_frequent,
    page_rows,
    seen_until_us,
    spans_of,
)
from duemq_analytics.waterfall.places import CLOCKS_APART

_US_PER_MS = 1_000
_PAGE_TABLES = {
    "duration": "operations",
    "end_to_end": "end_to_end",
    "lateness": "lateness",
    "delivery": "delivery",
}
_P99 = f"curve_us[{CURVE.index(99)}]"
_WORST = {
    "operations": Worst("errors", "measure = 'duration' AND errors > 0"),
    "end_to_end": Worst(_P99, "measure = 'end_to_end'"),
    "lateness": Worst(_P99, "measure = 'lateness'"),
}


def write(
    spark: SparkSession,
    lake: Path,
    folder: str,
    *,
    now: datetime,
    since: timedelta | None = None,
    topics: Sequence[str] = (),
    recompute: bool = False,
    progress: StepProgress | None = None,
) -> Summary:
    """Brings the lake's tables up to date and writes FOLDER/report.html.

    `since`: only the minutes of so long before `now`.  Hold the lock `aggregating`.
    """
    progress = progress or StepProgress()
    spans = ParquetSpans(lake)
    aggregates = Aggregates(lake, spans)
    run = (aggregates.rebuild if recompute else aggregates.update)(spark, progress)
    newest_us = seen_until_us(run.newest_us, now)
    begin = now - since if since is not None else None
    wanted = _wanted(begin, topics)
    minutes = aggregates.minutes(spark).where(wanted).cache()
    try:
        with progress.step("merging minutes"):
            facts = _facts(minutes, now)
            fine_s = max(MINUTE_S, bucket_s(*facts["charted"])) if facts["spans"] else 0
            settled = measures.unreceived_settled(minutes, newest_us)
            merged = measures.merged(settled, sorted({WHOLE_S, fine_s})).drop("sketch").cache()
            try:
                facts["topics"] = busiest(merged.where(F.col("measure") == "duration"))
                found, by_time = page_rows(merged, fine_s, facts["topics"], _WORST)
            finally:
                merged.unpersist()
            there = aggregates.examples(spark).where(wanted)
            examples = measures.picked(there, newest_us).toArrow().to_pylist()
            kinds = aggregates.errors(spark).where(wanted)
            whole = {"bucket_s": F.lit(WHOLE_S), "bucket_ts": F.lit(None).cast("timestamp")}
            failed = most_frequent(added_up(kinds.withColumns(whole)))
    finally:
        minutes.unpersist()
    rows = {
        name: in_order([_shown(row) for row in found if row["measure"] == measure])
        for measure, name in _PAGE_TABLES.items()
    }
    facts["undecodable"] = spans.undecodable(begin)
    with progress.step("finding the spans of slow messages"):
        around = spans.read_files(spark, files_of(spans.files(), chosen(examples)))
        theirs = spans_of(around, examples)
        content = Content(facts, rows, fine_s, examples, theirs, failed, by_time)
    html = output.child(folder, "report.html")
    with progress.step("drawing"):
        output.write_text(spark, html, document(content, now))
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


def files_of(files: Iterable[File], examples: Sequence[Mapping[str, Any]]) -> list[File]:
    """Those with spans of the time in which the messages were under way, and an hour more."""
    sent = [round(charts.moment(row["sent_ts"]).timestamp() * 1_000_000) for row in examples]
    reach = measures.HORIZON_S * 1_000_000
    margin = CLOCKS_APART // timedelta(microseconds=1)
    times = [
        (us - margin, us + reach + max(0, row["us"] or 0) + reach)
        for us, row in zip(sent, examples, strict=True)
    ]
    return [
        file
        for file in files
        if any(begin <= file.last_us and file.first_us <= end for begin, end in times)
    ]


def _facts(minutes: DataFrame, now: datetime) -> Row:
    of_spans = minutes.where(F.col("measure") == "duration")
    facts = facts_of(of_spans, "bucket_ts", F.sum("spans"), now)
    if facts["spans"]:
        minute = timedelta(seconds=MINUTE_S)
        begin, end = facts["charted"]
        facts |= {"last": facts["last"] + minute, "charted": (begin, end + minute)}
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
