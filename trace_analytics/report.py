"""The report: spans in, Parquet tables and one HTML file out.

    OUTPUT/spans/       the spans as they were read: the ground for everything else
    OUTPUT/operations/  OUTPUT/end_to_end/  OUTPUT/lateness/   per topic, group and minute
    OUTPUT/report.html  charts and tables; no script, nothing from the network

Spans are landed first and aggregated from there: the broker is read once, and every figure of a
report is about the same spans.  A repeated run overwrites these and touches nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from trace_analytics import charts
from trace_analytics.charts import Chart, Series
from trace_analytics.end_to_end import end_to_end, journeys
from trace_analytics.lateness import lateness
from trace_analytics.operations import operations, weight

Row = dict[str, Any]

CHARTED_TOPICS_MAX = 6
"""Topics with charts of their own, the busiest first; tables name more."""

TABLE_ROWS_MAX = 200
POINTS_MAX = 90
"""Buckets along a chart's time axis."""

BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 86_400)

CURVE = (*range(0, 90, 5), 90, 92, 94, 95, 96, 97, 98, 99, 99.5, 99.9)
"""Percentiles of the distribution charts."""

_COUNTED = ("send", "store", "schedule", "fire", "receive", "process")


@dataclass(frozen=True)
class Summary:
    """What a report was made of."""

    html: Path
    tables: tuple[Path, ...]
    spans: int
    topics: tuple[str, ...]
    first: datetime | None
    last: datetime | None


@dataclass
class Table:
    """A table of the page; a column is (heading, key, format)."""

    title: str
    note: str
    columns: Sequence[tuple[str, str, Callable[[Any], str]]]
    rows: Sequence[Row]
    left_out: int = 0


@dataclass
class Section:
    """A topic's part of the page."""

    title: str
    charts: list[Chart] = field(default_factory=list)


def land(spark: SparkSession, spans: DataFrame, output: Path) -> DataFrame:
    """Writes the spans to OUTPUT/spans and answers them as read from there."""
    folder = str(output / "spans")
    spans.write.mode("overwrite").option("compression", "zstd").parquet(folder)
    return spark.read.schema(spans.schema).parquet(folder)


def write(spans: DataFrame, output: Path, *, now: datetime) -> Summary:
    """Writes tables and page of landed spans; `now` goes onto the page."""
    output.mkdir(parents=True, exist_ok=True)
    travelled = journeys(spans).cache()
    try:
        tables = {
            "operations": operations(spans),
            "end_to_end": end_to_end(travelled),
            "lateness": lateness(spans),
        }
        for name, table in tables.items():
            table.coalesce(1).write.mode("overwrite").parquet(str(output / name))
        facts = _facts(spans)
        html = output / "report.html"
        html.write_text(_page(spans, travelled, facts, now), encoding="utf-8")
    finally:
        travelled.unpersist()
    return Summary(
        html,
        tuple(output / name for name in tables),
        facts["spans"],
        tuple(facts["topics"]),
        facts["first"],
        facts["last"],
    )


def _facts(spans: DataFrame) -> Row:
    row = _rows(
        spans.agg(
            F.count(F.lit(1)).alias("spans"),
            F.min("start_ts").alias("first"),
            F.max("start_ts").alias("last"),
        )
    )[0]
    for name in ("first", "last"):
        row[name] = charts.moment(row[name]) if row[name] is not None else None
    busiest = spans.where(F.col("topic").isNotNull()).groupBy("topic").agg(F.sum(weight()))
    row["topics"] = [r["topic"] for r in _rows(busiest.orderBy(F.col(busiest.columns[1]).desc()))]
    return row


# ── page ─────────────────────────────────────────────────────────────────────────────


def _page(spans: DataFrame, travelled: DataFrame, facts: Row, now: datetime) -> str:
    whole = {
        "operations": _rows(operations(spans, None)),
        "end_to_end": _rows(end_to_end(travelled, None)),
        "lateness": _rows(lateness(spans, None)),
    }
    charted = facts["topics"][:CHARTED_TOPICS_MAX]
    environment = Environment(
        loader=PackageLoader("trace_analytics", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        facts=facts,
        now=now.astimezone(UTC),
        tiles=_tiles(facts, whole),
        sections=_sections(spans, travelled, charted, facts) if charted else [],
        left_out=len(facts["topics"]) - len(charted),
        tables=_tables(whole),
        Markup=Markup,
    )


def bucket_s(first: datetime, last: datetime) -> int:
    """The width of a chart's buckets: the finest that keeps to POINTS_MAX."""
    length = (last - first).total_seconds()
    return next((width for width in BUCKETS_S if length / width <= POINTS_MAX), BUCKETS_S[-1])


def _sections(
    spans: DataFrame, travelled: DataFrame, topics: Sequence[str], facts: Row
) -> list[Section]:
    width = bucket_s(facts["first"], facts["last"])
    chosen = spans.where(F.col("topic").isin(list(topics)))
    travelled = travelled.where(F.col("topic").isin(list(topics)))
    bucket = f"{width} seconds"
    happened = _rows(operations(chosen, bucket))
    way = _rows(end_to_end(travelled, bucket))
    late = _rows(lateness(chosen, bucket))
    way_curve = _rows(_curve_end_to_end(travelled))
    late_curve = _rows(_curve_lateness(chosen))
    return [
        Section(topic, _charts_of(topic, width, happened, way, late, way_curve, late_curve))
        for topic in topics
    ]


def _charts_of(
    topic: str,
    width: int,
    happened: Sequence[Row],
    way: Sequence[Row],
    late: Sequence[Row],
    way_curve: Sequence[Row],
    late_curve: Sequence[Row],
) -> list[Chart]:
    happened, way, late, way_curve, late_curve = (
        [row for row in rows if row["topic"] == topic]
        for rows in (happened, way, late, way_curve, late_curve)
    )
    drawn = []
    counted = [row for row in happened if row["operation"] in ("send", "fire", "process")]
    if counted:
        rates = _lines(counted, _operation, lambda row: row["messages"] / width)
        drawn.append(charts.over_time("Messages per second", topic, "messages/s", rates))
    failed = [row for row in happened if row["errors"]]
    if failed:
        shares = _lines(failed, _operation, lambda row: 100 * row["error_rate"])
        drawn.append(charts.over_time("Errors", topic, "% of spans", shares))
    if way:
        drawn.append(_percentiles("End to end: send to callback", topic, way, _group))
        drawn.append(_curve("End to end, distribution", topic, way_curve, _group))
    if late:
        drawn.append(_percentiles("Lateness: past the due time", topic, late, _stage))
        drawn.append(_curve("Lateness, distribution", topic, late_curve, _stage))
    for operation, title in (("send", "Send: until durable"), ("process", "Processing: callback")):
        rows = [row for row in happened if row["operation"] == operation]
        if rows:
            drawn.append(_percentiles(title, topic, rows, _group))
    return drawn


def _percentiles(title: str, topic: str, rows: Sequence[Row], name: Callable[[Row], str]) -> Chart:
    """A colour a name; p50, p99 and max as solid, dashed and dotted lines."""
    lines = [
        replace(line, label=f"{line.label} {label}".strip(), dash=dash)
        for dash, (key, label) in enumerate(
            (("p50_ms", "p50"), ("p99_ms", "p99"), ("max_ms", "max"))
        )
        for line in _lines(rows, name, itemgetter(key))
    ]
    lines.sort(key=lambda line: (line.colour, line.dash))
    return charts.over_time(title, topic, "ms", lines, log=True)


def _curve(title: str, topic: str, rows: Sequence[Row], name: Callable[[Row], str]) -> Chart:
    lines = [
        Series(name(row) or "all", CURVE, row["curve"], colour=i) for i, row in enumerate(rows)
    ]
    return charts.percentile_curves(title, topic, "ms", lines)


def _lines(
    rows: Iterable[Row], name: Callable[[Row], str], value: Callable[[Row], float]
) -> list[Series]:
    """One line a name, in the order of time."""
    points: dict[str, tuple[list[datetime], list[float]]] = {}
    for row in rows:
        x, y = points.setdefault(name(row), ([], []))
        x.append(charts.moment(row["bucket_ts"]))
        y.append(value(row))
    return [Series(label, *points[label], colour=i) for i, label in enumerate(sorted(points))]


def _operation(row: Row) -> str:
    return " ".join(filter(None, (row["operation"], row["consumer_group"])))


def _group(row: Row) -> str:
    return row["consumer_group"] or ""


def _stage(row: Row) -> str:
    return "fire" if row["stage"] == "fire" else f"process {row['consumer_group'] or ''}".strip()


def _curve_end_to_end(travelled: DataFrame) -> DataFrame:
    milliseconds = (F.col("first_ns") - F.col("sent_ns")) / 1_000_000
    return (
        travelled.where(F.col("due_ms").isNull())
        .groupBy("topic", "consumer_group")
        .agg(F.percentile_approx(milliseconds, _FRACTIONS, 10_000).alias("curve"))
        .orderBy("topic", "consumer_group")
    )


def _curve_lateness(spans: DataFrame) -> DataFrame:
    first = (F.col("operation") == "fire") | (F.coalesce(F.col("attempt"), F.lit(0)) == 0)
    return (
        spans.where(F.col("lateness_ms").isNotNull() & first)
        .groupBy("topic", F.col("operation").alias("stage"), "consumer_group")
        .agg(F.percentile(F.col("lateness_ms"), _FRACTIONS, weight()).alias("curve"))
        .orderBy("topic", "stage", "consumer_group")
    )


_FRACTIONS = [percentile / 100 for percentile in CURVE]


# ── figures ──────────────────────────────────────────────────────────────────────────


def _tiles(facts: Row, whole: dict[str, list[Row]]) -> list[tuple[str, str]]:
    """What the page says first."""
    sums = {
        name: sum(row["messages"] for row in whole["operations"] if row["operation"] == name)
        for name in ("send", "process")
    }
    errors = sum(row["errors"] for row in whole["operations"])
    tiles = [
        ("messages sent", charts.number(sums["send"])),
        ("callbacks", charts.number(sums["process"])),
        ("spans with an error", charts.number(errors)),
    ]
    fired = [row for row in whole["lateness"] if row["stage"] == "fire"]
    if fired:
        worst = max(fired, key=lambda row: row["p99_ms"])
        early = sum(row["early"] for row in whole["lateness"])
        tiles.append(
            ("fire lateness p50 / p99", f"{_ms(worst['p50_ms'])} / {_ms(worst['p99_ms'])}")
        )
        tiles.append(("early", charts.number(early)))
    if whole["end_to_end"]:
        worst = max(whole["end_to_end"], key=lambda row: row["p99_ms"])
        tiles.append(("end to end p50 / p99", f"{_ms(worst['p50_ms'])} / {_ms(worst['p99_ms'])}"))
    tiles.append(("spans", charts.number(facts["spans"])))
    return tiles


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{charts.number(value)} ms"


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _percent(value: float) -> str:
    return f"{charts.number(100 * value)} %"


_TIMES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("p50", "p50_ms", _ms),
    ("p95", "p95_ms", _ms),
    ("p99", "p99_ms", _ms),
    ("max", "max_ms", _ms),
)


def _tables(whole: dict[str, list[Row]]) -> list[Table]:
    order = {name: i for i, name in enumerate(_COUNTED)}
    happened = sorted(
        whole["operations"], key=lambda row: (row["topic"], order.get(row["operation"], 99))
    )
    return [
        _table(
            "Operations",
            "Durations of the spans. One store, schedule, fire or receive span can stand for many "
            "messages.",
            (
                ("topic", "topic", _text),
                ("operation", "operation", _text),
                ("group", "consumer_group", _text),
                ("spans", "spans", charts.number),
                ("messages", "messages", charts.number),
                ("errors", "errors", charts.number),
                ("error rate", "error_rate", _percent),
                *_TIMES,
            ),
            happened,
        ),
        _table(
            "End to end",
            "From the start of the send to the start of the first callback; messages without a "
            "due time. Repeated: delivered to the group more than once.",
            (
                ("topic", "topic", _text),
                ("group", "consumer_group", _text),
                ("messages", "messages", charts.number),
                ("repeated", "repeated", charts.number),
                *_TIMES,
            ),
            whole["end_to_end"],
        ),
        _table(
            "Lateness",
            "Fire: stored in the topic, less due. Process: callback began, less due; the "
            "consumer's own backlog is in it.",
            (
                ("topic", "topic", _text),
                ("stage", "stage", _text),
                ("group", "consumer_group", _text),
                ("messages", "messages", charts.number),
                ("early", "early", charts.number),
                *_TIMES,
            ),
            whole["lateness"],
        ),
    ]


def _table(
    title: str,
    note: str,
    columns: Sequence[tuple[str, str, Callable[[Any], str]]],
    rows: Sequence[Row],
) -> Table:
    shown = rows[:TABLE_ROWS_MAX]
    return Table(title, note, columns, shown, left_out=len(rows) - len(shown))


def _rows(frame: DataFrame) -> list[Row]:
    rows: list[Row] = frame.toArrow().to_pylist()
    return rows
