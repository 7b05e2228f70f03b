"""Charts as inline SVG that follows the page's light or dark colours.

matplotlib knows no CSS variables, so it draws with colours that mean nothing and `_themed` puts
`var(--…)` in their place.  Text stays text: it can be searched and is read aloud.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

COLOURS_MAX = 8
"""Colours that can still be told apart; further ones begin again."""

DASHES = ("-", "--", ":", "-.")

WIDTH_IN, HEIGHT_IN = 7.2, 2.7
"""Of the plot: 518 units wide, which the page never shows narrower than as many pixels."""
LEGEND_IN = 0.23  # a line of the legend
LEGEND_CHARACTERS = 78  # that fit into one
LEGEND_COLUMNS_MAX = 4
KEY_CHARACTERS = 6  # the room of a line's sample
LABEL_CHARACTERS_MAX = 300
"""Groups have shorter names; a span can claim any, and each character of it would be drawn."""

_INK, _GRID = "#0a0b0c", "#0d0e0f"
_SERIES = tuple(f"#a1b2{i:02x}" for i in range(COLOURS_MAX))
_VARIABLES: Mapping[str, str] = {
    _INK: "var(--ink-2)",
    _GRID: "var(--line)",
    **{colour: f"var(--s{i + 1})" for i, colour in enumerate(_SERIES)},
}
_COLOUR = re.compile("|".join(_VARIABLES))

_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # A group may have dollars in its name.
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
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
    "legend.fontsize": 11.5,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
}


@dataclass
class Series:
    """A line: points in ascending x.  Lines of one colour belong together."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    colour: int = 0
    dash: int = 0


def look(number: int) -> tuple[int, int]:
    """Colour and dash of the line with this number: each colour once before any has a new dash."""
    return number, number // COLOURS_MAX


@dataclass
class Chart:
    """A drawing with its caption; `svg` is safe to put into HTML as it is."""

    title: str
    svg: str


def over_time(
    title: str, topic: str, unit: str, series: Sequence[Series], *, log: bool = False
) -> Chart:
    """Lines over time (UTC)."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"{title} {topic}"}):
        figure, axes = _figure(series, unit, log=log, marker_below=40)
        locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
        return Chart(title, _svg(figure, f"{title}, {topic}"))


def percentile_curves(title: str, topic: str, unit: str, series: Sequence[Series]) -> Chart:
    """Value at each percentile; x is stretched towards 100, where the interesting part is."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"{title} {topic}"}):
        stretched = [replace(line, x=[_stretch(x) for x in line.x]) for line in series]
        figure, axes = _figure(stretched, unit, log=True, marker_below=0)
        ticks = (0, 50, 90, 95, 99, 99.9)
        axes.set_xticks([_stretch(tick) for tick in ticks], [f"p{tick:g}" for tick in ticks])
        axes.set_xlim(0, _stretch(99.95))
        return Chart(title, _svg(figure, f"{title}, {topic}"))


def _stretch(percentile: float) -> float:
    """0, 90, 99, 99.9 at equal distances."""
    return 1.0 - math.log10(max(100.0 - percentile, 1e-3)) / 2.0


def _figure(
    series: Sequence[Series], unit: str, *, log: bool, marker_below: int
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for line in series:
        axes.plot(
            list(line.x),
            list(line.y),
            label=_shown(line.label),
            color=_SERIES[line.colour % COLOURS_MAX],
            linestyle=DASHES[line.dash % len(DASHES)],
            marker="o" if len(line.x) < marker_below else None,
            markersize=2.5,
        )
    if log and any(value > 0 for line in series for value in line.y):
        axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=min(0.0, *(value for line in series for value in line.y), 0.0))
    longest = max((len(_shown(line.label)) for line in series), default=0)
    if longest:
        columns = LEGEND_CHARACTERS // (longest + KEY_CHARACTERS)
        columns = max(1, min(columns, LEGEND_COLUMNS_MAX))
        figure.set_figheight(HEIGHT_IN + LEGEND_IN * math.ceil(len(series) / columns))
        figure.legend(loc="outside lower left", ncols=columns)
    return figure, axes


def _shown(label: str) -> str:
    """matplotlib hides labels that begin with an underscore."""
    if len(label) > LABEL_CHARACTERS_MAX:
        label = f"{label[: LABEL_CHARACTERS_MAX - 1]}…"
    return f"\u2060{label}" if label.startswith("_") else label


def _svg(figure: Figure, label: str) -> str:
    out = io.StringIO()
    # Not by `savefig`, which draws everything twice: once only to find its places.
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    drawing = text[text.index("<svg") :]
    for pattern, kept in _CLEANED:
        drawing = pattern.sub(kept, drawing)
    drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{_quoted(label)}"', 1)
    return _COLOUR.sub(lambda found: _VARIABLES[found[0]], drawing)


# What matplotlib writes for a file of its own and what does harm in a page: a fixed size, a style
# sheet for all of the page, ids that every drawing has.
_CLEANED = (
    (re.compile(r'(<svg[^>]*?) width="[^"]*"'), r"\1"),
    (re.compile(r'(<svg[^>]*?) height="[^"]*"'), r"\1"),
    (re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL), ""),
    (re.compile(r"<style.*?</style>\s*", re.DOTALL), ""),
    (re.compile(r'<g id="[^"]*"'), "<g"),
)


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
