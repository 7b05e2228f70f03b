"""A topic's figures: lines over time, or strips where there are more names than colours."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import itemgetter

from duemq_analytics import charts
from duemq_analytics.answers.buckets import WHOLE_S
from duemq_analytics.answers.percentiles import CURVE
from duemq_analytics.charts import Chart, Series
from duemq_analytics.page.strips import Strips, strips
from duemq_analytics.page.tables import Row, ms, percent

PERCENTILE_NAMES_MAX = 4
"""With a line each for p50, p99 and max; of more names p99 alone is drawn."""

DRAWN_BEFORE = datetime(9000, 1, 1, tzinfo=UTC)
"""A span can claim any due time up to the year 9999; axes end with it, their margins included."""

_MARGIN = timedelta(days=1)

Name = Callable[[Row], str]
Value = Callable[[Row], float]
Figure = Chart | Strips


@dataclass(frozen=True)
class Period:
    """The time that charts are over, in buckets of `bucket_s`."""

    first: datetime
    last: datetime
    bucket_s: int

    @property
    def called(self) -> str:
        """The length of a bucket."""
        for unit, seconds in (("h", 3_600), ("min", 60)):
            if self.bucket_s % seconds == 0:
                return f"{self.bucket_s // seconds} {unit}"
        return f"{self.bucket_s} s"

    def has(self, row: Row) -> bool:
        """Whether a row is drawn: messages fall due or were sent a day before or after, too."""
        if row["bucket_s"] == WHOLE_S:
            return True
        at = charts.moment(row["bucket_ts"])
        return self.first - _MARGIN <= at < min(self.last + _MARGIN, DRAWN_BEFORE)

    def buckets(self) -> set[datetime]:
        """Where they begin."""
        begin = self.first.timestamp() // self.bucket_s * self.bucket_s
        start = datetime.fromtimestamp(begin, self.first.tzinfo)
        count = math.ceil((self.last - start).total_seconds() / self.bucket_s)
        return {start + timedelta(seconds=self.bucket_s * i) for i in range(count)}


@dataclass(frozen=True)
class Drawn:
    """What one figure over time shows."""

    title: str
    unit: str
    name: Name
    value: Value
    """Of a bucket's row."""
    total: Value
    """Of the row for all of the time."""
    form: Callable[[float], str]
    log: bool = False
    filled: bool = False
    """Whether a bucket without a row is a zero."""


def figures_of(topic: str, rows: Mapping[str, Sequence[Row]], period: Period) -> list[Figure]:
    """`rows`: of buckets and of all of the time, of the tables operations, end_to_end, lateness."""
    happened, way, late = (
        [row for row in rows[name] if row["topic"] == topic and period.has(row)]
        for name in ("operations", "end_to_end", "lateness")
    )
    found = _rates(topic, happened, period)
    if way:
        found.append(_percentiles("End to end: send to callback", topic, way, _group, period))
        found.append(_curve("End to end, distribution", topic, way, _group))
    if late:
        found.append(_percentiles("Lateness: past the due time", topic, late, _stage, period))
        found.append(_curve("Lateness, distribution", topic, late, _stage))
    for operation, title in (("send", "Send: until durable"), ("process", "Processing: callback")):
        of_it = [row for row in happened if row["operation"] == operation]
        if of_it:
            found.append(_percentiles(title, topic, of_it, _group, period))
    return found


def _rates(topic: str, happened: Sequence[Row], period: Period) -> list[Figure]:
    """How much there was, and how much of it failed."""
    length_s = max(period.bucket_s, (period.last - period.first).total_seconds())
    rate = Drawn(
        "Messages per second",
        "messages/s",
        _operation,
        lambda row: row["messages"] / period.bucket_s,
        lambda row: row["messages"] / length_s,
        lambda value: f"{charts.number(value)}/s",
        filled=True,
    )
    errors = Drawn(
        f"Errors in {period.called}",
        "errors",
        _operation,
        itemgetter("errors"),
        itemgetter("errors"),
        charts.number,
        filled=True,
    )
    share = replace(
        errors,
        title="Error rate",
        unit="% of spans",
        value=lambda row: 100 * row["error_rate"],
        total=lambda row: 100 * row["error_rate"],
        form=lambda value: percent(value / 100),
        filled=False,
    )
    counted = [row for row in happened if row["operation"] in ("send", "fire", "process")]
    failing = {_operation(row) for row in happened if row["errors"]}
    failed = [row for row in happened if _operation(row) in failing]
    drawn = [_over_time(topic, counted, rate, period)] if counted else []
    return drawn + [_over_time(topic, failed, each, period) for each in (errors, share) if failed]


def _over_time(topic: str, rows: Sequence[Row], drawn: Drawn, period: Period) -> Figure:
    cells = _cells(rows, drawn.name, drawn.value)
    if len(cells) > charts.COLOURS_MAX:
        totals = {drawn.name(row): drawn.total(row) for row in rows if row["bucket_s"] == WHOLE_S}
        length = timedelta(seconds=period.bucket_s)
        return strips(drawn.title, cells, totals, length, drawn.form, log=drawn.log)
    if drawn.filled:
        times = period.buckets().union(*cells.values())
        cells = {name: {t: of_it.get(t, 0.0) for t in times} for name, of_it in cells.items()}
    lines = _lines(cells)
    return charts.over_time(drawn.title, topic, drawn.unit, lines, log=drawn.log)


def _percentiles(title: str, topic: str, rows: Sequence[Row], name: Name, period: Period) -> Figure:
    """A colour a name; p50, p99 and max as solid, dashed and dotted lines."""
    names = {name(row) for row in rows}
    p99 = Drawn(f"{title}, p99", "ms", name, itemgetter("p99_ms"), itemgetter("p99_ms"), ms, True)
    if len(names) > PERCENTILE_NAMES_MAX:
        return _over_time(topic, rows, p99, period)
    lines = [
        replace(line, label=f"{line.label} {label}".strip(), dash=dash)
        for dash, (key, label) in enumerate(
            (("p50_ms", "p50"), ("p99_ms", "p99"), ("max_ms", "max"))
        )
        for line in _lines(_cells(rows, name, itemgetter(key)))
    ]
    lines.sort(key=lambda line: (line.colour, line.dash))
    return charts.over_time(title, topic, "ms", lines, log=True)


def _curve(title: str, topic: str, rows: Sequence[Row], name: Name) -> Chart:
    """Of the names with the largest p99, as many as there are colours."""
    whole = [row for row in rows if row["bucket_s"] == WHOLE_S]
    shown = sorted(whole, key=lambda row: -row["p99_ms"])[: charts.COLOURS_MAX]
    if len(shown) < len(whole):
        title = f"{title}: the {len(shown)} with the largest p99"
    lines = [
        Series(name(row) or "all", CURVE, row["curve"], *charts.look(i))
        for i, row in enumerate(sorted(shown, key=name))
    ]
    return charts.percentile_curves(title, topic, "ms", lines)


def _cells(rows: Iterable[Row], name: Name, value: Value) -> dict[str, dict[datetime, float]]:
    """By name, the value of each bucket that is drawn."""
    found: dict[str, dict[datetime, float]] = defaultdict(dict)
    for row in rows:
        if row["bucket_s"] != WHOLE_S:
            found[name(row)][charts.moment(row["bucket_ts"])] = value(row)
    return found


def _lines(cells: Mapping[str, Mapping[datetime, float]]) -> list[Series]:
    """One line a name, in the order of time."""
    return [
        Series(name, sorted(cells[name]), [cells[name][t] for t in sorted(cells[name])], *look)
        for name, look in zip(sorted(cells), map(charts.look, range(len(cells))), strict=True)
    ]


def _operation(row: Row) -> str:
    return " ".join(filter(None, (row["operation"], row["consumer_group"])))


def _group(row: Row) -> str:
    return row["consumer_group"] or ""


def _stage(row: Row) -> str:
    return "fire" if row["stage"] == "fire" else f"process {row['consumer_group'] or ''}".strip()
