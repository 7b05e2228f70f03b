"""Frames as fetched from a broker, turned into columns.  Pure.

Cost is per frame: arrays are taken over as they lie in the frame, records are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from duemq.errors import Corrupt, OffsetOutOfRange
from duemq_server.storage import frame, record
from duemq_server.timer_service.timers.rows import Rows, new_rows


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


def check_whole(fetched: Iterable[FetchedFrame], expected: int, where: str) -> int:
    """Raises OffsetOutOfRange if frames are missing at the front or in between; where they end."""
    for each in fetched:
        if each.frame.base_offset != expected:
            raise OffsetOutOfRange(
                f"{where}: offset {each.frame.base_offset} came where {expected} was expected",
                field="offset",
                value=each.frame.base_offset,
                limit=expected,
            )
        expected = each.frame.end_offset
    return expected


def rows_of(fetched: Sequence[FetchedFrame], source: int, targets: Sequence[int]) -> Rows:
    """The timers of frames, one target a frame; their homes are relative to the fetched bytes."""
    counts = np.array([each.frame.count for each in fetched])
    starts = np.cumsum(counts) - counts
    rows = new_rows(int(counts.sum()))
    for (each, _, _), start in zip(fetched, starts.tolist(), strict=True):
        end = start + each.count
        rows.wide[0, start:end] = each.due_ms
        rows.narrow[3, start:end] = each.sizes
        rows.narrow[4, start:end] = each.tag_hashes
        rows.narrow[5, start:end] = each.key_hashes
    bases = np.array([each.frame.base_offset for each in fetched])
    rows.wide[1] = np.repeat(bases - starts, counts) + np.arange(len(rows))
    before = np.cumsum(rows.size, dtype=np.int64) - rows.size
    payloads = np.array([each.payload for each in fetched])
    rows.narrow[0] = source
    rows.narrow[1] = np.repeat(np.array(targets), counts)
    rows.narrow[2] = np.repeat(payloads - before[starts], counts) + before
    return rows
