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

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from duemq.errors import Corrupt, DuemqError, Overloaded
from duemq_server.timer_service.far.look_up import Place, Query
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import Cancelled
from duemq_server.timer_service.timers.rows import key_of

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

CANCELLED, FIRED, UNKNOWN, NOT_YET = "CANCELLED", "FIRED", "UNKNOWN", "NOT_YET"


class _Asked(NamedTuple):
    """A handle whose timer arrived, and was not cancelled as far as is remembered."""

    handle: Cancelled
    source: int
    key: int


class _Sought(NamedTuple):
    """What the disk said of a handle: blocks below the number `until` were looked at."""

    until: int
    places: Sequence[Place]


_NOT_SOUGHT = _Sought(0, ())


def source_of(scheduler: Scheduler, handle: Cancelled) -> int | None:
    """The number of a handle's source; None if the timer has not arrived from it."""
    numbers = scheduler.numbers
    number = numbers.find_source(handle.source)
    if number is None or handle.offset >= numbers.sources[number].next_offset:
        return None
    return number


class Cancelling:
    """A list of handles, being cancelled."""

    def __init__(self, scheduler: Scheduler, handles: Sequence[Cancelled]) -> None:
        self.end = 0
        """Position up to which the log must be durable before the outcomes are told."""
        self._scheduler = scheduler
        self._open = list(dict.fromkeys(handles))  # each once
        self._outcomes: dict[Cancelled, str | DuemqError] = {}
        self._sought: dict[Cancelled, _Sought] = {}
        self._missing: dict[Cancelled, _Asked] = {}  # to be looked for

    def outcomes(self, handles: Sequence[Cancelled]) -> list[str | DuemqError] | None:
        """CANCELLED, FIRED, UNKNOWN, NOT_YET or an error of each; None: not all are decided.

        NOT_YET: the timer has not arrived from its broker.
        """
        found = [self._outcomes.get(handle) for handle in handles]
        decided = [outcome for outcome in found if outcome is not None]
        return decided if len(decided) == len(found) else None

    def join(self, other: Cancelling) -> None:
        """Takes over the handles of another one; both wait for a look-up."""
        self._outcomes |= other._outcomes
        self._sought |= other._sought
        self._missing |= other._missing
        self._open = list(self._missing)
        self.end = max(self.end, other.end)

    def advance(self, now_ms: int) -> bool:
        """Decides what can be decided; False: for the rest a look-up must be run first.

        Raises LogFull, DiskFull: this call cancelled nothing and can be repeated.
        """
        asked = self._arrived()
        wanted: list[tuple[_Asked, int]] = []
        missing: list[_Asked] = []
        for each, (row, due_ms) in zip(asked, self._in_memory(asked), strict=True):
            if due_ms == each.handle.due_ms:
                wanted.append((each, row))
            elif due_ms != NOWHERE:
                self._outcomes[each.handle] = UNKNOWN
            else:
                self._on_disk(each, now_ms, wanted, missing)
        self._cancel(wanted, now_ms)
        self._missing = {each.handle: each for each in missing}
        self._open = list(self._missing)
        return not missing

    def query(self) -> Query:
        """What to look for; to be handed to `answered` once it was run."""
        missing = self._missing.values()
        sought = [self._sought.get(handle, _NOT_SOUGHT).until for handle in self._missing]
        return Query(
            np.array([each.source for each in missing], dtype=np.uint32),
            np.array([each.handle.offset for each in missing], dtype=np.int64),
            np.array([each.handle.due_ms for each in missing], dtype=np.int64),
            np.array(sought, dtype=np.int64),
        )

    def answered(self, query: Query) -> None:
        """The last query was run."""
        for at, handle in enumerate(self._missing):
            before = self._sought.get(handle, _NOT_SOUGHT).places
            found = query.places.get(at, ())
            self._sought[handle] = _Sought(query.until, [*before, *found] if before else found)

    def _arrived(self) -> list[_Asked]:
        tombstones = self._scheduler.tombstones
        arrived = []
        for handle in self._open:
            number = source_of(self._scheduler, handle)
            if number is None:
                self._outcomes[handle] = NOT_YET
            elif tombstones.has(number, handle.offset):
                self._outcomes[handle] = CANCELLED
                self.end = self._scheduler.log.end_position
            else:
                arrived.append(_Asked(handle, number, key_of(number, handle.offset)))
        return arrived

    def _in_memory(self, asked: Sequence[_Asked]) -> list[tuple[int, int]]:
        """Row of the near table and due time of each; NOWHERE if it is not there."""
        scheduler = self._scheduler
        keys, which = np.unique(
            np.array([each.key for each in asked], dtype=np.uint64), return_inverse=True
        )
        rows = scheduler.near.find_all(keys)
        far_ms = np.maximum(scheduler.memtable.keys.find(keys), scheduler.frozen.find(keys))
        due_ms = np.where(rows >= 0, scheduler.near.table.due_ms[rows], far_ms)
        return list(zip(rows[which].tolist(), due_ms[which].tolist(), strict=True))

    def _on_disk(
        self,
        each: _Asked,
        now_ms: int,
        wanted: list[tuple[_Asked, int]],
        missing: list[_Asked],
    ) -> None:
        sought = self._sought.get(each.handle)
        if sought is None:
            missing.append(each)
            return
        for place in sought.places:
            if place.error is None and place.row >= place.block.cursor:
                wanted.append((each, NOWHERE))
                return
        if sought.until < self._scheduler.segments.catalog.added:
            missing.append(each)
            return
        for place in sought.places:
            if place.error is not None and place.block.cursor < place.block.count:
                self._outcomes[each.handle] = Corrupt(str(place.error))
                return
        self._outcomes[each.handle] = self._outcome_of_gone(each, now_ms)

    def _outcome_of_gone(self, each: _Asked, now_ms: int) -> str:
        """Of a timer that arrived, is not pending, and is not remembered as cancelled."""
        scheduler, handle = self._scheduler, each.handle
        if handle.offset < scheduler.numbers.sources[each.source].first_offset:
            return UNKNOWN
        if scheduler.fires.fired_late(each.source, handle.offset):
            return FIRED
        if handle.due_ms > max(now_ms, scheduler.fires.until_ms):
            return UNKNOWN  # nothing with this due time can have fired
        kept_ms = max(now_ms - scheduler.tombstones.keep_ms, scheduler.tombstones.forgotten_ms + 1)
        return FIRED if handle.due_ms >= kept_ms else UNKNOWN

    def _cancel(self, wanted: Sequence[tuple[_Asked, int]], now_ms: int) -> None:
        scheduler = self._scheduler
        tombstones, limit = scheduler.tombstones, scheduler.limits.tombstones_max
        room = max(0, limit - len(tombstones))
        for each, _ in wanted[room:]:
            self._outcomes[each.handle] = Overloaded(
                f"{limit} cancelled timers are remembered, no more can be",
                field="handles",
                limit=limit,
            )
        wanted = wanted[:room]
        if not wanted:
            return
        body = log_entries.encode_cancel([each.handle for each, _ in wanted])
        _, self.end = scheduler.log.append(log_entries.CANCEL, [body])
        rows = np.array([row for _, row in wanted if row != NOWHERE], dtype=np.int32)
        scheduler.near.drop(rows)
        for (handle, number, _), row in wanted:
            since_ms = max(handle.due_ms, now_ms)
            tombstones.add(number, handle.offset, since_ms, unmet=row == NOWHERE)
            self._outcomes[handle] = CANCELLED
        scheduler.ledger.cancelled += len(wanted)
