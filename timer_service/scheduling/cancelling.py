"""Cancelling timers, many at once.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

What lies in memory is decided at once; for the rest `Cancelling.query` is run in
another thread (look_up.py) while timers come and fire as ever.  When it is called again it looks
at memory once more, because a timer may have moved:

    found in a block          and not loaded since     → cancelled there
    found nowhere, or loaded  and in memory now        → cancelled there
                              and blocks were added    → those are looked at, too
                              and neither              → it is gone: it has fired

So each answer is true at the moment when it is decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt, DuemqError
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.look_up import Place, Query
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from duemq_server.timer_service.timers.rows import keys_of
from duemq_server.timer_service.timers.wheel import Ids

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

CANCELLED, FIRED, UNKNOWN, NOT_YET = "CANCELLED", "FIRED", "UNKNOWN", "NOT_YET"


class Asked(NamedTuple):
    """Handles whose timers arrived, and were not cancelled as far as is remembered; in columns."""

    at: list[int]  # place in the list of handles
    source: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.int64]
    due_ms: npt.NDArray[np.int64]

    def take(self, index: list[int]) -> Asked:
        """Those at these places."""
        return Asked(
            [self.at[n] for n in index],
            self.source[index],
            self.offset[index],
            self.due_ms[index],
        )


class _Sought(NamedTuple):
    """What the disk said of a handle: blocks below the number `until` were looked at."""

    until: int
    places: Sequence[Place]


_NOT_SOUGHT = _Sought(0, ())
_PENDING = "PENDING"  # not an outcome: found, to be cancelled


def source_of(scheduler: Scheduler, handle: Cancelled) -> int | None:
    """The number of a handle's source; None if the timer has not arrived from it."""
    numbers = scheduler.numbers
    number = numbers.find_source(handle.source)
    if number is None or handle.offset >= numbers.sources[number].next_offset:
        return None
    return number


class Cancelling:
    """A list of handles, being cancelled."""

    kind = log_entries.CANCEL

    def __init__(self, scheduler: Scheduler, handles: Sequence[Cancelled]) -> None:
        self.end = 0
        """Position up to which the log must be durable before the outcomes are told."""
        self._scheduler = scheduler
        self._at: dict[Cancelled, int] = {}
        self._handles: list[Cancelled] = []  # each once
        self._outcomes: list[str | DuemqError | None] = []
        self._sought: dict[int, _Sought] = {}  # by place in `_handles`, as the rest
        self._missing: Asked | None = None  # to be looked for
        self._places(handles)
        self._open = list(range(len(self._handles)))

    def outcomes(self, handles: Sequence[Cancelled]) -> list[str | DuemqError] | None:
        """CANCELLED, FIRED, UNKNOWN, NOT_YET or an error of each; None: not all are decided.

        NOT_YET: the timer has not arrived from its broker.
        """
        decided = []
        for handle in handles:
            outcome = self._outcomes[self._at[handle]]
            if outcome is None:
                return None
            decided.append(outcome)
        return decided

    def join(self, other: Cancelling) -> None:
        """Takes over the handles of another one; both wait for a look-up."""
        places = self._places(other._handles)
        for at, outcome in zip(places, other._outcomes, strict=True):
            if outcome is not None:
                self._outcomes[at] = outcome
        for theirs, sought in other._sought.items():
            self._sought[places[theirs]] = sought
        self._open = list(dict.fromkeys([*self._open, *(places[at] for at in other._open)]))
        self._missing = None  # the columns lack what came
        self.end = max(self.end, other.end)

    def advance(self, now_ms: int) -> bool:
        """Decides what can be decided; False: for the rest a look-up must be run first.

        Raises LogFull, DiskFull: this call cancelled nothing and can be repeated.
        """
        asked = self._arrived()
        rows, due_ms = self._in_memory(asked)
        wanted = np.flatnonzero(due_ms == asked.due_ms).tolist()
        for n in np.flatnonzero((due_ms != asked.due_ms) & (due_ms != NOWHERE)).tolist():
            self._outcomes[asked.at[n]] = UNKNOWN
        missing: list[int] = []
        for n in np.flatnonzero(due_ms == NOWHERE).tolist():
            outcome = self._on_disk(asked, n, now_ms)
            if outcome is None:
                missing.append(n)
            elif outcome is _PENDING:
                wanted.append(n)
            else:
                self._outcomes[asked.at[n]] = outcome
                if outcome is FIRED:  # told when no restart or other leader can take it back
                    self.end = self._scheduler.log.end_position
        self._cancel(asked.take(wanted), rows[wanted], now_ms)
        self._missing = asked.take(missing)
        self._open = self._missing.at
        return not missing

    def query(self) -> Query:
        """What to look for; to be handed to `answered` once it was run."""
        missing = self._missing = self._missing or self._arrived()
        self._open = missing.at
        sought = [self._sought.get(at, _NOT_SOUGHT).until for at in missing.at]
        return Query(
            missing.source, missing.offset, missing.due_ms, np.array(sought, dtype=np.int64)
        )

    def answered(self, query: Query) -> None:
        """The last query was run."""
        for n, at in enumerate(self._open):
            before = self._sought.get(at, _NOT_SOUGHT).places
            found = query.places.get(n, ())
            self._sought[at] = _Sought(query.until, [*before, *found] if before else found)

    def _places(self, handles: Sequence[Cancelled]) -> list[int]:
        """Their places in the list; those that are not in it yet are appended."""
        at = self._at
        places = [at.setdefault(handle, len(at)) for handle in handles]
        added = list(itertools.islice(at, len(self._handles), None))
        self._handles += added
        self._outcomes += [None] * len(added)
        return places

    def _arrived(self) -> Asked:
        """Those of the open handles that memory and disk are asked about; decides on the others."""
        scheduler = self._scheduler
        sources: dict[SourceId, tuple[int, int]] = {}
        arrived: list[tuple[int, int, int, int]] = []
        for at in self._open:
            source_id, offset, due_ms = self._handles[at]
            found = sources.get(source_id)
            if found is None:
                found = sources[source_id] = _arrived_from(scheduler, source_id)
            number, end = found
            if offset >= end:
                own = scheduler.keyed.is_own(source_id)
                self._outcomes[at] = UNKNOWN if own else NOT_YET
            else:
                arrived.append((at, number, offset, due_ms))
        places, numbers, offsets, dues = zip(*arrived, strict=True) if arrived else ((),) * 4
        asked = Asked(
            list(places),
            np.array(numbers, dtype=np.uint32),
            np.array(offsets, dtype=np.int64),
            np.array(dues, dtype=np.int64),
        )
        return self._not_gone(asked) if places else asked

    def _not_gone(self, asked: Asked) -> Asked:
        gone = self._scheduler.tombstones.find(asked.source, asked.offset)
        if not gone.any():
            return asked
        fires = self._scheduler.fires
        for n in np.flatnonzero(gone).tolist():
            by_hand = fires.fired_late(int(asked.source[n]), int(asked.offset[n]))
            self._outcomes[asked.at[n]] = FIRED if by_hand else CANCELLED
        self.end = self._scheduler.log.end_position
        return asked.take(np.flatnonzero(~gone).tolist())

    def _in_memory(self, asked: Asked) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Row of the near table and due time of each; NOWHERE if it is not there."""
        scheduler = self._scheduler
        keys, which = np.unique(keys_of(asked.source, asked.offset), return_inverse=True)
        rows = scheduler.near.find_all(keys)
        far_ms = np.maximum(scheduler.memtable.keys.find(keys), scheduler.frozen.find(keys))
        due_ms = np.where(rows >= 0, scheduler.near.table.due_ms[rows], far_ms)
        return rows[which], due_ms[which]

    def _on_disk(self, asked: Asked, n: int, now_ms: int) -> str | DuemqError | None:
        """The outcome of a timer that is not in memory; None: a look-up is needed."""
        sought = self._sought.get(asked.at[n])
        if sought is None:
            return None
        for place in sought.places:
            if place.error is None and place.row >= place.block.cursor:
                return _PENDING
        if sought.until < self._scheduler.segments.catalog.added:
            return None
        for place in sought.places:
            if place.error is not None and place.block.cursor < place.block.count:
                return Corrupt(str(place.error))
        handle = self._handles[asked.at[n]]
        return outcome_of_gone(self._scheduler, int(asked.source[n]), handle, now_ms)

    def _cancel(self, wanted: Asked, rows: Ids, now_ms: int) -> None:
        """`rows`: of the near table, NOWHERE for what lies far."""
        scheduler = self._scheduler
        if not wanted.at:
            return
        far = rows == NOWHERE
        target, places = self._targets(wanted, rows)
        marks = scheduler.topics.marks(target.tolist())
        body = log_entries.encode_cancel([self._handles[at] for at in wanted.at], marks)
        _, self.end = scheduler.log.append(self.kind, [body])
        scheduler.near.drop(rows[~far])
        if places:
            far_at = list(places)
            slots = scheduler.topics.slots(target[far_at])
            scheduler.due_counts.cancelled(list(places.values()), slots, wanted.due_ms[far_at])
        since_ms = np.maximum(wanted.due_ms, now_ms)
        for unmet in (True, False):
            mine = far == unmet
            scheduler.tombstones.add_all(
                wanted.source[mine], wanted.offset[mine], since_ms[mine], unmet=unmet
            )
            scheduler.topics.cancelled(target[mine], unmet=unmet)
        for at in wanted.at:
            self._outcomes[at] = CANCELLED
        if scheduler.schedules:
            for at in wanted.at:
                handle = self._handles[at]
                scheduler.schedules.left(handle.source, (handle.offset,))
        scheduler.ledger.cancelled += len(wanted.at)

    def _targets(self, wanted: Asked, rows: Ids) -> tuple[npt.NDArray[np.int64], dict[int, Block]]:
        """The number of each one's target; the blocks of those that lie in one."""
        scheduler = self._scheduler
        target = scheduler.near.table.target[rows].astype(np.int64)
        far = np.flatnonzero(rows == NOWHERE)
        if not len(far):
            return target, {}
        keys, which = np.unique(
            keys_of(wanted.source[far], wanted.offset[far]), return_inverse=True
        )
        in_memory = (scheduler.memtable.keys, scheduler.frozen)
        target[far] = np.maximum(*(each.find_targets(keys) for each in in_memory))[which]
        places = {}
        for n in np.flatnonzero(target == NOWHERE).tolist():
            place = self._place(wanted.at[n])
            assert place.target is not None
            target[n] = scheduler.numbers.number_target(place.target)
            places[n] = place.block
        return target, places

    def _place(self, at: int) -> Place:
        """Where a handle's timer lies on disk, that was found pending there."""
        return next(
            each
            for each in self._sought[at].places
            if each.error is None and each.row >= each.block.cursor
        )


def outcome_of_gone(scheduler: Scheduler, source: int, handle: Cancelled, now_ms: int) -> str:
    """Of a timer that arrived, is not pending, and is not remembered as cancelled."""
    if handle.offset < scheduler.numbers.sources[source].first_offset:
        return UNKNOWN
    if scheduler.fires.fired_late(source, handle.offset):
        return FIRED
    if handle.due_ms > max(now_ms, scheduler.fires.until_ms):
        return UNKNOWN  # nothing with this due time can have fired
    kept_ms = max(now_ms - scheduler.tombstones.keep_ms, scheduler.tombstones.forgotten_ms + 1)
    return FIRED if handle.due_ms >= kept_ms else UNKNOWN


def _arrived_from(scheduler: Scheduler, source_id: SourceId) -> tuple[int, int]:
    """A source's number, and the offset before which its timers have arrived."""
    numbers = scheduler.numbers
    number = numbers.find_source(source_id)
    return (0, 0) if number is None else (number, numbers.sources[number].next_offset)
