"""Builds the runs of the key index.  Pure but for the disk; one thread.

A run is written under a name of its own and then renamed into its queue's folder, so that a crash
leaves a whole run or none, and one file at most that the next start removes.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from duemq_server.broker.store.queues import Queue
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFailed
from duemq_server.storage.indexes import consume_queue, key_run

TEMPORARY = "key_index.tmp"
# Spans planned at once: the newest of each queue come first, and others may have grown meanwhile.
PLANNED_MAX = 64
# Read at a time.  Few, as NumPy keeps the event loop waiting for some of what is done with them.
PAGE_ENTRIES = 16 << 10


class KeySpan(NamedTuple):
    """What a run is to be built of; `base` is its first offset."""

    queue: Queue
    base: int


class Plan(NamedTuple):
    """`spans`: to be built now, PLANNED_MAX at most; `missing`: how many have no run in all."""

    spans: list[KeySpan]
    missing: int
    built: int


class KeyBuilder:
    """Of one data directory."""

    def __init__(self, data_dir: str, disk: Disk) -> None:
        """Removes what a crash has left.  Raises DiskFailed."""
        self._disk = disk
        self._path = os.path.join(data_dir, TEMPORARY)
        if disk.exists(self._path):
            disk.unlink(self._path)

    @staticmethod
    def plan(queues: Sequence[Queue], saved: Mapping[str, Sequence[int]]) -> Plan:
        """What to build; `saved`: the ends of the queues by topic as of a saved checkpoint."""
        spans: list[KeySpan] = []
        missing = built = 0
        for queue in queues:
            ends = saved.get(queue.topic, ())
            high = ends[queue.queue_id] if queue.queue_id < len(ends) else 0
            high = min(high, queue.max_offset)  # what is hidden cannot be read yet
            if high < queue.keys.span or queue.dropped:
                continue
            low = queue.min_offset
            here = queue.keys.missing(low, high)
            missing += here
            built += len(queue.keys)
            if here and len(spans) < PLANNED_MAX:
                spans += [KeySpan(queue, base) for base in queue.keys.bases_missing(low, high)]
        return Plan(spans[:PLANNED_MAX], missing, built)

    def build(self, span: KeySpan) -> bool:
        """Builds a run; False: the records are gone meanwhile.

        Raises DiskFull, DiskFailed, CorruptFile, OSError.
        """
        queue, base = span
        try:
            buffers = key_run.encode(base, queue.keys.span, _entries(queue, base))
        except (IndexError, FileNotFoundError):
            if queue.dropped or queue.min_offset > base:
                return False
            raise
        try:
            key_run.write(self._path, buffers, self._disk)
            adopted = queue.keys.adopt(base, self._path, queue.min_offset)
        except Exception:
            self._remove()
            raise
        if not adopted:
            self._remove()
        return adopted

    def _remove(self) -> None:
        with suppress(DiskFailed):  # the next start does it
            self._disk.unlink(self._path)


def _entries(queue: Queue, base: int) -> list[key_run.Entries]:
    end = base + queue.keys.span
    offset = max(base, queue.min_offset)
    pieces = []
    while (offset := queue.present(offset)) < end:
        page = consume_queue.decode(queue.page(offset, min(PAGE_ENTRIES, end - offset)))
        pieces.append(key_run.entries_of(page["key_hash"], offset - base))
        offset += len(page)
    return pieces
