"""Reads the records of a queue that an SQL filter takes.

Any thread, as reader.py.  Every record is looked into, so whole frames are read and verified.  One
read looks at so many records as take a few milliseconds; who reads goes on from `next_offset`, and
lets others have a turn between.
"""

from collections.abc import Callable
from typing import TypeAlias

from duemq.protocol.record_bytes import BODY_TAG, read_varint
from duemq_server.broker.filtering.sql_filter import Fields, SqlFilter
from duemq_server.broker.reading import reader, selection
from duemq_server.broker.reading.damage import readable_of
from duemq_server.broker.reading.reader import Records
from duemq_server.broker.reading.selection import FrameRun
from duemq_server.broker.store.queues import Queue
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog

# What one read looks at, with a short expression.
RECORDS_MAX = 512
BYTES_MAX = 1 << 20
# The body of a larger record is left out before it is decoded: cheaper than a copy.
WHOLE_BYTES_MAX = 16 << 10

Decode: TypeAlias = Callable[[bytes], Fields | None]
"""Of an encoded duemq.v1.Record, perhaps without its body; None: it is malformed."""


def read_matching(
    log: SegmentedLog,
    queue: Queue,
    offset: int,
    records_max: int,
    bytes_max: int,
    wanted: SqlFilter,
    decode: Decode,
    *,
    at_least_one: bool = True,
    nowait: bool = False,
) -> Records:
    """Records from `offset` on that match, out of those that one read looks at.

    With `at_least_one` the first match comes even if it is larger than `bytes_max`.  Raises
    OffsetOutOfRange, Corrupt, and BlockingIOError with `nowait`.
    """
    reader.check_offset(queue, offset)
    offset = queue.present(offset)
    count = records_per_read(wanted)
    # One more tells whether the last frame is whole: it is left for the next read if not.
    page = queue.page(offset, count + 1, nowait)
    seen = selection.select(page, offset, count, BYTES_MAX)
    sizes = consume_queue.decode(page)["size"].tolist()
    taken: list[memoryview] = []
    runs: list[FrameRun] = []
    size = 0
    found = readable_of(seen.runs, lambda left: reader.cut_out(log, left, nowait))
    for run, data in zip(found.runs, found.slices, strict=True):
        at = 0
        for number in range(run.offset, run.offset + run.records):
            end = at + sizes[number - offset]
            message = decode(_record(data, at, end))
            if message is not None and wanted.matches(message):
                full = len(taken) >= records_max or size + end - at > bytes_max
                if full and (taken or not at_least_one):
                    return Records(taken, size, runs, len(taken), number)
                taken.append(data[at:end])
                size += end - at
                _add(runs, run, number, run.start + at, run.start + end)
            at = end
    following = seen.next_offset if found.damaged is None else found.damaged
    return Records(taken, size, runs, len(taken), following)


def records_per_read(wanted: SqlFilter) -> int:
    """How many records one read looks at."""
    return max(1, RECORDS_MAX // wanted.weight)


def _record(data: memoryview, at: int, end: int) -> bytes:
    """The record of the entry data[at:end]; of a large one what follows its body."""
    if data[at + 1] < 0x80:
        head = at + 2
    elif data[at + 2] < 0x80:
        head = at + 3
    else:
        _, head = read_varint(data, at + 1, end)
    if end - head > WHOLE_BYTES_MAX and data[head] == BODY_TAG:
        length, body = read_varint(data, head + 1, end)
        if 0 <= body <= end - length:
            head = body + length
    return bytes(data[head:end])


def _add(runs: list[FrameRun], whole: FrameRun, offset: int, start: int, end: int) -> None:
    """Notes that a record of `whole` is taken."""
    last = runs[-1] if runs else None
    if last and last.offset + last.records == offset and last.frame == whole.frame:
        runs[-1] = last._replace(records=last.records + 1, end=end)
    else:
        runs.append(FrameRun(offset, 1, start, end, whole.frame, whole.store_ms))
