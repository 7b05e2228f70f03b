"""What lies in a file, a line an entry.  Reads only; never takes the lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime

from duemq_server.storage import checkpoint, durable_mark, frame, record, recovery
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.indexes import consume_queue, key_run
from duemq_server.storage.indexes.key_run import KeyRun
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from duemq_server.storage.segment import NAME_DIGITS, Segment

_HEAD_BYTES = 64
_INDEX_DIRECTORY = "consumequeue"


def dump(path: str, disk: Disk) -> Iterator[str]:
    """Lines that describe a file, or every segment of a log's directory.

    Raises ValueError for a file that is none of storage's, CorruptFile, UnknownVersion.
    """
    if os.path.isdir(path):
        names = [n for n in disk.listdir(path) if len(n) == NAME_DIGITS and n.isdigit()]
        if not names:
            raise ValueError(f"{path}: no segments here")
        for name in names:
            yield f"# {os.path.join(path, name)}"
            yield from dump(os.path.join(path, name), disk)
        return
    file = disk.open(path)
    head = bytes(file.pread(_HEAD_BYTES, 0))
    if head[4:8] == checkpoint.MAGIC:
        payload = checkpoint.decode(bytes(file.pread(file.size(), 0)), path)
        yield f"checkpoint payload_bytes={len(payload)}"
    elif head[4:8] == durable_mark.MAGIC:
        yield f"durable position={durable_mark.decode(head)}"
    elif head[4:8] == key_run.MAGIC:
        yield from _dump_key_run(KeyRun(file, path))
    elif f"/{_INDEX_DIRECTORY}/" in os.path.abspath(path):
        yield from _dump_index(file, int(os.path.basename(path)))
    else:
        yield from _dump_entries(file, path)


def _dump_entries(file: DiskFile, path: str) -> Iterator[str]:
    name = os.path.basename(path)
    _, _, broken_at = name.partition(".broken-")
    start = broken_at.partition(".")[0] or name
    segment = Segment(int(start) if start.isdigit() else 0, path)
    scan = recovery.Scan(file, segment, segment.start)
    for entry in scan:
        yield describe(entry)
    stop = scan.stop
    tail = recovery.search(file, segment, stop.position)
    line = f"end position={stop.position} offset={stop.position - segment.start}"
    if tail.nonzero_end > stop.position:
        line += f" reason={stop.reason!r} broken_bytes={tail.nonzero_end - stop.position}"
    if tail.valid_position is not None:
        line += f" valid_again_at={tail.valid_position}"
    yield line


def describe(entry: Entry) -> str:
    """One line of an entry."""
    line = (
        f"position={entry.position} length={entry.end - entry.position} kind={entry.kind}"
        f" synced={entry.synced_position}"
    )
    if entry.kind == epoch.KIND:
        begun = epoch.decode(entry.body)
        return (
            f"{line} epoch={begun.epoch} disk={begun.disk_id.hex()} stored={_time(begun.stored_ms)}"
        )
    if entry.kind != frame.KIND:
        return f"{line} body_bytes={len(entry.body)}"
    message = frame.decode(entry.body)
    line += (
        f" topic={message.topic} queue={message.queue_id} offset={message.base_offset}"
        f" count={message.count} payload_bytes={message.payload_length}"
        f" stored={_time(message.store_ms)} producer={message.producer_id:#x}"
        f" epoch={message.producer_epoch} sequence={message.sequence}"
    )
    if message.send_back:
        line += " send_back"
    if message.timed:
        due = message.due_ms
        line += (
            f" target={message.target_topic}/{message.target_queue_id}"
            f" due={_time(int(due.min()))}..{_time(int(due.max()))}"
        )
    return line


def _dump_index(file: DiskFile, first: int) -> Iterator[str]:
    whole = file.size() // consume_queue.ENTRY_BYTES * consume_queue.ENTRY_BYTES
    for number, entry in enumerate(consume_queue.decode(file.pread(whole, 0)), first):
        yield (
            f"offset={number} position={entry['position']} size={entry['size']}"
            f" frame_back={entry['frame_back']} tag_hash={entry['tag_hash']:#010x}"
            f" key_hash={entry['key_hash']:#010x} stored={_time(int(entry['store_ms']))}"
        )


def _dump_key_run(run: KeyRun) -> Iterator[str]:
    yield f"key_run base={run.base} span={run.span} count={run.count}"
    entries = run.entries()
    rows = zip(key_run.hashes_of(entries), key_run.offsets_of(entries), strict=True)
    for key_hash, offset in rows:
        yield f"key_hash={key_hash:#010x} offset={run.base + int(offset)}"


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):
        return f"{ms}ms"


assert record.MAGIC_OFFSET == 4  # all files of storage carry their magic there
