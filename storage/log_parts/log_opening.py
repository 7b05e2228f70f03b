"""A log as a start finds it: its end is verified, what is torn is cut, then it may be written.

Owner: the thread that opens it, before anybody appends or reads.  What the end means: recovery.py.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from duemq_server.storage import recovery
from duemq_server.storage.disk import Disk
from duemq_server.storage.durable_mark import DurableMark
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.log_parts.log_reader import LogReader
from duemq_server.storage.log_parts.worn_file import WornFile
from duemq_server.storage.open_files import OpenFiles
from duemq_server.storage.record import Entry
from duemq_server.storage.segment import Segment, SegmentWriter, list_segments

VERIFY_BACK_BYTES = 16 * 1024 * 1024
"""How far before its starting point a recovery verifies."""
_BOUNDARY_BYTES = 1024 * 1024
_BOUNDARIES_MAX = 64

logger = logging.getLogger(__name__)


class OpenedLog(LogReader):
    """The log of a directory until `recover` has come to its end."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        segment_bytes: int,
        start_at: int | None,
        files: OpenFiles | None,
    ) -> None:
        super().__init__(directory, files or OpenFiles(disk), list_segments(directory, disk))
        self.segment_bytes = segment_bytes
        self._disk = disk
        self._verify_from = start_at
        # Guards end_position, _boundaries, and changes of _segments.
        self._lock = threading.Lock()
        self._boundaries: deque[int] = deque(maxlen=_BOUNDARIES_MAX)
        self.was_durable_to = 0
        """What `recover` found to have been durable once: beyond `end_position` if that is lost."""
        self._lost = False
        self._recovered = False
        self._writer: SegmentWriter | None = None
        self._mark = DurableMark(directory, disk)
        self.end_position = self.durable_position = self.start_position

    def recover(self, from_position: int = 0) -> Iterator[Entry]:
        """Verifies the log's end, cuts a torn tail, and yields what the owner missed.

        Yields the entries from `from_position` on, or from the log's start if
        that is later.  It is where the owner's checkpoint was taken: an entry's
        start that was durable then, and may lie within one that was set aside
        since, which is yielded.  Append only after the last one.  If
        `end_position` is then before `was_durable_to`, the log lost what it once
        had acknowledged; if it is before `from_position`, also what the owner's
        checkpoint had seen: the owner starts over with `recover()` and saves a
        checkpoint before it appends.

        Raises CorruptLog, CorruptFile, UnknownVersion, DiskFull, DiskFailed.
        """
        durable = self.was_durable_to = max(self._mark.load(), from_position)
        if not self._segments:
            if durable:
                raise self._corrupt(0, f"no segment is here, but {durable} bytes were durable")
            self._open_for_writing(0)
            return
        position = self._first_to_verify(from_position)
        for index, segment in enumerate(self._segments):
            last = index + 1 == len(self._segments)
            if not last and self._segments[index + 1].start <= position:
                continue
            start = max(position, segment.start)
            scan = recovery.Scan(self._files.get(segment.path), segment, start)
            try:
                for entry in scan:
                    self._note_boundary(entry.position)
                    if entry.end > from_position:
                        yield entry
                if last:
                    self._end_recovery(segment, scan.stop, durable)
            except OSError as error:
                lost = self._lost_at(segment, start) if error.errno == errno.EIO else None
                if lost is None:
                    raise
                raise self._corrupt(lost, os.strerror(errno.EIO)) from error
            if not last and scan.stop.position != self._segments[index + 1].start:
                self._end_early(index, scan.stop, durable)
                return

    def _lost_at(self, segment: Segment, start: int) -> int | None:
        """Where what begins that a bad sector has taken; None: all of it can be read by now."""
        worn = WornFile(self._files.get(segment.path))
        scan = recovery.Scan(worn, segment, start)
        for _ in scan:
            pass
        if not worn.unread:
            recovery.search(worn, segment, scan.stop.position)
        return scan.stop.position if worn.unread else None

    def _end_early(self, index: int, stop: recovery.Stop, durable: int) -> None:
        """The entries end within a segment that is not the last."""
        raise self._corrupt(stop.position, stop.reason)

    def _first_to_verify(self, from_position: int) -> int:
        """An entry's start, some way before the owner's starting point if one is known."""
        last = self._segments[-1]
        if from_position > last.start + self._files.get(last.path).size():
            return last.start  # the log lost its end; the owner will notice
        from_position = max(from_position, self.start_position)
        hint = self._verify_from
        if hint is not None and self.start_position <= hint <= from_position:
            return hint
        wanted = from_position - VERIFY_BACK_BYTES
        starts = [s.start for s in self._segments if wanted <= s.start <= from_position]
        return min(starts, default=from_position)

    def _end_recovery(self, segment: Segment, stop: recovery.Stop, durable: int) -> None:
        file = self._files.get(segment.path)
        tail = recovery.search(file, segment, stop.position)
        if self._is_damage(stop, tail, durable):
            raise self._corrupt(
                stop.position, f"{stop.reason}; valid entries follow at {tail.valid_position}"
            )
        lost = stop.position < durable
        copied, kept = self._keep_aside(segment, stop, tail, lost)
        if kept or lost:
            logger.log(
                logging.WARNING if copied and not lost else logging.ERROR,
                "%s: cut at position %d (%s)%s%s",
                segment.path,
                stop.position,
                stop.reason,
                kept,
                f"; LOST: it had been durable up to {durable}" if lost else "",
            )
        self._write_again(segment, durable, stop.position)
        self._open_for_writing(stop.position)

    def _write_again(self, segment: Segment, durable: int, end: int) -> None:
        """Of what is not known to be durable the kernel may take for clean what it could not write:
        a sync alone would not write it either."""
        file = self._files.get(segment.path)
        try:
            recovery.write_again(file, max(0, durable - segment.start), end - segment.start)
        except DiskFull as error:  # of a copy-on-write file system; only a start makes space
            logger.error("%s: not written again from %d on: %s", segment.path, durable, error)

    def _keep_aside(
        self, segment: Segment, stop: recovery.Stop, tail: recovery.Tail, lost: bool
    ) -> tuple[bool, str]:
        """Whether there is a copy of what will be cut, and what to say of it; nothing of zeros."""
        torn_bytes = tail.nonzero_end - stop.position
        if not torn_bytes:
            return False, ""
        file = self._files.get(segment.path)
        file.truncate(tail.nonzero_end - segment.start)  # zeros ahead: room for the copy
        try:
            kept = recovery.keep_aside(file, segment, stop, tail, self._disk)
            return True, f", kept aside as {kept}"
        except DiskFull as error:
            if lost or tail.valid_position is not None:
                raise
            # A write that did not come to its end: nobody was told of it, and a start helps more.
            return False, f", {torn_bytes} bytes of a torn write are gone, without a copy: {error}"

    def _is_damage(self, stop: recovery.Stop, tail: recovery.Tail, durable: int) -> bool:
        return recovery.is_damage(stop, tail, durable)

    def _open_for_writing(self, end: int) -> None:
        if self._segments:
            self._writer = SegmentWriter(self._segments[-1], self._disk, self.segment_bytes)
            self._writer.cut(end)  # also syncs what a killed process had only written
        self._disk.fsync_dir(self.directory)
        self._lost = end < self.was_durable_to
        if not self._lost:  # else what is written next does it, and until then a loss is known
            self._store_mark(end)
        self.end_position = self.written_position = self.durable_position = end
        self._recovered = True

    def recovery_start(self, position: int) -> int:
        """What to store in a checkpoint at `position`, for `open(start_at=…)`."""
        with self._lock:
            known = [b for b in self._boundaries if b <= position]
        wanted = position - VERIFY_BACK_BYTES
        return max((b for b in known if b <= wanted), default=min(known, default=position))

    def _note_boundary(self, position: int) -> None:
        if not self._boundaries or position - self._boundaries[-1] >= _BOUNDARY_BYTES:
            self._boundaries.append(position)

    def _store_mark(self, position: int) -> None:
        # The data are on the disk whatever becomes of the mark, which a copy-on-write file system
        # may have no space for: it is then too low, as after a power failure.
        with suppress(DiskFull):
            self._mark.store(position)
