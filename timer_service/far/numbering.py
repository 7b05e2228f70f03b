"""Where timers come from and where they go, and the numbers that stand for both in rows.  Pure.

Owned and mutated by: the scheduler.  Numbers are this process's own: what is stored (blocks,
checkpoints) carries the tables that say what its numbers mean.

The number of a target that nothing here has any more is given up, and is the next new target's.
Until then it means what it did, so that no two numbers ever mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from duemq_server.timer_service.far.far_segments import NumberTables
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Narrow, Rows, concatenate


class Numbered(Protocol):
    """Rows in a block's own numbers."""

    @property
    def rows(self) -> Rows: ...  # noqa: D102
    @property
    def sources(self) -> list[SourceId]: ...  # noqa: D102
    @property
    def targets(self) -> list[TargetId]: ...  # noqa: D102


LOOKED_AT_MIN = 1_000
LOOKED_AT_SHARE = 8
"""One in so many targets is looked at in one go, or `LOOKED_AT_MIN`: whether it is given up."""
SKIPS_MAX = 256
"""Of a source, that are remembered; what lies in older ones counts as taken over."""


@dataclasses.dataclass(slots=True)
class Source:
    """A %TIMER% queue of a broker's store, and how far it was taken over."""

    id: SourceId
    broker: str
    next_offset: int
    first_offset: int
    durable_offset: int = 0  # everything before it is durable here
    skipped: tuple[tuple[int, int], ...] = ()
    """From, to: what another shard took over while it had the queue, or the broker lost."""

    def had(self, offset: int) -> bool:
        """Whether the timer at this offset was taken over here."""
        if not self.first_offset <= offset < self.next_offset:
            return False
        return not any(start <= offset < end for start, end in self.skipped)

    def skip_to(self, offset: int) -> None:
        """What is taken over next lies there."""
        if offset > self.next_offset:
            self.skipped = (*self.skipped, (self.next_offset, offset))[-SKIPS_MAX:]
            self.next_offset = offset


class Numbering:
    """The sources and targets of a shard; a number is a place in its list."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.targets: list[TargetId] = []
        self._source_numbers: dict[SourceId, int] = {}
        self.brokers: dict[int, str] = {}
        """Who had a store when something came from it, by store."""
        self._target_numbers: dict[TargetId, int] = {}
        self._looked_at = 0
        self._spare: dict[int, None] = {}  # numbers of targets that were given up
        self.renamed: list[int] = []
        """Those that mean another target now, for whoever knows something by number of target."""

    def source(self, source_id: SourceId) -> Source | None:
        """A source by its id, if anything ever came from it."""
        number = self._source_numbers.get(source_id)
        return None if number is None else self.sources[number]

    def broker_of(self, store_id: int) -> str:
        """The broker that had a store when something came from it; "": not known."""
        return self.brokers.get(store_id, "")

    def find_source(self, source_id: SourceId) -> int | None:
        """The number of a source, if anything ever came from it."""
        return self._source_numbers.get(source_id)

    def number_source(self, source_id: SourceId, broker: str, first_offset: int) -> int:
        """The number of a source in the column `source`; made when new."""
        number = self._source_numbers.get(source_id)
        if number is None:
            if broker:
                self.brokers[source_id.store_id] = broker
            number = self._source_numbers[source_id] = len(self.sources)
            self.sources.append(Source(source_id, broker, first_offset, first_offset, first_offset))
        return number

    def number_target(self, target: TargetId) -> int:
        """The number of a target in the column `target`; made when new."""
        number = self._target_numbers.get(target)
        if number is None:
            number = self._target_numbers[target] = self._new_number(target)
        elif self._spare:
            self._spare.pop(number, None)
        return number

    def _new_number(self, target: TargetId) -> int:
        if not self._spare:
            self.targets.append(target)
            return len(self.targets) - 1
        number, _ = self._spare.popitem()
        del self._target_numbers[self.targets[number]]
        self.targets[number] = target
        self.renamed.append(number)
        return number

    def next_looked_at(self) -> list[int]:
        """Numbers of some targets, of others with each call."""
        count = len(self.targets)
        some = min(count, max(LOOKED_AT_MIN, count // LOOKED_AT_SHARE))
        first, self._looked_at = self._looked_at, (self._looked_at + some) % max(1, count)
        found = (number % count for number in range(first, first + some))
        return [number for number in found if number not in self._spare]

    def give_up_target(self, number: int) -> None:
        """Nothing here has that number any more, nor will before it is asked for again."""
        self._spare[number] = None

    def tables(self) -> NumberTables:
        """What the numbers mean, as of now."""
        return NumberTables([source.id for source in self.sources], list(self.targets))

    def translate(self, rows: Rows, sources: list[SourceId], targets: list[TargetId]) -> Rows:
        """Rows in these numbers instead of those of a block."""
        narrow = rows.narrow.copy()
        self._renumber(narrow, sources, targets)
        return Rows(rows.wide, narrow, rows.timer_key)

    def translate_all(self, pieces: Sequence[Numbered]) -> Rows:
        """Rows of several blocks, one after the other, in these numbers."""
        rows = concatenate([piece.rows for piece in pieces])
        narrow, start = rows.narrow.copy() if len(pieces) == 1 else rows.narrow, 0
        for piece in pieces:
            end = start + len(piece.rows)
            self._renumber(narrow[:, start:end], piece.sources, piece.targets)
            start = end
        return Rows(rows.wide, narrow, rows.timer_key)

    def _renumber(
        self, narrow: Narrow, sources: Sequence[SourceId], targets: Sequence[TargetId]
    ) -> None:
        source_map = np.array([self._source_numbers[each] for each in sources], dtype=np.uint32)
        target_map = np.array([self.number_target(each) for each in targets], dtype=np.uint32)
        narrow[0], narrow[1] = source_map[narrow[0]], target_map[narrow[1]]
