"""What falls due when, drawn for people.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duemq.descriptions import TimerBucket
from duemq_cli.text import duration, local_time

BAR_CELLS = 40
COLUMNS = ("due", "within", "pending", "share")


def histogram_rows(
    buckets: Sequence[TimerBucket], named: Callable[[int], str] = local_time
) -> list[dict[str, Any]]:
    """A row a bucket, with the values of COLUMNS; `named` writes a bucket's beginning."""
    most = max((each.pending for each in buckets), default=1)
    return [
        {
            "due": named(each.from_ms) if each.from_ms else "overdue",
            "within": duration(each.to_ms - each.from_ms) if each.from_ms else "",
            "pending": each.pending,
            "share": "█" * max(1, round(each.pending / most * BAR_CELLS)),
        }
        for each in buckets
    ]
