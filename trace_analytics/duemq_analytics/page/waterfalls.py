"""Waterfalls of single messages: a bar for each of its spans, as plain HTML and CSS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duemq_analytics import charts
from duemq_analytics.page.messages import show_command
from duemq_analytics.page.tables import OPERATIONS, Row, ms
from duemq_analytics.waterfall.places import Span
from duemq_analytics.waterfall.telling import told

KINDS = {"slowest": 10, "latest": 5}
"""Messages of each kind that have a waterfall."""

BARS_MAX = 200
"""Of a message."""

_NS_PER_MS = 1_000_000
_SAID = {"slowest": "from its sending to {group}", "latest": "past its due time to {group}"}


@dataclass(frozen=True)
class Bar:
    """A span: who did what when; `left` and `width` in % of the whole."""

    operation: str
    group: str
    process: str
    at_ms: str
    took_ms: str
    left: str
    width: str
    colour: int
    failed: bool
    note: str


@dataclass(frozen=True)
class Waterfall:
    """A message's way."""

    topic: str
    message_id: str
    took: str
    said: str
    show: str
    whole_ms: str
    bars: Sequence[Bar]
    left_out: int


def chosen(examples: Sequence[Row]) -> list[Row]:
    """Those that get a waterfall, each message once."""
    found: dict[tuple[str, str], Row] = {}
    for kind, most in KINDS.items():
        for row in [row for row in examples if row["kind"] == kind][:most]:
            found.setdefault((row["topic"], row["message_id"]), row)
    return list(found.values())


def waterfalls(examples: Sequence[Row], spans: Mapping[str, Sequence[Span]]) -> list[Waterfall]:
    """Of `chosen` messages; `spans` by message id, in the order of their starts."""
    return [
        _waterfall(row, spans[row["message_id"]])
        for row in chosen(examples)
        if spans.get(row["message_id"])
    ]


def _waterfall(row: Row, spans: Sequence[Span]) -> Waterfall:
    shown = spans[:BARS_MAX]
    begin = min(span["start_ns"] for span in shown)
    whole = max(span["start_ns"] + span["duration_ns"] for span in shown) - begin
    return Waterfall(
        row["topic"],
        row["message_id"],
        ms(row["us"] / 1_000),
        _SAID[row["kind"]].format(group=row["consumer_group"] or "its callback"),
        show_command(row),
        _ms(whole),
        [_bar(span, begin, whole) for span in shown],
        len(spans) - len(shown),
    )


def _bar(span: Span, begin: int, whole: int) -> Bar:
    at, took, all_of_it = span["start_ns"] - begin, span["duration_ns"], max(1, whole)
    operation = span["operation"] or ""
    known = operation in OPERATIONS
    return Bar(
        operation,
        span["consumer_group"] or "",
        " ".join(filter(None, (span["service"], span["instance"]))),
        _ms(at),
        _ms(took),
        f"{100 * at / all_of_it:.2f}",
        f"{100 * took / all_of_it:.2f}",
        OPERATIONS.index(operation) + 1 if known else charts.COLOURS_MAX,
        span["status"] == "ERROR",
        told(span),
    )


def _ms(ns: int) -> str:
    return f"{ns / _NS_PER_MS:,.3f}"
