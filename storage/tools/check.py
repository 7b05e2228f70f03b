"""Verifies a data directory from end to end.  Reads only.

Finds logs by their `durable` file, checkpoints by their magic, and consume
queues with their key runs beside a log.  What cannot be read is damage like any other, and holds
up nothing else.  A service may run meanwhile, but then what it writes just now may look torn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from duemq_server.storage import checkpoint, durable_mark, frame, recovery
from duemq_server.storage.disk import Disk, ReadableFile
from duemq_server.storage.errors import CorruptFile, CorruptLog, StorageError
from duemq_server.storage.indexes import consume_queue, key_run
from duemq_server.storage.indexes.index import FixedIndex
from duemq_server.storage.indexes.key_run import KeyRun
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.log_parts.worn_file import PAGE_BYTES, WornFile
from duemq_server.storage.record import HEADER_BYTES
from duemq_server.storage.replicas import catching_up
from duemq_server.storage.segment import Segment, list_segments
from duemq_server.storage.tools import set_aside

LOG_NAME = "commitlog"
INDEX_NAME = "consumequeue"
_PAGE_ENTRIES = 65_536
_REBUILD = (
    "Entries beyond the checkpoint are rebuilt at the next start; if it is before them, remove this"
    " folder while the broker is stopped: all are rebuilt then"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report; `damage` decides the exit code."""

    damage: bool
    text: str


def check(directory: str, disk: Disk) -> Iterator[Finding]:
    """Findings of a directory and all below it.  Raises FileNotFoundError."""
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory} is not a directory")
    for folder, folders, names in os.walk(directory):
        folders.sort()
        if durable_mark.FILE_NAME in names:
            yield from check_log(folder, disk)
        for name in sorted(names):
            yield from _check_checkpoint(os.path.join(folder, name), disk)
        if LOG_NAME in folders and INDEX_NAME in folders:
            yield from check_consume_queues(folder, disk)


def _unread(path: str, error: Exception) -> Finding:
    if isinstance(error, FileNotFoundError):
        return Finding(False, f"{path}: gone meanwhile")
    return Finding(True, str(error) if path in str(error) else f"{path}: {error}")


def check_log(directory: str, disk: Disk) -> Iterator[Finding]:
    """Every entry of a log, and its end."""
    segments = list_segments(directory, disk)
    mark = 0
    try:
        mark = durable_mark.DurableMark(directory, disk).load()
    except (StorageError, OSError) as error:
        yield _unread(os.path.join(directory, durable_mark.FILE_NAME), error)
    behind = catching_up.is_set(directory, disk)
    if not segments:
        yield Finding(mark > 0, f"{directory}: no segment, durable up to {mark}")
    for segment, successor in zip(segments, [*segments[1:], None], strict=True):
        try:
            file = WornFile(disk.open(segment.path))
            entries, stop = _scan(file, segment)
            tail = recovery.search(file, segment, stop.position)
        except (StorageError, OSError) as error:
            yield _unread(segment.path, error)
            continue
        if file.unread:
            unread = f"{len(file.unread) * PAGE_BYTES} bytes, in whole pages, cannot be read"
            sound = f"sound up to position {stop.position}"
            yield Finding(True, f"{segment.path}, offset {min(file.unread)}: {unread}; {sound}")
        where = f"{segment.path}, offset {stop.position - segment.start}"
        if successor is not None and stop.position != successor.start:
            yield Finding(True, f"{where}, position {stop.position}: {stop.reason}")
        elif successor is None and not behind and recovery.is_damage(stop, tail, mark):
            yield Finding(
                True,
                f"{where}, position {stop.position}: {stop.reason};"
                f" valid entries follow at {tail.valid_position}",
            )
        elif successor is None and stop.position < mark:
            yield Finding(True, f"{where}: the log ends here, but was durable up to {mark}")
        elif tail.nonzero_end > stop.position and not file.unread:
            broken = tail.nonzero_end - stop.position
            yield Finding(False, f"{where}: torn tail of {broken} bytes, cut at the next start")
        yield Finding(False, f"{segment.path}: {entries} entries up to {stop.position}")


def _scan(file: ReadableFile, segment: Segment) -> tuple[int, recovery.Stop]:
    scan = recovery.Scan(file, segment, segment.start)
    entries = 0
    for entry in scan:
        if entry.kind == frame.KIND:
            try:
                frame.decode(entry.body)
            except ValueError as error:
                return entries, recovery.Stop(entry.position, str(error))
        entries += 1
    return entries, scan.stop


def _check_checkpoint(path: str, disk: Disk) -> Iterator[Finding]:
    try:
        if bytes(disk.open(path).pread(8, 0))[4:] == checkpoint.MAGIC:
            payload = checkpoint.load(path, disk)
            yield Finding(False, f"{path}: checkpoint of {len(payload or b'')} bytes")
    except (StorageError, OSError) as error:
        yield _unread(path, error)


def check_consume_queues(data_directory: str, disk: Disk) -> Iterator[Finding]:
    """Every entry of every consume queue against the frame it points to."""
    log = SegmentedLog.open_for_reading(os.path.join(data_directory, LOG_NAME), disk)
    root = os.path.join(data_directory, INDEX_NAME)
    for topic in disk.listdir(root):
        try:
            queues = disk.listdir(os.path.join(root, topic))
        except (NotADirectoryError, FileNotFoundError):  # a file of somebody's; deleted meanwhile
            continue
        for queue in filter(str.isdigit, queues):
            path = os.path.join(root, topic, queue)
            name = topic.rpartition(".")[0] or topic
            try:
                index = FixedIndex(path, disk, consume_queue.ENTRY_BYTES)
                checked = _check_consume_queue(index, log, name, int(queue))
                yield Finding(False, f"{path}: {checked} entries")
            except IndexError as error:
                yield Finding(True, f"{path}: {error}")
            except (StorageError, OSError) as error:
                yield _unread(path, error)
            yield from _check_key_runs(path, disk)


def _check_key_runs(directory: str, disk: Disk) -> Iterator[Finding]:
    """Every key run of a consume queue against its entries."""
    try:
        index = FixedIndex(directory, disk, consume_queue.ENTRY_BYTES)
        names = disk.listdir(directory)
    except (StorageError, OSError):
        return  # as was told of the queue, or it has no files
    for name in filter(key_run.is_name, names):
        path = os.path.join(directory, name)
        try:
            with closing(disk.open(path)) as file:
                run = KeyRun(file, path)
                sound = _check_key_run(run, index)
        except (StorageError, OSError) as error:
            yield _unread(path, error)
            continue
        text = f"{run.count} keys" if sound else "differs from the consume queue: remove it"
        yield Finding(not sound, f"{path}: {text}")


def _check_key_run(run: KeyRun, index: FixedIndex) -> bool:
    """Whether it says what the consume queue says, where that still begins before its end."""
    first = max(index.first, run.base)
    past = run.base + run.span
    if past > index.end or key_run.base_of(os.path.basename(run.path)) != run.base:
        return False
    pieces = [np.empty(0, np.uint64)]
    number = first
    while (number := index.present(number)) < past:
        page = consume_queue.decode(index.read(number, min(_PAGE_ENTRIES, past - number)))
        pieces.append(key_run.entries_of(page["key_hash"], number - run.base))
        number += len(page)
    entries = run.entries()
    return np.array_equal(
        entries[key_run.offsets_of(entries) >= first - run.base], np.sort(np.concatenate(pieces))
    )


def _check_consume_queue(index: FixedIndex, log: SegmentedLog, topic: str, queue_id: int) -> int:
    """How many entries were compared; those of deleted segments are passed over."""
    number = index.first
    page_first = number
    page = index.read(page_first, _PAGE_ENTRIES)
    checked = 0
    while (number := index.present(number)) < index.end:
        if number - page_first >= len(page) // index.entry_bytes:
            page_first = number
            page = index.read(page_first, _PAGE_ENTRIES)
        at = (number - page_first) * index.entry_bytes
        position, _, back, *_ = consume_queue.ENTRY.unpack_from(page, at)
        if position - back < log.start_position:
            number += 1
            continue
        expected = _expected(log, position - back, topic, queue_id, number, index)
        stored = _read(index, number, len(expected) // index.entry_bytes)
        if stored != expected:
            raise _mismatch(index, number, f"differs from the frame at {position - back}")
        count = len(expected) // index.entry_bytes
        number += count
        checked += count
    return checked


def _expected(
    log: SegmentedLog, position: int, topic: str, queue_id: int, number: int, index: FixedIndex
) -> bytes:
    """Entries from `number` on that the frame at `position` stands for."""
    try:
        entry = log.read_entry(position)
    except (IndexError, CorruptLog, OSError) as error:
        # Why is a finding of the log's own, if it is damaged; else nothing there is to be cut.
        what = f"points to {position}, where no entry can be read"
        raise _mismatch(index, number, what) from error
    if entry.kind == set_aside.GAP:
        return _read(index, number, 1)  # what it should be nobody can tell any more
    if entry.kind != frame.KIND or len(entry.body) < HEADER_BYTES:
        raise _mismatch(index, number, f"points to {position}, which is no message frame")
    stored = frame.decode(entry.body)
    skipped = number - stored.base_offset
    if (stored.topic, stored.queue_id) != (topic, queue_id) or not 0 <= skipped < stored.count:
        raise _mismatch(
            index,
            number,
            f"points to {position}, a frame of {stored.topic}/{stored.queue_id} with offsets"
            f" {stored.base_offset} to {stored.end_offset}",
        )
    entries = consume_queue.encode_frame(position, stored)[skipped * index.entry_bytes :]
    return entries[: (index.end - number) * index.entry_bytes]


def _read(index: FixedIndex, first: int, count: int) -> bytes:
    data = b""
    while len(data) < count * index.entry_bytes:
        got = len(data) // index.entry_bytes
        data += index.read(first + got, count - got)
    return data


def _mismatch(index: FixedIndex, number: int, problem: str) -> CorruptFile:
    offset = number * index.entry_bytes
    return CorruptFile(index.directory, offset, f"entry {number} {problem}", _REBUILD)
