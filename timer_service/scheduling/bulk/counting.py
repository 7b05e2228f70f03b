"""How many timers a job would touch, if it were accepted now.

Owned by: who made it.  Made by the thread that owns the scheduler, from what memory holds and which
blocks there are; `scan` and the readings run in any thread; `read` steps in the first again.
What fires meanwhile counts; what is cancelled meanwhile may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from duemq_server.timer_service.far.bodies import InMemory
from duemq_server.timer_service.scheduling.bulk import slices
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.bulk.matching import (
    BLOCKS_AT_ONCE,
    PAUSE_EVERY,
    Matcher,
    Reading,
    Unread,
    has_key,
)
from duemq_server.timer_service.timers.rows import Blob, Rows

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


class Counting:
    """See the module."""

    def __init__(self, scheduler: Scheduler, which: Which) -> None:
        self.count = 0
        self.problems: list[str] = []
        """Blocks that cannot be read, and are not in the count."""
        self._scheduler = scheduler
        self._which = which
        self._fences = slices.fences(scheduler)
        numbers, near = scheduler.numbers, scheduler.near
        self._matcher = Matcher(which, self._fences, list(self._fences), numbers.targets)
        self._memory: list[tuple[Rows, InMemory]] = []
        ids = self._matcher.among(near.table, near.pending_ids())
        if not which.key_prefix:
            self.count = len(ids)
        else:
            kept = near.rows(ids)
            self._memory.append((kept, InMemory(kept, list(near.blobs), near.blobs_of(ids))))
        for rows, blob in scheduler.tiers.pieces():
            unmet = scheduler.tombstones.unmet_in(rows)
            rows = rows if unmet is None else rows.take(~unmet)
            self._hold(rows, blob)
        self._blocks = [
            Unread(each, each.cursor)
            for each in scheduler.segments.blocks()
            if each.last_due_ms >= which.from_ms and each.next_due_ms < which.to_ms
        ]

    def files(self) -> set[str]:
        """Those that must stay until it is done."""
        return {each.block.file for each in self._blocks}

    def scan(self, pause: Callable[[], None] = lambda: None) -> None:
        """Counts what memory held of keys that begin with the prefix.  `pause` as Reading.run's."""
        for rows, bodies in self._memory:
            for row in range(len(rows)):
                self.count += has_key(bodies.of(row), self._which.key_prefix)
                if row % PAUSE_EVERY == 0:
                    pause()

    def reading(self) -> Reading | None:
        """What must be read next, and handed to `read`; None: all was."""
        if not self._blocks:
            return None
        blocks, self._blocks = self._blocks[:BLOCKS_AT_ONCE], self._blocks[BLOCKS_AT_ONCE:]
        segments = self._scheduler.segments
        where = segments.disk, segments.directory
        return Reading(*where, self._which, self._fences, blocks, with_bodies=False)

    def read(self, reading: Reading) -> Iterator[None]:
        """It was run: counts what it found, a block at each step."""
        self._blocks[:0] = reading.unread
        self.problems += reading.problems
        scheduler = self._scheduler
        for found in reading.found:
            rows = scheduler.numbers.translate(found.rows, found.sources, found.targets)
            self.count += int((~scheduler.tombstones.find(rows.source, rows.offset)).sum())
            yield

    def _hold(self, rows: Rows, blob: Blob) -> None:
        mask = self._matcher.mask(rows)
        if not self._which.key_prefix:
            self.count += int(mask.sum())
        elif mask.any():
            kept = rows.take(mask)
            blob_of = np.zeros(len(kept), dtype=np.int32)
            self._memory.append((kept, InMemory(kept, [blob], blob_of)))
