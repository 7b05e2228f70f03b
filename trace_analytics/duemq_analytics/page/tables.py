"""Tables of numbers: what is in which column, and how many rows a page has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duemq_analytics import charts

Row = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""Heading, key of the row, format."""

ROWS_MAX = 200
OPEN_ROWS_MAX = 40
"""Longer tables are folded up: a phone would scroll for ever."""

OPERATIONS = ("send", "store", "schedule", "fire", "receive", "process")
"""In the order in which a message meets them."""


@dataclass
class Table:
    """A table of the page."""

    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    said: str = ""
    """Of rows that are not shown."""

    @property
    def tall(self) -> bool:
        """Whether its cells may have several lines, so that a command has room beside them."""
        return any(key == "show" for _, key, _ in self.columns)

    @property
    def folded(self) -> bool:
        """Whether it opens only when it is asked to."""
        return len(self.rows) > OPEN_ROWS_MAX


def table_of(title: str, note: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """With the rows that a page has room for."""
    left_out = len(rows) - ROWS_MAX
    said = f"{left_out:,} more rows are in the Parquet tables." if left_out > 0 else ""
    return Table(title, note, columns, rows[:ROWS_MAX], said)


def worst_of(
    title: str,
    note: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    key: str,
    total: int,
) -> Table:
    """With the rows that have the largest `key`, in the order in which they came.

    `total`: how many there are, with those that did not come.
    """
    worst = sorted(range(len(rows)), key=lambda i: -rows[i][key])[:ROWS_MAX]
    left_out = total - len(worst)
    most = "most errors" if key == "errors" else f"largest {key.removesuffix('_ms')}"
    said = f"Those with the {most}; {left_out:,} more rows are left out."
    return Table(title, note, columns, [rows[i] for i in sorted(worst)], said if left_out else "")


def ms(value: float | None) -> str:
    """A length of time."""
    return "–" if value is None else f"{charts.number(value)} ms"


def text(value: Any) -> str:
    """What there is."""
    return "–" if value is None else str(value)


def percent(value: float) -> str:
    """A share of one."""
    return f"{charts.number(100 * value)} %"


def minute(value: Any) -> str:
    """When a bucket begins."""
    return f"{charts.moment(value):%Y-%m-%d %H:%M}"


_TIMES: tuple[Column, ...] = (
    ("p50", "p50_ms", ms),
    ("p95", "p95_ms", ms),
    ("p99", "p99_ms", ms),
    ("max", "max_ms", ms),
)
_GROUP: Column = ("group", "consumer_group", text)
_TOPIC: Column = ("topic", "topic", text)
_OPERATION: Column = ("operation", "operation", text)
_MESSAGES: Column = ("messages", "messages", charts.number)
_FROM: Column = ("from (UTC)", "bucket_ts", minute)


def of_all_time(whole: Mapping[str, Sequence[Row]]) -> list[Table]:
    """The sums: operations, end to end, lateness, deliveries, retries."""
    order = {name: i for i, name in enumerate(OPERATIONS)}
    happened = sorted(
        whole["operations"], key=lambda row: (row["topic"], order.get(row["operation"], 99))
    )
    return [
        table_of(
            "Operations",
            "Durations of the spans. One store, schedule, fire or receive span can stand for many "
            "messages. A delayed message is stored twice: until it is due, and in its topic.",
            (
                _TOPIC,
                _OPERATION,
                _GROUP,
                ("spans", "spans", charts.number),
                _MESSAGES,
                ("errors", "errors", charts.number),
                ("error rate", "error_rate", percent),
                *_TIMES,
            ),
            happened,
        ),
        table_of(
            "End to end",
            "From the start of the send to the start of the first callback; messages without a "
            "due time. Repeated: retried, or delivered to the group again.",
            (_TOPIC, _GROUP, _MESSAGES, ("repeated", "repeated", charts.number), *_TIMES),
            whole["end_to_end"],
        ),
        table_of(
            "Lateness",
            "Fire: stored in the topic, less due. Process: callback began, less due; the "
            "consumer's own backlog is in it, and early is where its clock is behind the broker's.",
            (
                _TOPIC,
                ("stage", "stage", text),
                _GROUP,
                _MESSAGES,
                ("early", "early", charts.number),
                *_TIMES,
            ),
            whole["lateness"],
        ),
        table_of(
            "Deliveries",
            "Messages that were accepted, those of them that no callback has had, and those that "
            "a group has done more than once. Among the never received are cancelled messages, "
            "those put off by more than an hour, those that were read without a callback or by "
            "consumers that do not trace, and those whose spans were dropped.",
            (
                _TOPIC,
                ("accepted", "messages", charts.number),
                ("never received", "unreceived", charts.number),
                ("processed twice", "twice", charts.number),
            ),
            sorted(whole["delivery"], key=lambda row: row["topic"]),
        ),
        table_of(
            "Retries and dead letters",
            "Calls after a message's first one, and messages that were given up.",
            (
                _TOPIC,
                _OPERATION,
                _GROUP,
                ("retries", "retries", charts.number),
                ("dead letters", "dead_letters", charts.number),
            ),
            [row for row in happened if row["retries"] or row["dead_letters"]],
        ),
    ]


def by_time(
    rows: Mapping[str, Sequence[Row]], length: str, totals: Mapping[str, int]
) -> list[Table]:
    """What failed and how long it took in each bucket of `length`, as it is called.

    `totals`: how many rows there are of each, if those are not all.
    """
    failed = [row for row in rows["operations"] if row["errors"]]
    return [
        worst_of(
            "Errors by time",
            f"By topic, operation, group and time, {length} each; where there were any.",
            (
                _FROM,
                _TOPIC,
                _OPERATION,
                _GROUP,
                ("spans", "spans", charts.number),
                ("errors", "errors", charts.number),
                ("error rate", "error_rate", percent),
            ),
            failed,
            "errors",
            totals.get("operations", len(failed)),
        ),
        worst_of(
            "End to end by time",
            f"By topic, group and time of sending, {length} each; messages without a due time.",
            (_FROM, _TOPIC, _GROUP, _MESSAGES, *_TIMES),
            rows["end_to_end"],
            "p99_ms",
            totals.get("end_to_end", len(rows["end_to_end"])),
        ),
        worst_of(
            "Lateness by time",
            f"By topic, stage, group and due time, {length} each.",
            (_FROM, _TOPIC, ("stage", "stage", text), _GROUP, _MESSAGES, *_TIMES),
            rows["lateness"],
            "p99_ms",
            totals.get("lateness", len(rows["lateness"])),
        ),
    ]


def tiles(facts: Mapping[str, Any], whole: Mapping[str, Sequence[Row]]) -> list[tuple[str, str]]:
    """What the page says first: label and value."""

    def total(table: str, name: str) -> int:
        return sum(row[name] for row in whole[table])

    sums = {
        name: sum(row["messages"] for row in whole["operations"] if row["operation"] == name)
        for name in ("send", "process")
    }
    said = [
        ("messages sent", charts.number(sums["send"])),
        ("callbacks", charts.number(sums["process"])),
        ("spans with an error", charts.number(total("operations", "errors"))),
    ]
    fired = [row for row in whole["lateness"] if row["stage"] == "fire"]
    if fired:
        said.append(("fire lateness p50 / p99", _worst(fired)))
        # Of callbacks the consumer's clock tells, which may be behind.
        said.append(("early", charts.number(sum(row["early"] for row in fired))))
    if whole["end_to_end"]:
        said.append(("end to end p50 / p99", _worst(whole["end_to_end"])))
    said.append(("spans", charts.number(facts["spans"])))
    if facts["undecodable"]:
        said.append(("undecodable messages", charts.number(facts["undecodable"])))
    return [
        *said,
        ("sent, never received", charts.number(total("delivery", "unreceived"))),
        ("processed twice", charts.number(total("delivery", "twice"))),
        ("retries", charts.number(total("operations", "retries"))),
        ("dead letters", charts.number(total("operations", "dead_letters"))),
    ]


def _worst(rows: Sequence[Row]) -> str:
    """Of the topic and group with the largest p99."""
    worst = max(rows, key=lambda row: row["p99_ms"])
    return f"{ms(worst['p50_ms'])} / {ms(worst['p99_ms'])}"
