"""Frames as fetched from a broker, turned into columns.  Pure.

Cost is per frame: arrays are taken over as they lie in the frame, records are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from duemq.errors import Corrupt
from storage import frame, record
from timer_service.rows import Rows


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
    count = each.count
    sizes = each.sizes
    home = np.empty(count, dtype=np.uint32)
    home[0] = fetched.payload
    if count > 1:
        np.cumsum(sizes[:-1], dtype=np.uint32, out=home[1:])
        home[1:] += np.uint32(fetched.payload)
    return Rows(
        each.due_ms,
        np.arange(each.base_offset, each.base_offset + count, dtype=np.int64),
        np.full(count, source, dtype=np.int32),
        np.full(count, target, dtype=np.int32),
        home,
        sizes,
        each.tag_hashes,
        each.key_hashes,
    )

