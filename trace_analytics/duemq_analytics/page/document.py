"""The page as one HTML file, light and dark, without a script or anything from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from duemq_analytics.answers.buckets import MINUTE_S, WHOLE_S
from duemq_analytics.page import messages, tables, waterfalls
from duemq_analytics.page.figures import Figure, Period, figures_of
from duemq_analytics.page.tables import Row
from duemq_analytics.waterfall.places import Span

CHARTED_TOPICS_MAX = 6
"""Topics with charts of their own, the busiest first; tables name more."""


TEXT_COLUMNS = frozenset(
    ("topic", "operation", "consumer_group", "stage", "error_type", "message_id", "show")
) | {"bucket_ts"}
"""Whose cells begin at the left."""


@dataclass(frozen=True)
class Section:
    """A topic's part of the page."""

    title: str
    figures: list[Figure]


@dataclass(frozen=True)
class Content:
    """What a page is made of."""

    facts: Mapping[str, Any]
    """spans, undecodable, topics, first, last, charted, outside (`years.charted`)."""
    rows: Mapping[str, Sequence[Row]]
    """Of operations, end_to_end, lateness, delivery; by bucket_s: WHOLE_S, `fine_s`, minutes."""
    fine_s: int
    """Buckets of the charts."""
    examples: Sequence[Row] = ()
    """EXAMPLES_SCHEMA: the worst of each kind first."""
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """By message id, of the examples that get a waterfall."""
    errors: Sequence[Row] = ()
    """Kinds of error: topic, operation, consumer_group, error_type, errors, last_ts, message_id."""
    by_time: Mapping[str, int] = field(default_factory=dict)
    """How many rows the tables by time would have: `rows` need only have those that they show."""


def document(content: Content, now: datetime) -> str:
    """The HTML; `now` is when it was made."""
    facts, rows, fine_s = content.facts, content.rows, content.fine_s
    whole = {name: _of(table, WHOLE_S) for name, table in rows.items()}
    charted = facts["topics"][:CHARTED_TOPICS_MAX]
    undrawn = False
    shown: list[tables.Table] = []
    sections: list[Section] = []
    if facts["spans"]:
        begin, end = facts["charted"]
        period = Period(begin, end, fine_s)
        charts = {
            name: [row for row in (*whole[name], *_of(table, fine_s)) if row["topic"] in charted]
            for name, table in rows.items()
        }
        undrawn = not all(map(period.has, (*charts["end_to_end"], *charts["lateness"])))
        sections = [Section(topic, figures_of(topic, charts, period)) for topic in charted]
        slot_s = max(MINUTE_S, fine_s)
        slots = {name: _of(table, slot_s) for name, table in rows.items()}
        slot = Period(begin, end, slot_s).called
        kinds = messages.kinds_of_error(content.errors)
        shown = [*tables.of_all_time(whole), kinds, *tables.by_time(slots, slot, content.by_time)]
    totals = {name: sum(row[name] for row in whole["delivery"]) for name in ("unreceived", "twice")}
    return _template().render(
        facts=facts,
        now=now.astimezone(UTC),
        tiles=tables.tiles(facts, whole),
        sections=sections,
        undrawn=undrawn,
        left_out=len(facts["topics"]) - len(charted),
        tables=shown,
        messages=messages.tables(content.examples, totals),
        waterfalls=waterfalls.waterfalls(content.examples, content.spans),
        text_columns=TEXT_COLUMNS,
        Markup=Markup,
    )


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("duemq_analytics", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def _of(rows: Sequence[Row], length_s: int) -> list[Row]:
    """Those of buckets of this length."""
    return [row for row in rows if row["bucket_s"] == length_s]
