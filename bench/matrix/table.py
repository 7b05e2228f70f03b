"""The rows beside each other, with ratios to the first.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duemq_cli import text

# Figure → heading.
COLUMNS = {
    "accepted_per_s": "accept/s",
    "fired_per_s": "fire/s",
    "p50_ms": "late p50 ms",
    "p99_ms": "late p99 ms",
    "rss_mb": "RSS MB",
    "rss_peak_mb": "peak MB",
    "restart_accepts_s": "accepts s",
    "restart_fires_s": "fires s",
    "index_bytes_per_timer": "index B",
}


def lines(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """A line a number of pending timers; `rows` are (pending, figures)."""
    first = rows[0][1] if rows else {}
    cells = [
        [f"{pending:,}", *(_cell(figures, first, name) for name in COLUMNS)]
        for pending, figures in rows
    ]
    return text.table(["pending", *COLUMNS.values()], cells)


def _cell(figures: Mapping[str, Any], first: Mapping[str, Any], name: str) -> str | None:
    """The value, and behind the first row's its multiple of that one."""
    value, base = figures.get(name), first.get(name)
    if value is None:
        return None
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")
    return shown if figures is first or not base else f"{shown} ×{value / base:.2f}"
