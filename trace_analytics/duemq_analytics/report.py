"""The report: spans in, Parquet tables and one HTML file out.  Of a lake: `lake_report.py`.

    OUTPUT/spans/       the spans as they were read: the ground for everything else
    OUTPUT/quarantine/  messages of the trace topic that are no spans: place, reason, raw bytes
    OUTPUT/operations/  OUTPUT/end_to_end/  OUTPUT/lateness/   per topic, group and minute
    OUTPUT/report.html  charts and tables; no script, nothing from the network

Spans are landed first and aggregated from there: the broker is read once, and every figure of a
report is about the same spans.  A repeated run overwrites these and touches nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from duemq_analytics import charts, output
from duemq_analytics.answers.buckets import MINUTE_S, WHOLE_S
from duemq_analytics.answers.end_to_end import end_to_end, journeys
from duemq_analytics.answers.errors import errors
from duemq_analytics.answers.lateness import lateness
from duemq_analytics.answers.operations import operations
from duemq_analytics.lake import measures
from duemq_analytics.page.document import CHARTED_TOPICS_MAX, Content, document
from duemq_analytics.page.tables import ROWS_MAX
from duemq_analytics.page.waterfalls import chosen
from duemq_analytics.page.years import AHEAD, charted
from duemq_analytics.progress import StepProgress
from duemq_analytics.source import schema
from duemq_analytics.waterfall.journeys import contexts_of, places_to_look_at, times_to_look_at
from duemq_analytics.waterfall.journeys import journeys as of_messages
from duemq_analytics.waterfall.places import Span
from duemq_analytics.waterfall.spans_of import frame_spans, own_spans

Row = dict[str, Any]

POINTS_MAX = 90
"""Buckets along a chart's time axis."""

BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 86_400)

ORDER = ("topic", "operation", "stage", "consumer_group")
"""Of rows of one time."""

_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Summary:
    """What a report was made of."""

    html: str
    tables: tuple[str, ...]
    spans: int
    undecodable: int
    topics: tuple[str, ...]
    first: datetime | None
    last: datetime | None


class Worst(NamedTuple):
    """Which rows a page's table by time shows, in SQL."""

    by: str
    """The largest."""
    among: str = "true"


WORST = {
    "operations": Worst("errors", "errors > 0"),
    "end_to_end": Worst("p99_ms"),
    "lateness": Worst("p99_ms"),
}


@dataclass(frozen=True)
class Landed:
    """Spans on their own, and how many messages were none."""

    spans: DataFrame
    undecodable: int = 0
    read_at: datetime | None = None
    """When all that is there was read; None: nobody knows, at its newest span."""


def land(
    spark: SparkSession, rows: DataFrame, folder: str, read_at: datetime | None = None
) -> Landed:
    """Writes spans to FOLDER/spans and answers them as read from there.

    `rows` are of `duemq-spans` with `undecodable=rows`; what is no span goes to FOLDER/quarantine.
    """
    seen = Observation()
    refused = F.col("undecodable_reason").isNotNull()
    observed = rows.observe(seen, F.count(F.when(refused, 1)).alias("undecodable"))
    spans = observed.where(~refused).drop(*(column.name for column in schema.UNDECODABLE))
    path = output.child(folder, "spans")
    spans.write.mode("overwrite").option("compression", "zstd").parquet(path)
    undecodable = int(seen.get["undecodable"])
    # A second pass over the topic, only if there is something; an empty table takes the place of
    # an earlier report's.
    named = (*schema.PLACE, *(column.name for column in schema.UNDECODABLE))
    quarantine = (rows if undecodable else rows.limit(0)).where(refused).select(*named)
    quarantine.write.mode("overwrite").option("compression", "zstd").parquet(
        output.child(folder, "quarantine")
    )
    return Landed(spark.read.schema(spans.schema).parquet(path), undecodable, read_at)


def write(
    landed: Landed, folder: str, *, now: datetime, progress: StepProgress | None = None
) -> Summary:
    """Writes tables and page of landed spans; `now` goes onto the page.

    Each table is aggregated once for its minutes, the page's charts and its sums.
    """
    spans, progress = landed.spans, progress or StepProgress()
    with progress.step("counting spans"):
        facts = facts_of(spans, "start_ts", F.count(F.lit(1)), now)
    facts["undecodable"] = landed.undecodable
    fine_s = bucket_s(*facts["charted"]) if facts["spans"] else MINUTE_S
    lengths = sorted({WHOLE_S, fine_s, MINUTE_S})
    tables = {
        "operations": operations(spans, lengths),
        "end_to_end": end_to_end(journeys(spans), lengths),
        "lateness": lateness(spans, lengths),
    }
    rows: dict[str, list[Row]] = {}
    by_time: dict[str, int] = {}
    for name, table in tables.items():
        with (
            progress.step(f"aggregating {name}"),
            _saved(table, output.child(folder, name)) as kept,
        ):
            if name == "operations":
                facts["topics"] = busiest(kept)
            shown, counted = page_rows(kept, fine_s, facts["topics"], {name: WORST[name]})
            rows[name], by_time = in_order(shown), by_time | counted
    with progress.step("looking for kinds of error"):
        failed = most_frequent(errors(spans, [WHOLE_S]))
    with progress.step("looking for suspects and slow messages"):
        rows["delivery"], examples = _single_messages(spans, facts["last"], landed.read_at, now)
    with progress.step("finding their spans"):
        found = spans_of(spans, examples)
    html = output.child(folder, "report.html")
    with progress.step("drawing"):
        content = Content(facts, rows, fine_s, examples, found, failed, by_time)
        output.write_text(spans.sparkSession, html, document(content, now))
    return Summary(
        html,
        tuple(output.child(folder, name) for name in tables),
        facts["spans"],
        landed.undecodable,
        tuple(facts["topics"]),
        facts["first"],
        facts["last"],
    )


def _single_messages(
    spans: DataFrame, newest: datetime | None, read_at: datetime | None, now: datetime
) -> tuple[list[Row], list[Row]]:
    """Deliveries of all of the time, and examples."""
    if newest is None:
        return [], []
    newest_us = round(max(newest, read_at or newest).timestamp() * 1_000_000)
    newest_us = seen_until_us(newest_us, now)
    messages = measures.messages(spans).cache()
    try:
        minutes = measures.unreceived_settled(measures.deliveries(messages), newest_us)
        sums = [F.sum(name).alias(name) for name in ("messages", "unreceived", "twice")]
        delivery = minutes.groupBy("topic").agg(*sums).toArrow().to_pylist()
        picked = measures.picked(measures.examples(messages), newest_us)
        examples: list[Row] = picked.toArrow().to_pylist()
    finally:
        messages.unpersist()
    return [{"bucket_s": WHOLE_S, "bucket_ts": None, **row} for row in delivery], examples


def seen_until_us(newest_us: int, now: datetime) -> int:
    """The newest span's start (Unix µs), as far as that can be: a clock may be years ahead."""
    return min(newest_us, round(now.timestamp() * 1_000_000))


def most_frequent(failed: DataFrame) -> list[Row]:
    """Kinds of error, those that came most often first, as many as a table shows."""
    rows = failed.orderBy(F.desc("errors"), "topic", "operation", "consumer_group", "error_type")
    return rows.limit(ROWS_MAX).toArrow().to_pylist()


def spans_of(spans: DataFrame, examples: Sequence[Row]) -> Mapping[str, Sequence[Span]]:
    """By message id, of those examples that get a waterfall."""
    ids = [row["message_id"] for row in chosen(examples)]
    if not ids:
        return {}
    own = own_spans(spans, ids).toArrow().to_pylist()
    if not own:
        return {}
    contexts = {context for each in contexts_of(own).values() for context in each}
    looked_for = frame_spans(spans, contexts, places_to_look_at(own), times_to_look_at(own))
    return of_messages(own, looked_for.toArrow().to_pylist())


@contextmanager
def _saved(table: DataFrame, folder: str) -> Iterator[DataFrame]:
    """Writes the minutes as Parquet; the table is cached meanwhile."""
    table = table.cache()
    try:
        minutes = table.where(F.col("bucket_s") == MINUTE_S).drop("bucket_s", "curve")
        minutes.coalesce(1).write.mode("overwrite").parquet(folder)
        yield table
    finally:
        table.unpersist()


def page_rows(
    table: DataFrame, fine_s: int, topics: Sequence[str], worst: Mapping[str, Worst]
) -> tuple[list[Row], Row]:
    """What a page shows of a table, however many topics that has: sums of all of the time, the
    buckets of charts, and of tables by time the rows that are shown.

    Answers also how many rows these tables would have.  `topics`: the busiest first.
    """
    slots = table.where(F.col("bucket_s") == max(MINUTE_S, fine_s))
    # A span may have no topic: null is neither in a list nor not in it.
    named = [topic or "" for topic in topics[:CHARTED_TOPICS_MAX]]
    charted = F.coalesce("topic", F.lit("")).isin(named)
    drawn = (F.col("bucket_s") == fine_s) & charted
    order = [name for name in ("bucket_ts", *ORDER) if name in table.columns]
    rows = table.where((F.col("bucket_s") == WHOLE_S) | drawn)
    for by, among in worst.values():
        shown = slots.where(among).orderBy(F.expr(by).desc(), *order).limit(ROWS_MAX)
        rows = rows.union(shown.where(~drawn))
    found: list[Row] = rows.toArrow().to_pylist()
    counted = slots.agg(*(F.expr(f"count_if({each.among})").alias(n) for n, each in worst.items()))
    return found, counted.toArrow().to_pylist()[0]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By time, then by what they are of."""
    return sorted(
        rows, key=lambda row: (row["bucket_ts"] or _NEVER, *(row.get(k) or "" for k in ORDER))
    )


def facts_of(table: DataFrame, time: str, spans: Column, now: datetime) -> Row:
    """How many spans there are, over what time, and what of it charts are of: `years.charted`."""
    ahead = F.col(time) > F.lit(now + AHEAD)
    years = table.groupBy(F.year(time), ahead.alias("ahead")).agg(
        spans.alias("spans"), F.min(time).alias("first"), F.max(time).alias("last")
    )
    rows = years.toArrow().to_pylist()
    return charted([row | {n: charts.moment(row[n]) for n in ("first", "last")} for row in rows])


def busiest(table: DataFrame) -> list[str]:
    """The topics, the one with the most messages of all of the time first."""
    messages: dict[str, int] = {}
    whole = table.where(F.col("bucket_s") == WHOLE_S).select("topic", "messages")
    for row in whole.toArrow().to_pylist():
        messages[row["topic"]] = max(messages.get(row["topic"], 0), row["messages"])
    return sorted(messages, key=lambda topic: (-messages[topic], topic or ""))


def bucket_s(first: datetime, last: datetime) -> int:
    """The width of a chart's buckets: the finest that keeps to POINTS_MAX."""
    length = (last - first).total_seconds()
    return next((width for width in BUCKETS_S if length / width <= POINTS_MAX), BUCKETS_S[-1])
