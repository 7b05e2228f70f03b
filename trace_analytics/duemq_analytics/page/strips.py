"""Many names over time: a strip each, darker where a value is larger, the worst one first.

More lines than there are colours cannot be told apart; strips can, and their text does not shrink
with a phone.  One hue, so that light and dark are all there is to see.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from xml.sax.saxutils import quoteattr

LEVELS = 8
"""Shades; the template's style has one a level."""

NAMES_MAX = 40


@dataclass(frozen=True)
class Strip:
    """A name, its value over all of the time, and its cells as SVG."""

    label: str
    value: str
    svg: str


@dataclass(frozen=True)
class Strips:
    """A figure of the page."""

    title: str
    scale: str
    strips: Sequence[Strip]
    times: Sequence[str]
    left_out: int


Cells = Mapping[datetime, float]


def strips(
    title: str,
    cells: Mapping[str, Cells],
    totals: Mapping[str, float],
    length: timedelta,
    form: Callable[[float], str],
    *,
    log: bool = False,
) -> Strips:
    """`cells`: by name, the value of each bucket of this length; `totals`: of all the time.

    Shades are of the value, or with `log` of its logarithm.
    """
    moments = sorted({moment for each in cells.values() for moment in each})
    first, last = moments[0], moments[-1]
    columns = round((last - first) / length) + 1
    values = [value for each in cells.values() for value in each.values() if value > 0]
    least, most = min(values, default=0.0), max(values, default=0.0)
    begin = least if log else 0.0
    names = sorted(cells, key=lambda name: (-totals.get(name, 0.0), name))
    drawn = []
    for name in names[:NAMES_MAX]:
        levels = {
            round((moment - first) / length): _level(value, begin, most)
            for moment, value in cells[name].items()
        }
        value = form(totals.get(name, 0.0))
        label = quoteattr(f"{title}: {name}, {value}")
        drawn.append(Strip(name, value, _svg(levels, columns, label)))
    middle = first + (last - first) / 2
    return Strips(
        title,
        f"{'Palest' if log else 'Blank'} {form(begin)}, fullest {form(most)}"
        f"{', by the logarithm' if log else ''}.",
        drawn,
        [f"{moment:%m-%d %H:%M}" for moment in (first, middle, last + length)],
        len(names) - len(drawn),
    )


def _level(value: float, begin: float, most: float) -> int:
    """1 to LEVELS, by the logarithm if there is one of `begin`; 0: nothing."""
    if value <= 0:
        return 0
    if most <= begin:
        return LEVELS
    share = math.log(value / begin) / math.log(most / begin) if begin else value / most
    return 1 + round(share * (LEVELS - 1))


def _svg(levels: Mapping[int, int], columns: int, label: str) -> str:
    """A unit a bucket; what is of one level is one path."""
    paths: dict[int, list[str]] = defaultdict(list)
    for column in sorted(levels):
        paths[levels[column]].append(f"M{column} 0h1v1h-1z")
    drawn = "".join(
        f'<path class="l{level}" d="{"".join(paths[level])}"/>' for level in sorted(paths) if level
    )
    return (
        f'<svg class="strip" viewBox="0 0 {columns} 1" preserveAspectRatio="none" role="img" '
        f"aria-label={label}>{drawn}</svg>"
    )
