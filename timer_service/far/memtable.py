"""Far timers that are durable in the timer log and not yet in a block.

Owned by: Tiers.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A list of pieces as they came; nothing is sorted before it is flushed.  Bounded by what comes in
before `Tiers.memtable_full` is looked at.
"""

from __future__ import annotations

from duemq_server.timer_service.timers.keys import KeyList
from duemq_server.timer_service.timers.rows import Blob, Rows

Piece = tuple[Rows, Blob]


class Memtable:
    """Timers in arrival order, with their bodies."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.keys = KeyList()
        self.rows = 0
        self.bytes = 0  # what the pieces keep in memory
        self.min_due_ms: int | None = None

    def __len__(self) -> int:
        return self.rows

    def add(self, rows: Rows, blob: Blob) -> None:
        """Takes timers in whose bodies lie in `blob`."""
        if not len(rows):
            return
        self.pieces.append((rows, blob))
        self.keys.add(rows)
        self._count(rows, blob)

    def take_before(self, due_ms: int) -> list[Piece]:
        """Removes and returns the timers that are due before `due_ms`."""
        if self.min_due_ms is None or self.min_due_ms >= due_ms:
            return []
        taken: list[Piece] = []
        pieces, self.pieces, self.keys = self.pieces, [], KeyList()
        self.rows, self.bytes, self.min_due_ms = 0, 0, None
        for rows, blob in pieces:
            near = rows.due_ms < due_ms
            if near.any():
                taken.append((rows.take(near), blob))
                rows = rows.take(~near)
            self.add(rows, blob)
        return taken

    def _count(self, rows: Rows, blob: Blob) -> None:
        self.rows += len(rows)
        self.bytes += len(blob.data)
        least = int(rows.due_ms.min())
        self.min_due_ms = least if self.min_due_ms is None else min(least, self.min_due_ms)
