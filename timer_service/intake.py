"""Frames as fetched from a broker, turned into columns.  Pure.

Cost is per frame: arrays are taken over as they lie in the frame, records are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from duemq.errors import Corrupt
from storage import frame, record
from timer_service.rows import Rows, new_rows


class FetchedFrame(NamedTuple):
    """A frame, and where it and its payload start in the fetched bytes."""

    frame: frame.Frame
    start: int
    payload: int


def frames_in(data: bytes | memoryview) -> Iterator[FetchedFrame]:
    """The verified frames of a fetch, in queue order.  Raises Corrupt."""
    at = 0
    try:
        for entry in record.split(data):
            found = frame.decode(entry.body)
            if entry.kind != frame.KIND or not found.timed:
                raise Corrupt(f"offset {found.base_offset}: not a frame of delayed messages")
            yield FetchedFrame(found, at, at + record.HEADER_BYTES + found.payload_at)
            at += entry.end - entry.position
    except ValueError as error:
        raise Corrupt(f"fetched bytes, at {at}: {error}") from error


def rows_of(fetched: FetchedFrame, source: int, target: int) -> Rows:
    """The timers of a frame; their homes are relative to the fetched bytes."""
    each = fetched.frame
    rows = new_rows(each.count)
    sizes = each.sizes
    rows.wide[0] = each.due_ms
    rows.wide[1] = np.arange(each.base_offset, each.end_offset)
    rows.narrow[0] = source
    rows.narrow[1] = target
    rows.narrow[2] = np.cumsum(sizes, dtype=np.uint32) - sizes + np.uint32(fetched.payload)
    rows.narrow[3] = sizes
    rows.narrow[4] = each.tag_hashes
    rows.narrow[5] = each.key_hashes
    return rows
