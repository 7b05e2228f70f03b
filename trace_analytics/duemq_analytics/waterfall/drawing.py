"""A message's spans as lines with bars, one below the other.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from duemq_analytics.waterfall.places import Span
from duemq_analytics.waterfall.telling import told
from duemq_cli.text import shown, table

BAR_CELLS_MIN = 10
BAR_CELLS_MAX = 120

_NS_PER_MS = 1_000_000
_COLUMNS = ("operation", "group", "by", "at_ms", "took_ms", "", "what")


def lines(spans: Sequence[Span], width: int) -> list[str]:
    """A table of the spans, in their order, as wide as a terminal of `width` cells if it can be."""
    begin = min(span["start_ns"] for span in spans)
    whole = max(span["start_ns"] + span["duration_ns"] for span in spans) - begin
    bare = table(_COLUMNS, [_cells(span, begin, "█") for span in spans])
    cells = max(BAR_CELLS_MIN, min(BAR_CELLS_MAX, width - max(map(cell_len, bare)) + 1))
    return table(
        _COLUMNS,
        [_cells(span, begin, bar(span, begin, whole, cells)) for span in spans],
    )


def bar(span: Span, begin: int, whole: int, cells: int) -> str:
    """Where the span lies in the whole, in cells; never shorter than one."""
    scale = cells / max(1, whole)
    first = min(cells - 1, int((span["start_ns"] - begin) * scale))
    last = min(cells, round((span["start_ns"] - begin + span["duration_ns"]) * scale))
    return "·" * first + "█" * max(1, last - first) + "·" * (cells - max(first + 1, last))


def _cells(span: Span, begin: int, drawn: str) -> list[Any]:
    return [
        span["operation"],
        span["consumer_group"],
        span["instance"] or span["service"],
        f"{(span['start_ns'] - begin) / _NS_PER_MS:,.3f}",
        f"{span['duration_ns'] / _NS_PER_MS:,.3f}",
        drawn,
        shown(told(span)),
    ]
