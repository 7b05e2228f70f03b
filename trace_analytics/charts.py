"""Charts as inline SVG that follows the page's light or dark colours.

matplotlib knows no CSS variables, so it draws with colours that mean nothing and `_themed` puts
`var(--…)` in their place.  Text stays text: it can be searched and is read aloud.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

SERIES_MAX = 8
"""Colours that can still be told apart; further series take them again, dashed."""

WIDTH_IN, HEIGHT_IN = 7.2, 2.7

_INK, _GRID = "#0a0b0c", "#0d0e0f"
_SERIES = tuple(f"#a1b2{i:02x}" for i in range(SERIES_MAX))
_VARIABLES: Mapping[str, str] = {
    _INK: "var(--ink-2)",
    _GRID: "var(--line)",
    **{colour: f"var(--s{i + 1})" for i, colour in enumerate(_SERIES)},
}
_COLOUR = re.compile("|".join(_VARIABLES))

_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass
class Series:
    """A line: points in ascending x."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]


@dataclass
class Chart:
    """A drawing with its caption; `svg` is safe to put into HTML as it is."""

    title: str
    svg: str
    notes: list[str] = field(default_factory=list)


def over_time(title: str, unit: str, series: Sequence[Series], *, log: bool = False) -> Chart:
    """Lines over time (UTC)."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure, axes = _figure(series, unit, log=log, marker_below=40)
        locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
        return Chart(title, _svg(figure, title))


def percentile_curves(title: str, unit: str, series: Sequence[Series]) -> Chart:
    """Value at each percentile; x is stretched towards 100, where the interesting part is."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": title}):
        stretched = [Series(s.label, [_stretch(x) for x in s.x], s.y) for s in series]
        figure, axes = _figure(stretched, unit, log=True, marker_below=0)
        ticks = (0, 50, 90, 95, 99, 99.9)
        axes.set_xticks([_stretch(tick) for tick in ticks], [f"p{tick:g}" for tick in ticks])
        axes.set_xlim(0, _stretch(99.95))
        return Chart(title, _svg(figure, title))


def _stretch(percentile: float) -> float:
    """0, 90, 99, 99.9 at equal distances."""
    return 1.0 - _log10(max(100.0 - percentile, 1e-3)) / 2.0


def _log10(value: float) -> float:
    from math import log10

    return log10(value)


def _figure(
    series: Sequence[Series], unit: str, *, log: bool, marker_below: int
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for i, line in enumerate(series):
        axes.plot(
            list(line.x),
            list(line.y),
            label=line.label,
            color=_SERIES[i % SERIES_MAX],
            linestyle="-" if i < SERIES_MAX else "--",
            marker="o" if len(line.x) < marker_below else None,
            markersize=2.5,
        )
    if log and any(value > 0 for line in series for value in line.y):
        axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=min(0.0, *(value for line in series for value in line.y), 0.0))
    if series:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure, axes


def _svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    drawing = text[text.index("<svg") :]
    drawing = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawing, count=1)
    drawing = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawing, count=1)
    drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{_quoted(title)}"', 1)
    return _COLOUR.sub(lambda found: _VARIABLES[found[0]], drawing)


def _quoted(text: str) -> str:
    return (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    )


def number(value: float) -> str:
    """A number for people: 1,234 · 56.7 · 0.12."""
    size = abs(value)
    if size >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")


def moment(text: Any) -> datetime:
    """A time out of a table, with its zone: Spark's are UTC."""
    time: datetime = text
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
