"""How much of the log may go.  Pure.

Whole segments go, oldest first, when they are older than the time kept or when the log is larger
than the size kept; never the last segment, and never anything from `hold` on: the oldest byte that
a timer shard has not taken over yet, or that lies beyond the last checkpoint.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SegmentAge(NamedTuple):
    """A segment that is not the last.  `newest_ms`: no record in it was stored later."""

    start: int
    end: int
    newest_ms: int


def cut_position(
    segments: Sequence[SegmentAge],
    end_position: int,
    now_ms: int,
    keep_ms: int,
    keep_bytes: int,
    hold: int,
) -> int:
    """The segments that end at or before the answer may go.  A limit of 0 does not apply."""
    position = segments[0].start if segments else 0
    for segment in segments:
        too_old = keep_ms > 0 and segment.newest_ms < now_ms - keep_ms
        too_much = keep_bytes > 0 and end_position - segment.end >= keep_bytes
        if segment.end > hold or not (too_old or too_much):
            break
        position = segment.end
    return position
