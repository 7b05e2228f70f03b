"""A log that other replicas hold too, byte by byte.

The leader's owner appends, sets `committed`, and sends what is written (`on_written`, `read_run`).
The others `extend` theirs by the same bytes, `truncate` what the leader's has not, and `begin_at`
where a snapshot ends.  Their segments may begin at different positions.

`synced_position` of the leader's entries is what was committed when they were written, so it was
durable on every replica that was in sync: there it proves what it proves in a log of its own, that
a hole before it is damage.  A replica that is behind gets entries that claim more than its disk
has.  Before it writes the first such one it notes `catching-up` (catching_up.py), and while that
is there a recovery cuts at the first invalid entry: what goes is fetched anew.
"""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from duemq_server.storage import record, recovery
from duemq_server.storage.disk import Buffer
from duemq_server.storage.errors import DiskFailed, DiskFull
from duemq_server.storage.log import Pending, SegmentedLog
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import catching_up
from duemq_server.storage.segment import Segment, SegmentWriter, list_segments, path_of

_RUN = -1
"""In place of a kind: entries that are encoded already."""
_SEARCH_BYTES = 64 * 1024
"""Looked through at once for where an entry begins."""
EXTENDED_BYTES_MAX = 16 << 20
"""So much of what another replica sent may wait for the disk, or as much as of what is appended.  A
leader sends UNANSWERED_BYTES_MAX (replication) without an answer: less room would break the stream
of a follower whose disk stalls."""

logger = logging.getLogger(__name__)


class ReplicaLog(SegmentedLog):
    """A SegmentedLog of a group of replicas; owned and used as that."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.committed: Callable[[], int] | None = None
        """What is durable on each replica that is in sync; set by who leads."""
        self.committed_floor = 0
        """What `recover` found to have been committed: the least that it can have been."""
        self.catching_up = catching_up.is_set(self.directory, self._disk)
        """Entries may claim more than is durable here."""
        self._clearing = False  # its file may be gone already
        self._claims: deque[tuple[int, int]] = deque()  # (position, claim) of runs that wait
        self._claimed = 0  # the highest claim that was written

    # -- recovery ---------------------------------------------------------

    def recover(self, from_position: int = 0) -> Iterator[Entry]:
        """As SegmentedLog's; `from_position` was committed when its checkpoint was taken."""
        floor = from_position
        for entry in super().recover(from_position):
            floor = max(floor, entry.synced_position)
            yield entry
        self.committed_floor = min(floor, self.end_position)

    def _is_damage(self, stop: recovery.Stop, tail: recovery.Tail, durable: int) -> bool:
        return not self.catching_up and super()._is_damage(stop, tail, durable)

    def _end_early(self, index: int, stop: recovery.Stop, durable: int) -> None:
        if not self.catching_up:
            super()._end_early(index, stop, durable)
        last = self._segments[index]
        self._set_segments_aside(last)
        self._end_recovery(last, stop, durable)

    def _set_segments_aside(self, last: Segment) -> None:
        """All behind that one; retention may remove the oldest meanwhile."""
        rest = [segment for segment in self._on_disk() if segment.start > last.start]
        for segment in rest:
            self._files.forget(segment.path)
        for path in recovery.set_segments_aside(rest, self._disk):
            logger.warning("%s: kept aside as %s", self.directory, path)
        with self._lock:
            self._segments = tuple(each for each in self._segments if each.start <= last.start)

    def _on_disk(self) -> tuple[Segment, ...]:
        """Also one that was made when the disk had no space for more, and is not written yet."""
        return list_segments(self.directory, self._disk)

    # -- writing ----------------------------------------------------------

    def _proven_position(self) -> int:
        if self.committed is None:
            return self.durable_position
        return min(self.durable_position, self.committed())

    def _encode(self, group: Sequence[Pending], size: int) -> list[Buffer]:
        if not self._claims:
            return super()._encode(group, size)
        self._note_claims(group[0].position, group[-1].position)
        buffers: list[Buffer] = []
        for is_run, some in groupby(group, lambda each: each.kind == _RUN):
            entries = list(some)
            if is_run:
                buffers += [part for each in entries for part in each.parts]
            else:
                buffers += super()._encode(entries, sum(each.length for each in entries))
        return buffers

    def _note_claims(self, first: int, last: int) -> None:
        """Before entries are written that claim more than is durable here."""
        with self._lock:
            while self._claims and self._claims[0][0] < first:
                self._claims.popleft()
            claim = max((claim for at, claim in self._claims if at <= last), default=0)
        if claim > self.durable_position and (self._clearing or not self.catching_up):
            catching_up.set_durably(self.directory, self._disk)
            self.catching_up, self._clearing = True, False
        self._claimed = max(self._claimed, claim)

    def extend(self, position: int, runs: Sequence[Buffer]) -> int:
        """Queues entries as another replica's log holds them from `end_position` on; the new end.

        A run is one entry or more, verified (`record.split`); it is written in one piece, never
        split between two segments, and counted as one entry.  Do not change it.  Raises
        InvalidEntryError and ValueError for what does not follow on, and as `append`.
        """
        pending, claims = [], []
        end = position
        for run in runs:
            view = memoryview(run).cast("B")
            claims.append((end, record.claim_of(view, end)))
            pending.append(Pending(end, _RUN, [view], 0, len(view)))
            end += len(view)
        with self._lock:
            if position != self.end_position:
                raise ValueError(f"the log ends at {self.end_position}, not at {position}")
            most = max(self._pending_bytes_max, EXTENDED_BYTES_MAX)
            self._check_writable(end - position, most)
            self._claims += claims
            first = not self._pending and bool(pending)
            self._pending += pending
            self._pending_bytes += end - position
            self.end_position = end
            for each in pending:
                self._note_boundary(each.position)
        if first and self.on_append is not None:
            self.on_append()
        return end

    def caught_up(self) -> None:
        """Ends `catching_up`, durably.

        Raises ValueError if entries claim too much; DiskFull: try again; DiskFailed: the log takes
        no more.
        """
        with self._write_lock, self._syncing():
            if self._claimed > self.durable_position:
                raise ValueError(
                    f"{self._claimed} is claimed to be durable, here {self.durable_position} is"
                )
            if self.catching_up:
                self._clearing = True
                catching_up.clear_durably(self.directory, self._disk)
                self.catching_up = self._clearing = False

    # -- what the leader's log has not ------------------------------------

    def truncate(self, position: int) -> None:
        """Ends the log at an entry's start; what is beyond stays beside it as `.broken` files.

        On purpose, so the durable mark comes down first and no start speaks of a loss.  While a
        LogWriter runs, call its `truncate` instead; nobody appends or extends meanwhile.  Raises
        ValueError for what is no entry's start or end; DiskFull: try again, nothing has changed;
        DiskFailed: the log takes no more.
        """
        if not self._recovered:
            raise RuntimeError("recover() was not run to its end")
        with self._write_lock:
            while position > self.written_position and self._write_group():
                pass
            self._check_boundary(position)
            with self._syncing():
                self._mark.store(min(position, self.durable_position))
                self._mark.sync()
                self._cut_at(position)
                self._claimed = min(self._claimed, position)
                self.committed_floor = min(self.committed_floor, position)

    def _check_boundary(self, position: int) -> None:
        if not self.start_position <= position <= self.written_position:
            raise ValueError(
                f"position {position} is not in the log: it holds"
                f" {self.start_position} to {self.written_position}"
            )
        if position == self.written_position:
            return
        segment = self._segment_of(position)
        with self._lock:
            known = [b for b in self._boundaries if segment.start <= b <= position]
        end = max(known, default=segment.start)
        for entry in recovery.Scan(self._open(segment), segment, end):
            if end >= position:
                break
            end = entry.end
        if end != position:
            raise ValueError(f"no entry begins at {position}")

    def _cut_at(self, position: int) -> None:
        segments = self._segments
        kept = bisect.bisect_right(segments, position, key=lambda s: s.start)
        if kept:
            last = segments[kept - 1]
            file = self._files.get(last.path)
            if self._writer is not None:  # what it has in advance is room for what is kept aside
                self._writer.shrink(self.written_position)
            tail = recovery.search(file, last, position)
            stop = recovery.Stop(position, "truncated")
            recovery.keep_aside(file, last, stop, tail, self._disk)
            self._cut_segments(last, position)
        self._end_at(position)

    def _cut_segments(self, last: Segment, position: int) -> None:
        newest = self._segments[-1]
        try:
            self._set_segments_aside(last)
            if self._writer is None or self._writer.segment != last:
                if self._writer is not None:
                    self._writer.close()
                self._writer = SegmentWriter(last, self._disk, self.segment_bytes)
            self._writer.cut(position)
        except DiskFull as error:
            if self._disk.exists(newest.path):
                raise
            # It goes on in a file that is the log's no more: only a start finds what is left.
            raise DiskFailed(f"a truncation was cut short: {error}") from error

    def _end_at(self, position: int) -> None:
        """Nothing waits, and the log goes on there."""
        with self._lock:
            self._pending.clear()
            self._claims.clear()
            self._group = []
            self._pending_bytes = 0
            self.end_position = self.written_position = position
            while self._boundaries and self._boundaries[-1] > position:
                self._boundaries.pop()
        self.disk_full = False
        self._publish_durable(position)

    def begin_at(self, position: int) -> None:
        """Removes all entries; the log goes on at `position`, where a snapshot ends.

        Interrupted, it leaves some of the oldest entries, or an empty log that begins at 0 or at
        `position`.  Nobody appends, reads, or runs a LogWriter meanwhile.  Raises DiskFull,
        DiskFailed, ValueError.
        """
        if not self._recovered or position % record.ALIGNMENT:
            raise ValueError(f"a log cannot begin at {position}, or was not recovered")
        with self._write_lock, self._syncing():
            self._mark.store(0)
            self._mark.sync()
            self._remove_segments()
            segment = Segment(position, path_of(self.directory, position))
            self._writer = SegmentWriter(segment, self._disk, self.segment_bytes)
            self._disk.fsync_dir(self.directory)
            with self._lock:
                self._segments = (segment,)
            self._claimed = self.committed_floor = 0
            self._end_at(position)

    def _remove_segments(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        # Newest first: a crash must not leave a gap.
        for segment in reversed(self._on_disk()):
            self._files.forget(segment.path)
            self._disk.unlink(segment.path)
        self._disk.fsync_dir(self.directory)
        self._segments = ()

    # -- reading ----------------------------------------------------------

    def read_run(self, position: int, bytes_max: int) -> memoryview:
        """Whole entries from the one at `position` on, unverified: one at least, and as many more
        as `bytes_max` and the segment hold.  Raises CorruptLog, and as `read`.
        """
        data = self.read(position, bytes_max)
        length = record.whole_entries(data)
        if length:
            return data[:length]
        entry = self.read_entry(position)
        return self.read(position, entry.end - position)

    def checksum(self, start: int, end: int) -> int:
        """CRC-32C of the bytes in between, which need not be whole entries.  Raises as `read`."""
        crc = 0
        while start < end:
            later = [each.start for each in self._segments if each.start > start]
            data = self.read(start, min([end, *later]) - start)
            if not len(data):
                raise self._corrupt(start, "the file ends before")
            crc = record.crc32c(crc, data)
            start += len(data)
        return crc

    def verify(self, start: int, end: int) -> None:
        """Reads the entries in between; `end` is one's end.  Raises CorruptLog, and as `read`."""
        for _ in self.entries(self._begin_before(start), end):
            pass

    def _begin_before(self, position: int) -> int:
        """Where an entry begins that can be read, there or before."""
        segment = self._segment_of(position)
        file, end = self._open(segment), position
        while end > segment.start:
            begin = max(segment.start, end - _SEARCH_BYTES)
            found = recovery.first_within(file, segment, begin, end)
            if found is not None:
                return found
            end = begin
        return segment.start
