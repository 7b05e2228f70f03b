"""Finding timers by handle, many at once: which are pending, and where their bodies are.

Looks as a cancel does (cancelling.py), at memory, on disk, and at memory once more, so each answer
is true at the moment when it is decided; but what is found pending stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from duemq_server.timer_service.far.bodies import Bodies, InMemory, InPlace
from duemq_server.timer_service.scheduling.cancelling import PENDING, Cancelling, ToCancel
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import Cancelled, TargetId
from duemq_server.timer_service.timers.rows import keys_of
from duemq_server.timer_service.timers.wheel import Ids


class BodyPlace(NamedTuple):
    """Where a pending timer's body is."""

    target: TargetId
    bodies: Bodies
    row: int
    file: str  # that must stay while it is read; empty: it is in memory


class HandleFinder(Cancelling):
    """A list of handles, being looked for.

    `outcomes` are those of a cancel, with PENDING for what a cancel would have cancelled.
    """

    outcome = PENDING

    def __init__(self, scheduler: Scheduler, handles: Sequence[Cancelled]) -> None:
        super().__init__(scheduler, handles)
        self.located: dict[Cancelled, BodyPlace] = {}
        """Where the pending ones are."""

    def _cancel(self, wanted: ToCancel, now_ms: int) -> None:
        target, rows = self._targets(wanted), wanted.row
        names = self._scheduler.numbers.targets
        in_memory = self._in_memory_far(wanted)
        for n, at in enumerate(wanted.asked.at.tolist()):
            name, row = names[int(target[n])], int(rows[n])
            if wanted.in_block[n]:
                place = self._place(at)
                found = BodyPlace(name, InPlace(place.block, place.row), 0, place.block.file)
            elif row != NOWHERE:
                found = BodyPlace(name, self._near_body(rows[n : n + 1]), 0, "")
            else:
                found = BodyPlace(name, *in_memory[n], "")
            self.located[self.handles[at]] = found
        self.end = self._scheduler.log.end_position

    def _near_body(self, ids: Ids) -> InMemory:
        near = self._scheduler.near
        [blob] = near.blobs_of(ids).tolist()
        return InMemory(near.rows(ids), [near.blobs[blob]], np.zeros(1, dtype=np.int32))

    def _in_memory_far(self, wanted: ToCancel) -> dict[int, tuple[InMemory, int]]:
        """Bodies and row of those in the memtable, or being written out."""
        scheduler = self._scheduler
        left = np.flatnonzero((wanted.row == NOWHERE) & ~wanted.in_block)
        keys = keys_of(wanted.asked.source[left], wanted.asked.offset[left])
        found: dict[int, tuple[InMemory, int]] = {}
        if not len(left):
            return found
        at = dict(zip(keys.tolist(), left.tolist(), strict=True))
        for piece, blob in scheduler.tiers.pieces():
            own = keys_of(piece.source, piece.offset)
            for row in np.flatnonzero(np.isin(own, keys)).tolist():
                bodies = InMemory(piece, [blob], np.zeros(len(piece), dtype=np.int32))
                found[at[int(own[row])]] = bodies, row
        return found
