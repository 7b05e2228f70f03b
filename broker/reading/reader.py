"""Reads records and frames out of the log for pulls: verified, and copied as little as can be.

Any thread.  With `nowait` a read answers from memory or raises BlockingIOError, so that the event
loop tries inline and gives what is cold to a thread.  A frame is read whole and its CRC checked,
whatever part of it was asked for, and so is what the consume queue says of it, which has none.  But
where a tag filter takes little of a large frame that this process has written itself, only that
little is read: no other body.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from duemq.errors import Corrupt, DuemqError, InvalidArgument, OffsetOutOfRange, Unavailable
from duemq.protocol.record_bytes import read_entry
from duemq_server.broker.reading import selection
from duemq_server.broker.reading.damage import UNREADABLE, SetAsideError, readable_of
from duemq_server.broker.reading.selection import FrameRun
from duemq_server.broker.store.queues import Queue
from duemq_server.storage import frame as frame_layout
from duemq_server.storage import record, recovery
from duemq_server.storage.errors import DiskFull, StorageError
from duemq_server.storage.frame import Extent
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import InvalidEntryError
from duemq_server.storage.tools import set_aside

log_ = logging.getLogger(__name__)

# Consume-queue entries that one read looks at where a filter leaves most out (2 MiB of them).
SCAN_ENTRIES_MAX = 65_536
PAGE_ENTRIES = 4_096
# Frames closer than this are read by one call; between them lie frames of other queues.
GAP_BYTES_MAX = 64 << 10
EXTENT_BYTES_MAX = 8 << 20
# Of a frame that is so many times larger than what a filter takes of it, only that is read.
SPARSE = 8
TRUST_NOTHING = 1 << 63
_NOWHERE: Extent = (0, 0, 0, 0)


class Records(NamedTuple):
    """What one queue gives to a pull: slices of frames, to be joined."""

    slices: list[memoryview]
    size: int
    runs: list[FrameRun]
    records: int
    next_offset: int
    untraced: bool = False
    """None of them carries a trace.  Known of whole frames only."""


class StoredRecord(NamedTuple):
    """A record's entry as it lies in the log, and its hashes."""

    entry: memoryview
    tag_hash: int
    key_hash: int


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
    trusted_from: int = TRUST_NOTHING,
) -> Records:
    """Records from `offset` on that match; none if there are none yet.

    With a filter, few records of a frame are read without the others beside them where the frame
    lies at log position `trusted_from` or beyond.  Raises OffsetOutOfRange, Corrupt, and
    BlockingIOError with `nowait`.
    """
    check_offset(queue, offset)
    runs: list[FrameRun] = []
    count = size = 0
    last = min(queue.max_offset, offset + SCAN_ENTRIES_MAX)
    # One more than wanted tells whether the last frame is whole.
    entries = records_max + 1 if wanted is None else PAGE_ENTRIES
    while (offset := queue.present(offset)) < last and count < records_max:
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
    found = runs
    untraced: list[bool] = []
    if wanted is None:
        readable = readable_of(runs, lambda left: cut_out(log, left, nowait, untraced))
    else:
        readable = readable_of(
            runs, lambda left: _cut_out_filtered(log, left, trusted_from, nowait)
        )
    runs, slices, damaged = readable
    if len(runs) < len(found):
        count, size = sum(run.records for run in runs), sum(map(len, slices))
    if damaged is not None:
        offset = damaged
    return Records(slices, size, runs, count, offset, bool(untraced) and all(untraced))


def read_frames(
    log: SegmentedLog, queue: Queue, offset: int, bytes_max: int, *, nowait: bool = False
) -> Frames:
    """Whole frames from the one that begins at `offset` on; none if there are none yet.

    A frame of which consumers may not see all yet is not there yet.

    At least one, then as many as `bytes_max` holds.  Raises OffsetOutOfRange, InvalidArgument,
    Corrupt, and BlockingIOError with `nowait`.
    """
    check_offset(queue, offset)
    end = queue.max_offset
    while True:
        offset = queue.present(offset)
        page = queue.page(offset, PAGE_ENTRIES, nowait)
        runs = selection.select(page, offset, PAGE_ENTRIES, bytes_max).runs
        try:
            try:
                return _whole_frames(log, runs, (offset, end), bytes_max, nowait)
            except (StorageError, OSError) as error:  # of many that are read by one call
                first = [run for run in runs if run.frame == runs[0].frame]
                if isinstance(error, BlockingIOError) or len(first) == len(runs):
                    raise
                return _whole_frames(log, first, (offset, end), bytes_max, nowait)
        except SetAsideError as gap:
            lost = sum(run.records for run in runs if run.frame == gap.position)
            log_.warning("%s: %d offsets from %d on are skipped", gap, lost, offset)
            offset += lost


def _whole_frames(
    log: SegmentedLog,
    runs: list[FrameRun],
    offsets: tuple[int, int],
    bytes_max: int,
    nowait: bool,
) -> Frames:
    """Between two offsets, up to what was set aside, or is damaged.

    Raises that one's error if it is the first.
    """
    offset, end = offsets
    slices: list[memoryview] = []
    size = 0
    frames = _verified(log, runs, nowait)
    while True:
        try:
            frame, data = next(frames)
        except StopIteration:
            break
        except BlockingIOError:
            raise
        except UNREADABLE:
            if slices:  # what lies before it
                break
            raise
        if size and size + len(data) > bytes_max:
            break
        extent = frame_layout.extent_of(data, record.HEADER_BYTES)
        base_offset, count, *_ = extent
        if not base_offset <= offset < base_offset + count:
            if slices:
                break
            raise _misled(log, frame, offset, extent)
        if base_offset != offset:
            raise InvalidArgument(
                f"offset: {offset} is inside the frame that begins at {base_offset}"
                f" (position {frame})",
                field="offset",
                value=offset,
                limit=base_offset,
            )
        if offset + count > end:
            break
        offset += count
        slices.append(data)
        size += len(data)
    return Frames(slices, offset)


def read_each(
    log: SegmentedLog,
    places: Sequence[tuple[Queue, int]],
    bytes_max: int,
    *,
    nowait: bool = False,
) -> list[StoredRecord | DuemqError]:
    """Single records of several queues, by offset: the first of `places`, in their order.

    As many as `bytes_max` holds, and one at least.  What cannot be read is its own error:
    OffsetOutOfRange, Corrupt.  Raises BlockingIOError with `nowait`.
    """
    entries: list[tuple[int, ...] | DuemqError] = []
    size = 0
    for queue, offset in places:
        try:
            entry = _entry_at(queue, offset, nowait)
        except BlockingIOError:
            raise
        except (IndexError, StorageError, OSError, DuemqError) as error:
            entries.append(_as_duemq_error(error))
            continue
        if size and size + entry[1] > bytes_max:
            break
        size += entry[1]
        entries.append(entry)
    found = [(at, entry) for at, entry in enumerate(entries) if isinstance(entry, tuple)]
    # In the order of the log, so that a frame is read and verified once.
    found.sort(key=lambda each: each[1][0])
    runs = [
        FrameRun(places[at][1], 1, position, position + size, position - back, store_ms)
        for at, (position, size, back, _, _, store_ms) in found
    ]
    read: dict[int, StoredRecord | DuemqError] = {}
    for (at, entry), data in zip(found, _cut_out_each(log, runs, nowait), strict=True):
        read[at] = StoredRecord(data, *entry[3:5]) if isinstance(data, memoryview) else data
    return [read.get(at, entry) for at, entry in enumerate(entries)]  # type: ignore[arg-type]


def _entry_at(queue: Queue, offset: int, nowait: bool) -> tuple[int, ...]:
    page = queue.page(offset, 1, nowait)
    if not page:
        raise IndexError(f"offset {offset} of {queue.key} is not there")
    return consume_queue.ENTRY.unpack(page)


def _cut_out_each(
    log: SegmentedLog, runs: list[FrameRun], nowait: bool
) -> list[memoryview | DuemqError]:
    """As `cut_out`; where that fails, each run by itself."""
    try:
        return list(cut_out(log, runs, nowait))
    except BlockingIOError:
        raise
    except (IndexError, StorageError, OSError, DuemqError) as error:
        if len(runs) == 1:
            return [_as_duemq_error(error, gone=0 <= runs[0].frame < log.start_position)]
        return [each for run in runs for each in _cut_out_each(log, [run], nowait)]


def _as_duemq_error(error: Exception, *, gone: bool = True) -> DuemqError:
    """`gone`: what is not there may have been removed."""
    if isinstance(error, DuemqError):
        return error
    if gone and isinstance(error, (IndexError, FileNotFoundError)):  # retention was faster
        return OffsetOutOfRange(f"offset: just removed ({error})", field="offset")
    if isinstance(error, DiskFull):  # too many open files
        return Unavailable(str(error))
    return Corrupt(f"{type(error).__name__}: {error}")


def _misled(log: SegmentedLog, frame: int, offset: int, extent: Extent) -> Corrupt:
    """Nothing is given out for what it is not."""
    base_offset, count, *_ = extent
    return _astray(
        log,
        frame,
        f"the frame here has offsets {base_offset} to {base_offset + count - 1}, and what the"
        f" consume queue says of offset {offset} is not so",
    )


def _astray(log: SegmentedLog, position: int, why: str) -> Corrupt:
    """The log or what points into it: nobody knows here, and only one of both is to be removed."""
    return Corrupt(
        f"{log.directory}, position {position}: {why}."
        f" Run `duemq-storage check {os.path.dirname(log.directory)}`: it names what is damaged"
    )


def cut_out(
    log: SegmentedLog,
    runs: list[FrameRun],
    nowait: bool = False,
    untraced: list[bool] | None = None,
) -> list[memoryview]:
    """The bytes of each run, verified.  Raises Corrupt, and BlockingIOError with `nowait`.

    `untraced` gets an entry a frame: whether it says so.
    """
    frames = _verified(log, runs, nowait)
    slices: list[memoryview] = []
    at, data, extent, parts = -1, memoryview(b""), _NOWHERE, None
    for run in runs:
        if run.frame != at or extent is _NOWHERE:
            at, data = next(frames)
            extent, parts = frame_layout.extent_of(data, record.HEADER_BYTES), None
            if untraced is not None:
                untraced.append(frame_layout.is_untraced(data, record.HEADER_BYTES))
        start, end = run.start - at, run.end - at
        if extent != (run.offset, run.records, start, end):
            parts = parts or frame_layout.decode(data[record.HEADER_BYTES : extent[3]])
            place = start - record.HEADER_BYTES, end - record.HEADER_BYTES
            if parts.place(run.offset, run.records) != place:
                raise _misled(log, at, run.offset, extent)
        slices.append(data[start:end])
    return slices


def _cut_out_filtered(
    log: SegmentedLog, runs: list[FrameRun], trusted_from: int, nowait: bool
) -> list[memoryview]:
    """As `cut_out`; of a sparse frame that is trusted the runs alone."""
    taken: defaultdict[int, int] = defaultdict(int)
    for run in runs:
        if run.seen_end and run.frame >= trusted_from:
            taken[run.frame] += run.end - run.start
    sparse = {
        run.frame for run in runs if 0 < taken[run.frame] * SPARSE <= run.seen_end - run.frame
    }
    if not sparse:
        return cut_out(log, runs, nowait)
    whole = iter(cut_out(log, [run for run in runs if run.frame not in sparse], nowait))
    return [_alone(log, run, nowait) if run.frame in sparse else next(whole) for run in runs]


def _alone(log: SegmentedLog, run: FrameRun, nowait: bool) -> memoryview:
    """The bytes of a run; its first record must be one, as far as that can be told."""
    data = log.read(run.start, run.end - run.start, nowait)
    start, end = read_entry(data, 0, len(data))
    fits = end == len(data) if run.records == 1 else end < len(data)
    if start < 0 or not fits:
        raise _astray(log, run.start, "no record begins here")
    return data


def _verified(
    log: SegmentedLog, runs: list[FrameRun], nowait: bool
) -> Iterator[tuple[int, memoryview]]:
    """(position, bytes) of every entry that the runs lie in, once, in order."""
    frames = selection.frames_of(runs)
    base, data = 0, memoryview(b"")
    for index, (frame, _) in enumerate(frames):
        length = _whole(data, frame - base)
        if not length:
            base, data = frame, _read_extent(log, frames[index:], nowait)
            length = _whole(data, 0)
        if not length:
            data = log.read(frame, _length(log, data, frame), nowait)
            length = _whole(data, 0)
        try:
            entry = record.decode(data, frame - base, frame)
        except InvalidEntryError as error:
            remedy = recovery.remedy(log.directory, frame)
            raise Corrupt(f"{log.directory}, position {frame}: {error}. {remedy}") from error
        if entry.kind == set_aside.GAP:
            raise SetAsideError(log.directory, frame)
        if entry.kind != frame_layout.KIND:
            raise _astray(log, frame, "no message frame begins here")
        yield frame, data[frame - base : frame - base + length]


def _whole(data: memoryview, at: int) -> int:
    """Length of the entry at `at` if all of it is in `data`; else 0."""
    if at < 0 or at + record.HEADER_BYTES > len(data):
        return 0
    length = record.plausible_length(data, at)
    return length if at + length <= len(data) else 0


def _length(log: SegmentedLog, data: memoryview, frame: int) -> int:
    length = record.plausible_length(data) if len(data) >= record.HEADER_BYTES else 0
    if not length:
        raise _astray(log, frame, "no entry begins here")
    return length


def _read_extent(log: SegmentedLog, frames: list[tuple[int, int]], nowait: bool) -> memoryview:
    """The bytes of the first frames, as far as one call reads them well."""
    first, end = frames[0]
    for frame, wanted_end in frames[1:]:
        if frame - end > GAP_BYTES_MAX or wanted_end - first > EXTENT_BYTES_MAX:
            break
        end = wanted_end
    length = min(end - first, record.ENTRY_BYTES_MAX)  # whatever a damaged consume queue says
    return log.read(first, -(-length // record.ALIGNMENT) * record.ALIGNMENT, nowait)
