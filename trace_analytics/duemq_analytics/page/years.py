"""Which part of the time that spans claim charts are of.

A clock that stands at 1970, or is years ahead, would make one point of all that others say.  Tables
keep what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

AHEAD = timedelta(days=1)
"""A clock that is further ahead of the report's is wrong."""

GAP_MAX = timedelta(days=366)
"""What lies before a longer time without a span is of a wrong clock, or of a former life."""


def charted(years: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of a page, from what each calendar year has: `ahead` (see AHEAD), spans, first, last.

    `charted` is first and last of what charts are of, `outside` how many spans are not.
    """
    spans = sum(year["spans"] for year in years)
    first = min((year["first"] for year in years), default=None)
    last = max((year["last"] for year in years), default=None)
    found = [year for year in years if not year["ahead"]] or years
    begin, end, inside = None, None, 0
    for year in sorted(found, key=lambda year: year["first"], reverse=True):
        if begin is not None and begin - year["last"] > GAP_MAX:
            break
        begin, end, inside = year["first"], end or year["last"], inside + year["spans"]
    return {
        "spans": spans,
        "first": first,
        "last": last,
        "charted": (begin, end),
        "outside": spans - inside,
    }
