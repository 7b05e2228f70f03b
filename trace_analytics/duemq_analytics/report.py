"""The report: spans in, Parquet tables and one HTML file out.

    OUTPUT/spans/       the spans as they were read: the ground for everything else
    OUTPUT/quarantine/  messages of the trace topic that are no spans: place, reason, raw bytes
    OUTPUT/operations/  OUTPUT/end_to_end/  OUTPUT/lateness/   per topic, group and minute
    OUTPUT/report.html  charts and tables; no script, nothing from the network

Spans are landed first and aggregated from there: the broker is read once, and every figure of a
report is about the same spans.  A repeated run overwrites these and touches nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from duemq_analytics import charts, output
from duemq_analytics.answers.buckets import MINUTE_S, WHOLE_S
from duemq_analytics.answers.end_to_end import end_to_end, journeys
from duemq_analytics.answers.lateness import lateness
from duemq_analytics.answers.operations import operations
from duemq_analytics.answers.percentiles import CURVE
from duemq_analytics.charts import Chart, Series
from duemq_analytics.progress import Progress
from duemq_analytics.source import schema

Row = dict[str, Any]

CHARTED_TOPICS_MAX = 6
"""Topics with charts of their own, the busiest first; tables name more."""

TABLE_ROWS_MAX = 200
POINTS_MAX = 90
"""Buckets along a chart's time axis."""

BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 86_400)

_NEVER = datetime.min.replace(tzinfo=UTC)

_COUNTED = ("send", "store", "schedule", "fire", "receive", "process")


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


@dataclass(frozen=True)
class Landed:
    """Spans on their own, and how many messages were none."""

    spans: DataFrame
    undecodable: int = 0


def land(spark: SparkSession, rows: DataFrame, folder: str) -> Landed:
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
    return Landed(spark.read.schema(spans.schema).parquet(path), undecodable)


def write(
    landed: Landed, folder: str, *, now: datetime, progress: Progress | None = None
) -> Summary:
    """Writes tables and page of landed spans; `now` goes onto the page.

    Each table is aggregated once for its minutes, the page's charts and its sums.
    """
    spans, progress = landed.spans, progress or Progress()
    with progress.step("counting spans"):
        facts = _facts(spans)
    facts["undecodable"] = landed.undecodable
    fine_s = bucket_s(facts["first"], facts["last"]) if facts["spans"] else MINUTE_S
    lengths = sorted({WHOLE_S, fine_s, MINUTE_S})
    tables = {
        "operations": operations(spans, lengths),
        "end_to_end": end_to_end(journeys(spans), lengths),
        "lateness": lateness(spans, lengths),
    }
    rows = {}
    for name, table in tables.items():
        with progress.step(f"aggregating {name}"):
            rows[name] = _save(table, output.child(folder, name), {WHOLE_S, fine_s})
    facts["topics"] = busiest(rows["operations"])
    html = output.child(folder, "report.html")
    with progress.step("drawing"):
        output.write_text(spans.sparkSession, html, page(facts, rows, fine_s, now))
    return Summary(
        html,
        tuple(output.child(folder, name) for name in tables),
        facts["spans"],
        landed.undecodable,
        tuple(facts["topics"]),
        facts["first"],
        facts["last"],
    )


def _save(table: DataFrame, folder: str, wanted: set[int]) -> list[Row]:
    """Writes the minutes as Parquet; answers the rows of the lengths wanted, in order."""
    table = table.cache()
    try:
        minutes = table.where(F.col("bucket_s") == MINUTE_S).drop("bucket_s", "curve")
        minutes.coalesce(1).write.mode("overwrite").parquet(folder)
        rows: list[Row] = table.where(F.col("bucket_s").isin(list(wanted))).toArrow().to_pylist()
    finally:
        table.unpersist()
    return in_order(rows)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By time, then by what they are of."""
    keys = ("topic", "operation", "stage", "consumer_group")
    return sorted(
        rows, key=lambda row: (row["bucket_ts"] or _NEVER, *(row.get(k) or "" for k in keys))
    )


def _facts(spans: DataFrame) -> Row:
    facts: Row = (
        spans.agg(
            F.count(F.lit(1)).alias("spans"),
            F.min("start_ts").alias("first"),
            F.max("start_ts").alias("last"),
        )
        .toArrow()
        .to_pylist()[0]
    )
    for name in ("first", "last"):
        facts[name] = charts.moment(facts[name]) if facts[name] is not None else None
    return facts


def busiest(rows: Sequence[Row]) -> list[str]:
    """The topics, the one with the most messages first."""
    messages: dict[str, int] = {}
    for row in rows_of(rows, WHOLE_S):
        messages[row["topic"]] = max(messages.get(row["topic"], 0), row["messages"])
    return sorted(messages, key=lambda topic: (-messages[topic], topic))


def rows_of(rows: Sequence[Row], length_s: int) -> list[Row]:
    """Those of buckets of this length."""
    return [row for row in rows if row["bucket_s"] == length_s]


# ── page ─────────────────────────────────────────────────────────────────────────────


def page(
    facts: Row,
    rows: Mapping[str, list[Row]],
    fine_s: int,
    now: datetime,
    more_tiles: Sequence[tuple[str, str]] = (),
    more_tables: Sequence[Table] = (),
) -> str:
    """The HTML; `rows` are of the tables operations, end_to_end and lateness."""
    whole = {name: rows_of(table, WHOLE_S) for name, table in rows.items()}
    fine = {name: rows_of(table, fine_s) for name, table in rows.items()}
    charted = facts["topics"][:CHARTED_TOPICS_MAX]
    environment = Environment(
        loader=PackageLoader("duemq_analytics", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        facts=facts,
        now=now.astimezone(UTC),
        tiles=[*_tiles(facts, whole), *more_tiles],
        sections=[Section(topic, _charts_of(topic, fine_s, fine, whole)) for topic in charted],
        left_out=len(facts["topics"]) - len(charted),
        tables=[*_tables(whole), *more_tables],
        Markup=Markup,
    )


def bucket_s(first: datetime, last: datetime) -> int:
    """The width of a chart's buckets: the finest that keeps to POINTS_MAX."""
    length = (last - first).total_seconds()
    return next((width for width in BUCKETS_S if length / width <= POINTS_MAX), BUCKETS_S[-1])


def _charts_of(
    topic: str, fine_s: int, fine: Mapping[str, list[Row]], whole: Mapping[str, list[Row]]
) -> list[Chart]:
    happened, way, late = (
        [row for row in fine[name] if row["topic"] == topic]
        for name in ("operations", "end_to_end", "lateness")
    )
    way_curve, late_curve = (
        [row for row in whole[name] if row["topic"] == topic] for name in ("end_to_end", "lateness")
    )
    drawn = []
    counted = [row for row in happened if row["operation"] in ("send", "fire", "process")]
    if counted:
        rates = _lines(counted, _operation, lambda row: row["messages"] / fine_s)
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
    """A colour a name; p50, p99 and max as solid, dashed and dotted lines.

    Of more names than there are colours p99 alone, so that one can be told from the other.
    """
    p99 = _lines(rows, name, itemgetter("p99_ms"))
    if len(p99) > charts.COLOURS_MAX:
        return charts.over_time(f"{title}, p99", topic, "ms", p99, log=True)
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
        Series(name(row) or "all", CURVE, row["curve"], *charts.look(i))
        for i, row in enumerate(rows)
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
    return [
        Series(label, *points[label], *charts.look(i)) for i, label in enumerate(sorted(points))
    ]


def _operation(row: Row) -> str:
    return " ".join(filter(None, (row["operation"], row["consumer_group"])))


def _group(row: Row) -> str:
    return row["consumer_group"] or ""


def _stage(row: Row) -> str:
    return "fire" if row["stage"] == "fire" else f"process {row['consumer_group'] or ''}".strip()


# ── figures ──────────────────────────────────────────────────────────────────────────


def _tiles(facts: Row, whole: Mapping[str, list[Row]]) -> list[tuple[str, str]]:
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
        tiles.append(("fire lateness p50 / p99", f"{ms(worst['p50_ms'])} / {ms(worst['p99_ms'])}"))
        tiles.append(("early", charts.number(early)))
    if whole["end_to_end"]:
        worst = max(whole["end_to_end"], key=lambda row: row["p99_ms"])
        tiles.append(("end to end p50 / p99", f"{ms(worst['p50_ms'])} / {ms(worst['p99_ms'])}"))
    tiles.append(("spans", charts.number(facts["spans"])))
    if facts["undecodable"]:
        tiles.append(("undecodable messages", charts.number(facts["undecodable"])))
    return tiles


def ms(value: float | None) -> str:
    """A length of time in a table."""
    return "–" if value is None else f"{charts.number(value)} ms"


def text(value: Any) -> str:
    """What there is, in a table."""
    return "–" if value is None else str(value)


def _percent(value: float) -> str:
    return f"{charts.number(100 * value)} %"


_TIMES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("p50", "p50_ms", ms),
    ("p95", "p95_ms", ms),
    ("p99", "p99_ms", ms),
    ("max", "max_ms", ms),
)


def _tables(whole: Mapping[str, list[Row]]) -> list[Table]:
    order = {name: i for i, name in enumerate(_COUNTED)}
    happened = sorted(
        whole["operations"], key=lambda row: (row["topic"], order.get(row["operation"], 99))
    )
    return [
        table_of(
            "Operations",
            "Durations of the spans. One store, schedule, fire or receive span can stand for many "
            "messages.",
            (
                ("topic", "topic", text),
                ("operation", "operation", text),
                ("group", "consumer_group", text),
                ("spans", "spans", charts.number),
                ("messages", "messages", charts.number),
                ("errors", "errors", charts.number),
                ("error rate", "error_rate", _percent),
                *_TIMES,
            ),
            happened,
        ),
        table_of(
            "End to end",
            "From the start of the send to the start of the first callback; messages without a "
            "due time. Repeated: retried, or delivered to the group again.",
            (
                ("topic", "topic", text),
                ("group", "consumer_group", text),
                ("messages", "messages", charts.number),
                ("repeated", "repeated", charts.number),
                *_TIMES,
            ),
            whole["end_to_end"],
        ),
        table_of(
            "Lateness",
            "Fire: stored in the topic, less due. Process: callback began, less due; the "
            "consumer's own backlog is in it.",
            (
                ("topic", "topic", text),
                ("stage", "stage", text),
                ("group", "consumer_group", text),
                ("messages", "messages", charts.number),
                ("early", "early", charts.number),
                *_TIMES,
            ),
            whole["lateness"],
        ),
    ]


def table_of(
    title: str,
    note: str,
    columns: Sequence[tuple[str, str, Callable[[Any], str]]],
    rows: Sequence[Row],
) -> Table:
    """With the rows that a page has room for."""
    shown = rows[:TABLE_ROWS_MAX]
    return Table(title, note, columns, shown, left_out=len(rows) - len(shown))
