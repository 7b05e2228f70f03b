"""The part of a log that is committed, as if it were all of it.

A replica that follows recovers from this beside a log that goes on growing.  Owned by the thread
that does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duemq.errors import InvariantError
from duemq_server.storage.disk import Buffer
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import Entry


class LogView:
    """Ends with the last entry that ends at or before `committed`, once `entries` ran through.

    Takes no entries, and deletes none: `deletable` says how much could be.
    """

    def __init__(self, log: SegmentedLog, first: int, committed: int) -> None:
        self._log = log
        self._committed = committed
        self.end_position = first
        self.deletable = 0

    @property
    def start_position(self) -> int:
        """The log's."""
        return self._log.start_position

    def entries(self, first: int) -> Iterator[Entry]:
        """Verified entries from the one at `first` on.  Raises CorruptLog."""
        for entry in self._log.entries(first, self._committed):
            if entry.end > self._committed:
                return
            self.end_position = entry.end
            yield entry

    def read(self, position: int, length: int) -> memoryview:
        """As SegmentedLog's."""
        return self._log.read(position, length)

    def recovery_start(self, position: int) -> int:
        """As SegmentedLog's."""
        return self._log.recovery_start(position)

    def append(self, kind: int, parts: Sequence[Buffer]) -> tuple[int, int]:
        """Raises InvariantError: only a leader writes."""
        raise InvariantError(f"an entry of kind {kind} to the log of a replica that follows")

    def delete_before(self, position: int) -> int:
        """Notes that the log before it is not needed."""
        self.deletable = position
        return 0
