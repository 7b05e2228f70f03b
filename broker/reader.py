"""Reads records and frames out of the log for pulls: verified, and copied as little as can be.

Any thread.  With `nowait` a read answers from memory or raises BlockingIOError, so that the event
loop tries inline and gives what is cold to a thread.  A frame is always read whole and its CRC
checked, whatever part of it was asked for.
"""

from collections.abc import Iterator
from typing import NamedTuple

from broker import selection
from broker.queues import Queue
from broker.selection import Run
from duemq.errors import Corrupt, InvalidArgument, OffsetOutOfRange
from storage import consume_queue, record
from storage import frame as frame_layout
from storage.log import SegmentedLog
from storage.record import InvalidEntryError

# Consume-queue entries that one read looks at where a filter leaves most out (2 MiB of them).
SCAN_ENTRIES_MAX = 65_536
PAGE_ENTRIES = 4_096
# Frames closer than this are read by one call; between them lie frames of other queues.
GAP_BYTES_MAX = 64 << 10
EXTENT_BYTES_MAX = 8 << 20


class Records(NamedTuple):
    """What one queue gives to a pull: slices of frames, to be joined."""

    slices: list[memoryview]
    size: int
    runs: list[Run]
    records: int
    next_offset: int


class Frames(NamedTuple):
    """Whole log entries of one queue, to be joined."""

    slices: list[memoryview]
    next_offset: int


def check_offset(queue: Queue, offset: int) -> None:
    """Raises OffsetOutOfRange unless a pull may begin at `offset`."""
    low, high = queue.min_offset, queue.max_offset
    if not low <= offset <= high:
        raise OffsetOutOfRange(
            f"offset: {offset} of topic {queue.topic}, queue {queue.queue_id} is not kept:"
            f" {low} to {high} are",
            field="offset",
            value=offset,
            limit=f"{low} to {high}",
        )


def read_records(
    log: SegmentedLog,
    queue: Queue,
    offset: int,
    records_max: int,
    bytes_max: int,
    wanted: frozenset[int] | None = None,
    *,
    at_least_one: bool = True,
    nowait: bool = False,
) -> Records:
    """Records from `offset` on that match; none if there are none yet.

    Raises OffsetOutOfRange, Corrupt, and BlockingIOError with `nowait`.
    """
    check_offset(queue, offset)
    runs: list[Run] = []
    count = size = 0
    last = min(queue.max_offset, offset + SCAN_ENTRIES_MAX)
    # One more than wanted tells whether the last frame is whole.
    entries = records_max + 1 if wanted is None else PAGE_ENTRIES
    while offset < last and count < records_max:
        page = queue.page(offset, min(entries, last - offset), nowait)
        chosen = selection.select(
            page,
            offset,
            records_max - count,
            bytes_max - size,
            wanted,
            at_least_one=at_least_one and not count,
        )
        runs += chosen.runs
        count += chosen.records
        size += chosen.bytes
        page_end = offset + len(page) // consume_queue.ENTRY_BYTES
        offset = chosen.next_offset
        if offset < page_end:
            break
    return Records(_cut_out(log, runs, nowait), size, runs, count, offset)


def read_frames(
    log: SegmentedLog, queue: Queue, offset: int, bytes_max: int, *, nowait: bool = False
) -> Frames:
    """Whole frames from the one that begins at `offset` on; none if there are none yet.

    At least one, then as many as `bytes_max` holds.  Raises OffsetOutOfRange, InvalidArgument,
    Corrupt, and BlockingIOError with `nowait`.
    """
    check_offset(queue, offset)
    page = queue.page(offset, PAGE_ENTRIES, nowait)
    runs = selection.select(page, offset, PAGE_ENTRIES, bytes_max).runs
    slices: list[memoryview] = []
    size = 0
    for frame, data in _verified(log, runs, nowait):
        if size and size + len(data) > bytes_max:
            break
        base_offset, count = _extent_of(data)
        if base_offset != offset:
            raise InvalidArgument(
                f"offset: {offset} is inside the frame that begins at {base_offset}"
                f" (position {frame})",
                field="offset",
                value=offset,
                limit=base_offset,
            )
        offset += count
        slices.append(data)
        size += len(data)
    return Frames(slices, offset)


def _extent_of(entry: memoryview) -> tuple[int, int]:
    """(base offset, count) of the frame in a verified log entry."""
    fields = frame_layout.HEADER.unpack_from(entry, record.HEADER_BYTES)
    return fields[0], fields[6]


def _cut_out(log: SegmentedLog, runs: list[Run], nowait: bool) -> list[memoryview]:
    frames = _verified(log, runs, nowait)
    slices: list[memoryview] = []
    at, data = -1, memoryview(b"")
    for run in runs:
        if run.frame != at:
            at, data = next(frames)
        slices.append(data[run.start - at : run.end - at])
    return slices


def _verified(log: SegmentedLog, runs: list[Run], nowait: bool) -> Iterator[tuple[int, memoryview]]:
    """(position, bytes) of every entry that the runs lie in, once, in order."""
    frames = selection.frames_of(runs)
    base, data = 0, memoryview(b"")
    for index, (frame, _) in enumerate(frames):
        length = _whole(data, frame - base)
        if not length:
            base, data = frame, _read_extent(log, frames[index:], nowait)
            length = _whole(data, 0)
        if not length:
            data = log.read(frame, _length(data, frame), nowait)
            length = _whole(data, 0)
        try:
            record.decode(data, frame - base, frame)
        except InvalidEntryError as error:
            raise Corrupt(
                f"{log.directory}, position {frame}: {error}."
                f" Run `python -m storage check {log.directory}`"
            ) from error
        yield frame, data[frame - base : frame - base + length]


def _whole(data: memoryview, at: int) -> int:
    """Length of the entry at `at` if all of it is in `data`; else 0."""
    if at + record.HEADER_BYTES > len(data):
        return 0
    length = record.plausible_length(data, at)
    return length if at + length <= len(data) else 0


def _length(data: memoryview, frame: int) -> int:
    length = record.plausible_length(data) if len(data) >= record.HEADER_BYTES else 0
    if not length:
        raise Corrupt(f"position {frame}: no entry begins there")
    return length


def _read_extent(log: SegmentedLog, frames: list[tuple[int, int]], nowait: bool) -> memoryview:
    """The bytes of the first frames, as far as one call reads them well."""
    first, end = frames[0]
    for frame, wanted_end in frames[1:]:
        if frame - end > GAP_BYTES_MAX or wanted_end - first > EXTENT_BYTES_MAX:
            break
        end = wanted_end
    return log.read(first, -(-(end - first) // record.ALIGNMENT) * record.ALIGNMENT, nowait)
