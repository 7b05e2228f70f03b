"""A log: entries one after the other in segment files.

A position is a byte's distance from the start of the log's life; entries lie
without gaps, so an entry ends where the next one starts.

Three positions, each at or behind the one before:
 end_position      assigned by `append`, perhaps only in memory
 written_position  handed to the operating system; readable
 durable_position  on the disk; survives a power failure

Owners: `append` is called by any thread.  `LogWriter`, or a test, writes by
`write_group` and `sync`: one thread may write while another syncs what was written
before.  Any thread reads (log_parts/log_reader.py).  `recover` comes before all of it
(log_parts/log_opening.py).

A log with replicas is a ReplicaLog (replicas/replica_log.py).

Files of the directory: segments (segment.py), `durable` (durable_mark.py), and
`<segment>.broken-<position>`, what a recovery cut off (recovery.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from duemq_server.storage import record
from duemq_server.storage.disk import Buffer, Disk, nbytes
from duemq_server.storage.errors import DiskFailed, DiskFull, LogFull
from duemq_server.storage.log_parts.log_opening import OpenedLog
from duemq_server.storage.open_files import OpenFiles
from duemq_server.storage.segment import Segment, SegmentWriter, path_of

SEGMENT_BYTES = 1024 * 1024 * 1024
PENDING_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait for the disk before `append` refuses."""
GROUP_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of one group commit: a few milliseconds of a fast disk."""
JOIN_BYTES_MAX = 32 * 1024
"""Groups up to this size are copied into one buffer: cheaper than many small ones."""


class Pending(NamedTuple):
    """An entry that waits for the disk."""

    position: int
    kind: int
    parts: Sequence[Buffer]
    body_length: int
    length: int


@dataclass(frozen=True, slots=True)
class Group:
    """What one group commit wrote."""

    entries: int
    size_bytes: int
    end_position: int


class SegmentedLog(OpenedLog):
    """An append-only log in a directory; made by `open`."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        *,
        segment_bytes: int,
        start_at: int | None,
        pending_bytes_max: int,
        group_bytes_max: int,
        files: OpenFiles | None,
    ) -> None:
        super().__init__(directory, disk, segment_bytes, start_at, files)
        self.disk_full = False
        """The last write found no space; `append` refuses until one succeeds."""
        self.on_append: Callable[[], None] | None = None
        """Called when an entry was appended and none waited before; the writer's."""
        self.on_written: Callable[[int], None] = lambda position: None
        """Called with where a group ends that was written, by the thread that did; may be replaced
        meanwhile."""
        self._pending_bytes_max = pending_bytes_max
        self._group_bytes_max = group_bytes_max
        # Guards _group, _writer, written_position.  Taken before _sync_lock.
        self._write_lock = threading.Lock()
        # Guards durable_position, the mark, and the writer's file against its closing.
        self._sync_lock = threading.Lock()
        self._pending: deque[Pending] = deque()  # guarded by _lock, as _pending_bytes
        self._pending_bytes = 0
        self._group: list[Pending] = []  # being written; kept for a retry
        self._failure: DiskFailed | None = None
        self.entries_written = 0
        """Since the log was opened."""

    @classmethod
    def open(
        cls,
        directory: str,
        disk: Disk,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        start_at: int | None = None,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        group_bytes_max: int = GROUP_BYTES_MAX,
        files: OpenFiles | None = None,
    ) -> SegmentedLog:
        """Opens or makes the log of a directory; call `recover` next.

        `start_at` is what `recovery_start` answered when the owner's checkpoint
        was made: where verifying begins.  Raises DiskFull, DiskFailed.
        """
        disk.makedirs(directory)
        return cls(
            directory,
            disk,
            segment_bytes=segment_bytes,
            start_at=start_at,
            pending_bytes_max=pending_bytes_max,
            group_bytes_max=group_bytes_max,
            files=files,
        )

    @classmethod
    def open_for_reading(cls, directory: str, disk: Disk) -> SegmentedLog:
        """For tools: reads what the files hold, recovers nothing, cannot append."""
        log = cls.open(directory, disk)
        if log._segments:
            last = log._segments[-1]
            log.written_position = last.start + disk.open(last.path).size()
        return log

    # -- writing ----------------------------------------------------------

    def append(self, kind: int, parts: Sequence[Buffer], room: int = 0) -> tuple[int, int]:
        """Queues an entry; answers its position and end.  Never waits.

        The parts are read until the entry is written; do not change them.  `room`: the entry is
        refused unless others of so many bytes may follow it at once.
        Raises LogFull, DiskFull, DiskFailed, ValueError for an entry that is too large.
        """
        body_length = sum(map(nbytes, parts))
        length = record.entry_bytes(body_length)
        if length > record.ENTRY_BYTES_MAX:
            raise ValueError(f"an entry of {length} bytes exceeds {record.ENTRY_BYTES_MAX}")
        with self._lock:
            self._check_writable(length + room, self._pending_bytes_max)
            position = self.end_position
            first = not self._pending
            self._pending.append(Pending(position, kind, parts, body_length, length))
            self._pending_bytes += length
            self.end_position = end = position + length
            self._note_boundary(position)
        if first and self.on_append is not None:
            self.on_append()
        return position, end

    def _check_writable(self, length: int, pending_bytes_max: int) -> None:
        if not self._recovered:
            raise RuntimeError("recover() was not run to its end")
        if self._failure is not None:
            raise DiskFailed(str(self._failure))
        if self.disk_full:
            raise DiskFull(f"{self.directory}: no space left")
        if self._pending_bytes and self._pending_bytes + length > pending_bytes_max:
            raise LogFull(
                f"{self._pending_bytes} bytes wait for the disk, at most {pending_bytes_max} may"
            )

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet written."""
        return self._pending_bytes

    def write_pending(self) -> Group | None:
        """One group commit: writes what waits, up to a bound, and makes it durable.

        None when nothing waits.  Raises DiskFull: the group is kept, call again
        later.  Raises DiskFailed: the log takes no more.
        """
        group = self.write_group()
        self.sync()
        return group

    def write_group(self) -> Group | None:
        """As write_pending, but leaves the sync to a later `sync`."""
        with self._write_lock:
            group = self._write_group()
        if group is not None:
            self.on_written(group.end_position)
        return group

    def _write_group(self) -> Group | None:
        if self._failure is not None:
            raise DiskFailed(str(self._failure))
        group = self._group = self._group or self._take_group()
        if not group:
            return None
        first, last = group[0], group[-1]
        size = last.position + last.length - first.position
        try:
            if self._lost:
                self._accept_loss()
            writer = self._writer_for(first)
            writer.write(self._encode(group, size), size, first.position)
        except DiskFull:
            self.disk_full = True
            raise
        except DiskFailed as error:
            self._failure = error
            raise
        self.disk_full = False
        self._group = []
        self.entries_written += len(group)
        self.written_position = first.position + size
        with self._lock:
            self._pending_bytes -= size
        return Group(len(group), size, self.written_position)

    def accept_loss(self) -> None:
        """The owner has noted durably what the log has lost: the next start is not to find it.

        After `recover`.  Raises DiskFull, DiskFailed.
        """
        if self._lost:
            self._accept_loss()

    def _accept_loss(self) -> None:
        """The owner knows by now.  A mark beyond the end would make damage of a torn write."""
        with self._syncing():
            self._mark.store(self.durable_position)
            self._mark.sync()
        self._lost = False

    def _take_group(self) -> list[Pending]:
        """Takes what fits a group and one segment; at least one entry if any waits."""
        group: list[Pending] = []
        with self._lock:
            if not self._pending:
                return group
            first = self._pending[0]
            limit = first.position + self._group_bytes_max
            segment = self._segments[-1] if self._segments else None
            if segment is not None and not self._needs_roll(segment, first):
                limit = min(limit, segment.start + self.segment_bytes)
            else:
                limit = min(limit, first.position + self.segment_bytes)
            group.append(self._pending.popleft())
            while self._pending and self._pending[0].position + self._pending[0].length <= limit:
                group.append(self._pending.popleft())
        return group

    def _needs_roll(self, segment: Segment, first: Pending) -> bool:
        end = first.position + first.length
        return end - segment.start > self.segment_bytes and first.position > segment.start

    def _writer_for(self, first: Pending) -> SegmentWriter:
        """The writer of the segment that takes an entry; closes a full one before."""
        if self._writer is not None and not self._needs_roll(self._writer.segment, first):
            return self._writer
        with self._syncing():
            if self._writer is not None:
                self._writer.cut(first.position)
                self._publish_durable(first.position)
            segment = Segment(first.position, path_of(self.directory, first.position))
            writer = SegmentWriter(segment, self._disk, self.segment_bytes)
            self._disk.fsync_dir(self.directory)
            if self._writer is not None:
                self._writer.close()
            self._writer = writer
        with self._lock:
            self._segments = (*self._segments, segment)
        return writer

    def _encode(self, group: Sequence[Pending], size: int) -> list[Buffer]:
        synced = self._proven_position()
        buffers: list[Buffer] = []
        for entry in group:
            buffers += record.encode(
                entry.kind, entry.parts, entry.body_length, entry.position, synced
            )
        return [b"".join(buffers)] if size <= JOIN_BYTES_MAX else buffers

    def _proven_position(self) -> int:
        """What the entries of a group say to have been durable when they were written."""
        return self.durable_position

    def sync(self) -> int:
        """Makes everything written before the call durable; answers the durable position.

        Raises DiskFailed: the log takes no more.
        """
        with self._syncing():
            position = self.written_position
            if position > self.durable_position and self._writer is not None:
                self._writer.sync()
                self._publish_durable(position)
            return self.durable_position

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Holds the lock of syncs.  After one that failed no other proves anything: the kernel
        tells of pages that it dropped once.  So nobody gets in between a failure and its note."""
        with self._sync_lock:
            if self._failure is not None:
                raise DiskFailed(str(self._failure))
            try:
                yield
            except DiskFailed as error:
                self._failure = error
                raise

    def _publish_durable(self, position: int) -> None:
        self._store_mark(position)
        self.durable_position = position

    # -- retention and end ------------------------------------------------

    def delete_before(self, position: int) -> int:
        """Removes the segments that end at or before `position`; answers how many.

        The last segment always stays.  One thread at a time, any thread; appends
        and reads go on, and a truncation.  Raises DiskFull: go on later; DiskFailed.
        """
        removed = 0
        # One look at the tuple: a truncation may replace it by a shorter one.
        while len(segments := self._segments) > 1 and segments[1].start <= position:
            oldest = segments[0]
            # First: one that cannot be removed stays the oldest, or a start would find a gap.
            self._disk.unlink(oldest.path)
            self._files.forget(oldest.path)  # behind it, or a reader might open it once more
            with self._lock:
                self._segments = self._segments[1:]
            # One by one, oldest first: a crash must not leave a gap.
            self._disk.fsync_dir(self.directory)
            removed += 1
        return removed

    def close(self) -> None:
        """Closes the files.  What was not written is dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._mark.close()
        for segment in self._segments:
            self._files.forget(segment.path)
