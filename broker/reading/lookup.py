"""Finds records of a topic by key, by message id, by time, in bounded steps.  Pure; any thread.

Consume queues hold the CRC-32 of every key and the store time of every record.  A key is found by
the sorted runs of these hashes (key_index.py); where a span of a queue has no run, because it is
too young or the run is damaged, its column of hashes is compared (README.md, "Look-ups").  Either
way candidates are read from the log and compared themselves.  A message id has no hash: the frames
of the time range are searched for its encoded field.

A step looks at so many entries and so many bytes of the log at most, and answers where the next
one goes on.  A queue that cannot be read hides none of the others: it comes last, and is the error
of the last step.
"""

import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from duemq.errors import Corrupt, DuemqError, Unavailable
from duemq.protocol import checks
from duemq_server.broker.reading import reader, selection, time_search
from duemq_server.broker.reading.damage import Readable, SetAsideError, readable_of
from duemq_server.broker.reading.selection import FrameRun
from duemq_server.broker.store.queues import Queue
from duemq_server.storage.errors import StorageError
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog

_log = logging.getLogger(__name__)

Offsets: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

# Of one step: consume-queue entries (128 MiB of them), bytes of the log, bytes of the answer.
ENTRIES_MAX = 4 << 20
LOG_BYTES_MAX = 64 << 20
ANSWER_BYTES_MAX = 4 << 20
# Read at a time.
PAGE_ENTRIES = 64 << 10
CHUNK_BYTES = 1 << 20
# What a frame costs beside its bytes, in bytes read.
FRAME_COST = 4 << 10
# What a look into a run of the key index costs, in entries compared.
RUN_COST = 10 << 10
# Entries that lie closer are read by one call.
GAP_ENTRIES = 128

# By version, which is in front: of which topic, where to go on, what could not be read.  The first
# two, without a topic, are of older brokers.
_CURSORS = {1: struct.Struct("<iq"), 2: struct.Struct("<iqiq")}
_CURSORS |= {3: struct.Struct("<Qiq"), 4: struct.Struct("<Qiqiq")}
_CURSOR_VERSION = 3
_CURSOR_VERSION_UNREAD = 4
_FIELD_MESSAGE_ID = 0x12


class LookupStart(NamedTuple):
    """Where a step begins, and of the first queue that could not be read where that was.

    Where both are one queue, the others have been looked at.
    """

    queue_id: int
    offset: int
    unread: tuple[int, int] | None = None


class Cursor(NamedTuple):
    """What a client holds between two steps.

    `topic_id`: of the topic that was looked at; 0: not known.  One that was made anew under its
    name has other offsets.
    """

    topic_id: int
    place: LookupStart


class FoundRecord(NamedTuple):
    """`entry`: the record as it lies in a RecordBatch, its tag and length included."""

    queue_id: int
    offset: int
    store_ms: int
    entry: bytes


class LookupStep(NamedTuple):
    """`following`: where the next step begins; None: that was all."""

    found: list[FoundRecord]
    following: LookupStart | None


@dataclass(frozen=True)
class MessageQuery:
    """What is looked for; `matches` has the last word on a candidate's entry."""

    from_ms: int = 0
    to_ms: int = 0
    """Before it; 0: no bound."""
    key_hash: int = 0
    """0: any."""
    needle: bytes = b""
    """Bytes that the entry must hold; empty: any."""
    matches: Callable[[memoryview], bool] = field(default=lambda entry: True)

    @property
    def selective(self) -> bool:
        """Not all from some place on."""
        return bool(self.key_hash or self.needle or self.from_ms or self.to_ms)


class _Page(NamedTuple):
    """Candidates: entries of the consume queue and their offsets; `following`: where to go on."""

    entries: consume_queue.Entries
    offsets: Offsets
    following: int

    def offset(self, index: int) -> int:
        return int(self.offsets[index])


@dataclass
class _Budget:
    """What a step may still do."""

    records: int
    entries: int = ENTRIES_MAX
    log_bytes: int = LOG_BYTES_MAX
    answer_bytes: int = ANSWER_BYTES_MAX

    @property
    def full(self) -> bool:
        return min(self.records, self.log_bytes, self.answer_bytes) <= 0

    @property
    def used_up(self) -> bool:
        return self.full or self.entries <= 0


def message_id_field(message_id: str) -> bytes:
    """How a record says its message id."""
    text = message_id.encode()
    length = bytes([len(text)]) if len(text) < 128 else bytes([len(text) & 0x7F | 0x80, 1])
    return bytes([_FIELD_MESSAGE_ID]) + length + text


def encode_cursor(cursor: Cursor) -> bytes:
    """What a client hands back to go on."""
    place = cursor.place
    version = _CURSOR_VERSION if place.unread is None else _CURSOR_VERSION_UNREAD
    values = cursor.topic_id, place.queue_id, place.offset, *(place.unread or ())
    body = bytes([version]) + _CURSORS[version].pack(*values)
    return body + struct.pack("<I", zlib.crc32(body))


def decode_cursor(cursor: bytes) -> Cursor:
    """Raises InvalidArgument for what `encode_cursor` never gave."""
    body = cursor[:-4]
    layout = _CURSORS.get(body[0]) if body else None
    whole = layout is not None and len(body) == 1 + layout.size
    if layout is None or not whole or cursor[-4:] != struct.pack("<I", zlib.crc32(body)):
        limit = "that of this broker's last answer, unchanged"
        raise checks.wrong("cursor", cursor[:32].hex(), limit)
    values = layout.unpack(body[1:])
    topic_id, queue_id, offset, *unread = values if len(values) % 2 else (0, *values)
    place = LookupStart(queue_id, offset, (unread[0], unread[1]) if unread else None)
    return Cursor(topic_id, place)


def search(
    log: SegmentedLog,
    queues: Sequence[Queue],
    query: MessageQuery,
    start: LookupStart,
    records_max: int,
    **bounds: int,
) -> LookupStep:
    """One step, in the order queue, offset.  `bounds`: of the budget, in place of the constants.

    Raises Corrupt and what reads of the disk raise, in the last step.
    """
    budget = _Budget(records_max, **bounds)
    found: list[FoundRecord] = []
    unread, failure = start.unread, None
    if unread is not None and unread[0] == start.queue_id:
        raise _why_unread(log, queues, query, start)
    for queue in queues:
        if queue.queue_id < start.queue_id:
            continue
        offset = start.offset if queue.queue_id == start.queue_id else 0
        stopped = _search_queue(log, queue, query, offset, budget, found)
        if stopped is None:
            continue
        if stopped.error is None:
            return LookupStep(found, LookupStart(queue.queue_id, stopped.offset, unread))
        failure = failure or stopped.error
        unread = unread or (queue.queue_id, stopped.offset)
    if failure is not None and not found:
        raise failure
    return LookupStep(found, LookupStart(*unread, unread) if unread else None)


def _why_unread(
    log: SegmentedLog, queues: Sequence[Queue], query: MessageQuery, start: LookupStart
) -> Exception:
    """It is read once more, to say what is wrong; that others can be read now nobody knows."""
    for queue in queues:
        if queue.queue_id == start.queue_id:
            stopped = _search_queue(log, queue, query, start.offset, _Budget(1), [])
            if stopped is not None and stopped.error is not None:
                return stopped.error
    return Unavailable(f"queue {start.queue_id} could not be read a moment ago: ask again")


class _Stopped(NamedTuple):
    """Where in a queue, and why if not for want of budget."""

    offset: int
    error: Exception | None = None


def _search_queue(
    log: SegmentedLog,
    queue: Queue,
    query: MessageQuery,
    low: int,
    budget: _Budget,
    found: list[FoundRecord],
) -> _Stopped | None:
    """Where it stopped; None: at the end."""
    before = len(found)
    try:
        if query.from_ms:
            low = max(low, time_search.first_stored_since(queue, query.from_ms))
        high = queue.max_offset
        if query.to_ms:
            high = min(high, time_search.first_stored_since(queue, query.to_ms))
        while (low := queue.present(max(low, queue.min_offset))) < high:
            if budget.used_up:
                return _Stopped(low)
            try:
                low = _search_page(log, queue, query, low, high, budget, found)
            except (IndexError, FileNotFoundError):
                if queue.min_offset <= low:
                    raise
                # Retention has removed what was to be looked at.
    except (StorageError, OSError, IndexError, DuemqError) as error:
        if not queue.dropped:
            _log.error("%s/%d cannot be read at offset %d or behind: %s", *queue.key, low, error)
        return _Stopped(max([low, *(each.offset + 1 for each in found[before:])]), error)
    return None


def _search_page(
    log: SegmentedLog,
    queue: Queue,
    query: MessageQuery,
    low: int,
    high: int,
    budget: _Budget,
    found: list[FoundRecord],
) -> int:
    """Looks at a page of entries, or as much of it as the budget allows; where to go on."""
    page = _by_key_index(queue, query, low, high, budget) if query.key_hash else None
    if page is None:
        page = _compared(queue, query, low, high, budget)
    for runs, indexes in _chunks(page):
        if budget.full:
            return page.offset(indexes[0][0])
        budget.log_bytes -= sum(end - at + FRAME_COST for at, end in selection.frames_of(runs))
        readable = _cut_out(log, runs, query)
        places = dict(zip(runs, indexes, strict=True))
        for run, data in zip(readable.runs, readable.slices, strict=True):
            members = places[run]
            for index in _candidates(page.entries, data, run.start, members, query.needle):
                at = int(page.entries["position"][index]) - run.start
                entry = data[at : at + int(page.entries["size"][index])]
                if not query.matches(entry):
                    continue
                offset = page.offset(index)
                if found and budget.answer_bytes < len(entry):
                    budget.answer_bytes = 0
                    return offset
                store_ms = int(page.entries["store_ms"][index])
                found.append(FoundRecord(queue.queue_id, offset, store_ms, bytes(entry)))
                budget.answer_bytes -= len(entry)
                budget.records -= 1
                if budget.full:
                    return offset + 1
        if readable.damaged is not None:
            return readable.damaged
    return page.following


def _cut_out(log: SegmentedLog, runs: list[FrameRun], query: MessageQuery) -> Readable:
    """What was set aside is passed over, but where a place is asked for."""

    def cut(some: list[FrameRun]) -> list[memoryview]:
        try:
            return reader.cut_out(log, some)
        except SetAsideError as error:
            if query.selective:
                raise
            raise Corrupt(str(error)) from error

    return readable_of(runs, cut)


def _by_key_index(
    queue: Queue, query: MessageQuery, low: int, high: int, budget: _Budget
) -> _Page | None:
    """The candidates of a span, or of a part of it that has as many as may be found; None: no run
    says."""
    high = min(high, queue.keys.end_of_span(low))
    limit = budget.records
    offsets = queue.keys.find(query.key_hash, low, high, limit)
    if offsets is None:
        return None
    budget.entries -= RUN_COST
    entries = _entries_at(queue, np.array(offsets, np.int64))
    if not np.all(entries["key_hash"] == query.key_hash):
        _log.error("%s, offset %d: the key run is not of this queue", queue.key, low)
        queue.keys.discard(low)
        return None
    following = offsets[-1] + 1 if len(offsets) == limit else high
    return _Page(entries, np.array(offsets, np.int64), following)


def _entries_at(queue: Queue, offsets: Offsets) -> consume_queue.Entries:
    """Scattered entries of a consume queue."""
    if not len(offsets):
        return np.empty(0, consume_queue.DTYPE)
    pieces = []
    for near in np.split(offsets, np.flatnonzero(np.diff(offsets) > GAP_ENTRIES) + 1):
        while len(near):  # a page ends where offsets are left out that the log has lost
            first = int(near[0])
            page = consume_queue.decode(queue.page(first, int(near[-1]) - first + 1))
            here = near[near < first + len(page)]
            if not len(here):
                raise IndexError(f"offset {first} of {queue.key} is not there")
            pieces.append(page[here - first])
            near = near[len(here) :]
    return np.concatenate(pieces)


def _compared(queue: Queue, query: MessageQuery, low: int, high: int, budget: _Budget) -> _Page:
    """The candidates of a page of the consume queue, which for a key ends with its span."""
    selective = query.key_hash or query.needle
    count = min(PAGE_ENTRIES, high - low, budget.entries if selective else budget.records)
    if query.key_hash:
        count = min(count, queue.keys.end_of_span(low) - low)
    page = consume_queue.decode(queue.page(low, count))
    budget.entries -= len(page)
    if not query.key_hash:
        return _Page(page, np.arange(low, low + len(page)), low + len(page))
    chosen = np.flatnonzero(page["key_hash"] == query.key_hash)
    return _Page(page[chosen], chosen + low, low + len(page))


def _chunks(page: _Page) -> Iterator[tuple[list[FrameRun], list[list[int]]]]:
    """Runs, and the entries in each; of so many frames that they are read at once."""
    entries = page.entries
    if not len(entries):
        return
    position = entries["position"].astype(np.int64)
    frame = position - entries["frame_back"]
    ends = position + entries["size"]
    apart = (np.diff(page.offsets) != 1) | (np.diff(frame) != 0)
    breaks = np.flatnonzero(apart | (position[1:] != ends[:-1])) + 1
    firsts = np.concatenate(([0], breaks))
    pasts = np.concatenate((breaks, [len(entries)]))
    runs: list[FrameRun] = []
    indexes: list[list[int]] = []
    size = 0
    rows = zip(
        firsts.tolist(),
        pasts.tolist(),
        position[firsts].tolist(),
        ends[pasts - 1].tolist(),
        frame[firsts].tolist(),
        strict=True,
    )
    for first, past, start, end, at in rows:
        beside = bool(runs) and runs[-1].frame == at
        if runs and not beside and size + end - at > CHUNK_BYTES:
            yield runs, indexes
            runs, indexes, size = [], [], 0
        size += end - (runs[-1].end if beside else at)
        runs.append(FrameRun(page.offset(first), past - first, start, end, at, 0))
        indexes.append(list(range(first, past)))
    yield runs, indexes


def _candidates(
    entries: consume_queue.Entries, data: memoryview, start: int, members: list[int], needle: bytes
) -> Iterator[int]:
    """Those of `members` whose entries hold the needle; `data` begins at log position `start`."""
    if not needle:
        yield from members
        return
    text = bytes(data)
    at = text.find(needle)
    if at < 0:
        return
    starts = entries["position"][members].astype(np.int64) - start
    while at >= 0:
        slot = int(np.searchsorted(starts, at, side="right")) - 1
        yield members[slot]
        if slot + 1 == len(members):
            return
        at = text.find(needle, int(starts[slot + 1]))
