"""What a log's segment files hold, read while it is written and while retention removes some.

Any thread.  Whoever writes (log.py) moves `written_position` on once bytes are handed to the
operating system, and replaces `_segments` by a longer or shorter tuple: a read sees one or the
other.  What was removed is an IndexError, as what is not written yet.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from duemq_server.storage import record, recovery
from duemq_server.storage.disk import DiskFile
from duemq_server.storage.errors import CorruptLog
from duemq_server.storage.open_files import OpenFiles
from duemq_server.storage.record import Entry, EntryCutOffError, InvalidEntryError
from duemq_server.storage.segment import Segment

_READ_AHEAD_BYTES = 16 * 1024
"""Guessed size of an entry, to read most entries with one call."""


class LogReader:
    """The entries of a directory's segments, up to `written_position`."""

    def __init__(self, directory: str, files: OpenFiles, segments: tuple[Segment, ...]) -> None:
        self.directory = directory
        self.written_position = segments[0].start if segments else 0
        self._files = files
        self._segments = segments  # replaced, never changed

    @property
    def start_position(self) -> int:
        """Position of the oldest entry that is kept."""
        return self._segments[0].start if self._segments else 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, oldest first."""
        return self._segments

    def read(self, position: int, length: int, nowait: bool = False) -> memoryview:
        """Unverified bytes; fewer at the end of a segment or of what is written.

        Raises IndexError outside of the log, BlockingIOError with `nowait` if
        the bytes are not in memory.
        """
        segment = self._segment_of(position)
        length = max(0, min(length, self.written_position - position))
        return self._open(segment).pread(length, position - segment.start, nowait)

    def read_entry(self, position: int, nowait: bool = False) -> Entry:
        """The verified entry that starts at `position`.

        Raises CorruptLog, and as `read`.
        """
        data = self.read(position, _READ_AHEAD_BYTES, nowait)
        try:
            try:
                return record.decode(data, 0, position)
            except EntryCutOffError as error:
                data = self.read(position, error.length, nowait)
                return record.decode(data, 0, position)
        except InvalidEntryError as error:
            raise self._corrupt(position, str(error)) from error

    def entries(self, first: int, end: int | None = None) -> Iterator[Entry]:
        """Verified entries from the one at `first` up to `end` (default: what is written).

        Raises CorruptLog, and as `read`.
        """
        end = self.written_position if end is None else min(end, self.written_position)
        position = first
        while position < end:
            segment = self._segment_of(position)
            scan = recovery.Scan(self._open(segment), segment, position, end)
            for entry in scan:
                if entry.position >= end:
                    return
                position = entry.end
                yield entry
            if position < end and self._segment_of(position) is segment:
                raise self._corrupt(scan.stop.position, scan.stop.reason)

    def _segment_of(self, position: int) -> Segment:
        segments = self._segments
        index = bisect.bisect_right(segments, position, key=lambda s: s.start) - 1
        if index < 0 or position >= self.written_position:
            raise IndexError(
                f"position {position} is not in the log: it holds"
                f" {self.start_position} to {self.written_position}"
            )
        return segments[index]

    def _open(self, segment: Segment) -> DiskFile:
        try:
            return self._files.get(segment.path)
        except FileNotFoundError as error:
            # Retention takes the oldest away, and its name first.
            if segment in self._segments[1:]:
                raise self._corrupt(segment.start, "the file is gone") from error
            raise IndexError(f"segment {segment.start} was deleted") from error

    def _corrupt(self, position: int, problem: str) -> CorruptLog:
        remedy = recovery.remedy(self.directory, position)
        at = bisect.bisect_right(self._segments, position, key=lambda s: s.start) - 1
        if at < 0:
            return CorruptLog(self.directory, 0, problem, remedy)
        segment = self._segments[at]
        offset = position - segment.start
        return CorruptLog(segment.path, offset, f"position {position}: {problem}", remedy)
