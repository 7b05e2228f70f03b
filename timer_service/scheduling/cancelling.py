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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt, DuemqError
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.look_up import BlockRow, Query
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.handles import Handles
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from duemq_server.timer_service.timers.rows import keys_of
from duemq_server.timer_service.timers.wheel import Ids

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CANCELLED, FIRED, UNKNOWN, NOT_YET = "CANCELLED", "FIRED", "UNKNOWN", "NOT_YET"
PENDING = "PENDING"
"""Of who only looks for timers (timer_service/views/finding.py)."""
_OPEN, _ERROR = "", "ERROR"
_OUTCOMES = (_OPEN, CANCELLED, FIRED, UNKNOWN, NOT_YET, PENDING, _ERROR)
_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


class AskedHandles(NamedTuple):
    """Handles whose timers arrived, and were not cancelled as far as is remembered; in columns."""

    at: Numbers  # place in the list of handles
    source: npt.NDArray[np.uint32]
    offset: Numbers
    due_ms: Numbers

    def take(self, index: Any) -> AskedHandles:
        """Those at these places, or of a mask."""
        return AskedHandles(*(column[index] for column in self))


class ToCancel(NamedTuple):
    """Timers that are pending, each once, and where they lie."""

    asked: AskedHandles
    row: Ids
    """Of the near table; NOWHERE: they lie far."""
    in_block: Mask


class _Sought(NamedTuple):
    """What the disk said of handles, in columns."""

    until: Numbers
    """Blocks below this number were looked at; NOWHERE: none was."""
    block: Numbers
    """Number of the block that it was found in; NOWHERE: in none."""
    row: Numbers
    target: Numbers

    def join(self, other: _Sought) -> _Sought:
        return _Sought(*map(np.concatenate, zip(self, other, strict=True)))


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
    outcome = CANCELLED
    """Of what is pending."""

    def __init__(self, scheduler: Scheduler, handles: Sequence[Cancelled]) -> None:
        self.end = 0
        """Position up to which the log must be durable before the outcomes are told."""
        self.handles = Handles.of(handles)
        self._scheduler = scheduler
        self._codes = np.zeros(len(handles), dtype=np.int8)
        self._errors: dict[int, DuemqError] = {}
        self._sought = _Sought(*np.full((4, len(handles)), NOWHERE, dtype=np.int64))
        self._blocks: dict[int, Block] = {}  # in which something was found
        self._unreadable: dict[int, list[BlockRow]] = {}
        self._missing: AskedHandles | None = None  # to be looked for

    def outcomes(self, start: int = 0, end: int | None = None) -> list[str | DuemqError] | None:
        """CANCELLED, FIRED, UNKNOWN, NOT_YET or an error of each; None: not all are decided.

        NOT_YET: the timer has not arrived from its broker.
        """
        codes = self._codes[start:end]
        if not codes.all():
            return None
        found: list[str | DuemqError] = [_OUTCOMES[code] for code in codes.tolist()]
        for at, error in self._errors.items():
            if start <= at < start + len(found):
                found[at - start] = error
        return found

    def join(self, other: Cancelling) -> int:
        """Takes over the handles of another one; both wait for a look-up.

        The other one's places begin at the number that is returned.
        """
        start = len(self.handles)
        self.handles = Handles.joined([self.handles, other.handles])
        self._codes = np.concatenate([self._codes, other._codes])
        self._errors |= {start + at: error for at, error in other._errors.items()}
        self._sought = self._sought.join(other._sought)
        self._blocks |= other._blocks
        self._unreadable |= {start + at: places for at, places in other._unreadable.items()}
        self._missing = None  # the columns lack what came
        self.end = max(self.end, other.end)
        return start

    def advance(self, now_ms: int) -> bool:
        """Decides what can be decided; False: for the rest a look-up must be run first.

        Raises LogFull, DiskFull: this call cancelled nothing and can be repeated.
        """
        asked = self._arrived()
        keys = keys_of(asked.source, asked.offset)
        rows, due_ms = self._in_memory(keys)
        absent, there = due_ms == NOWHERE, due_ms == asked.due_ms
        self._codes[asked.at[~(absent | there)]] = _CODES[UNKNOWN]
        in_block = self._pending_in_blocks(asked, absent)
        missing = self._missing = self._not_gone(asked.take(absent & ~in_block), now_ms)
        wanted = np.flatnonzero(there | in_block)
        if len(wanted):
            once = wanted[_each_once(keys[wanted])]
            self._cancel(ToCancel(asked.take(once), rows[once], in_block[once]), now_ms)
            self._codes[asked.at[wanted]] = _CODES[self.outcome]
        return not len(missing.at)

    def query(self) -> Query:
        """What to look for; to be handed to `answered` once it was run."""
        missing = self._missing = self._missing or self._arrived()
        since = np.maximum(self._sought.until[missing.at], 0)
        return Query(missing.source, missing.offset, missing.due_ms, since)

    def answered(self, query: Query) -> None:
        """The last query was run."""
        assert self._missing is not None
        at, found, sought = self._missing.at, query.found, self._sought
        sought.until[at] = query.until
        here = found.block != NOWHERE
        mine, blocks = at[here], found.block[here]
        sought.block[mine], sought.row[mine] = blocks, found.row[here]
        sought.target[mine] = self._targets_in(query)[found.target[here]]
        self._blocks |= {number: query.blocks[number] for number in set(blocks.tolist())}
        for n, places in query.errors.items():
            self._unreadable.setdefault(int(at[n]), []).extend(places)

    def _targets_in(self, query: Query) -> Numbers:
        """The shard's numbers of a query's targets; only of those that were found."""
        numbers = np.full(len(query.targets), NOWHERE, dtype=np.int64)
        for place in set(query.found.target.tolist()) - {NOWHERE}:
            numbers[place] = self._scheduler.numbers.number_target(query.targets[place])
        return numbers

    def _arrived(self) -> AskedHandles:
        """Those of the open handles that memory and disk are asked about; decides on the others."""
        scheduler, handles = self._scheduler, self.handles
        at = np.flatnonzero(self._codes == _CODES[_OPEN])
        source, offset = handles.source[at], handles.offset[at]
        found = [_arrived_from(scheduler, each) for each in handles.sources]
        numbers, ends = np.array(found, dtype=np.int64).reshape(-1, 2).T
        arrived = offset < ends[source]
        if not arrived.all():
            own = np.array([scheduler.keyed.is_own(each) for each in handles.sources])
            late = np.where(own, _CODES[UNKNOWN], _CODES[NOT_YET])[source]
            self._codes[at[~arrived]] = late[~arrived]
            at, source, offset = at[arrived], source[arrived], offset[arrived]
        asked = AskedHandles(at, numbers[source].astype(np.uint32), offset, handles.due_ms[at])
        return self._not_cancelled(asked) if len(at) else asked

    def _not_cancelled(self, asked: AskedHandles) -> AskedHandles:
        gone = self._scheduler.tombstones.find(asked.source, asked.offset)
        if not gone.any():
            return asked
        fires = self._scheduler.fires
        for n in np.flatnonzero(gone).tolist():
            by_hand = fires.fired_late(int(asked.source[n]), int(asked.offset[n]))
            self._codes[asked.at[n]] = _CODES[FIRED if by_hand else CANCELLED]
        self.end = self._scheduler.log.end_position
        return asked.take(~gone)

    def _in_memory(self, keys: npt.NDArray[np.uint64]) -> tuple[Ids, Numbers]:
        """Row of the near table and due time of each; NOWHERE if it is not there."""
        scheduler = self._scheduler
        rows = scheduler.near.find_all(keys)
        far_ms = np.maximum(*(listed.find(keys) for listed, _ in scheduler.tiers.lists()))
        return rows, np.where(rows >= 0, scheduler.near.table.due_ms[rows], far_ms)

    def _pending_in_blocks(self, asked: AskedHandles, absent: Mask) -> Mask:
        """Which of those that are not in memory were found in a block, and not loaded since."""
        numbers = self._sought.block[asked.at]
        pending = absent & (numbers != NOWHERE)
        cursors = [self._blocks[number].cursor for number in numbers[pending].tolist()]
        pending[pending] = self._sought.row[asked.at[pending]] >= cursors
        return pending

    def _not_gone(self, asked: AskedHandles, now_ms: int) -> AskedHandles:
        """Those that must be looked for; decides on those that are nowhere."""
        known = self._sought.until[asked.at] >= self._scheduler.segments.catalog.added
        if not known.any():
            return asked
        gone = asked.take(known)
        for at, source in zip(gone.at.tolist(), gone.source.tolist(), strict=True):
            outcome = self._outcome_of_gone(at, source, now_ms)
            if outcome is FIRED:  # told when no restart or other leader can take it back
                self.end = self._scheduler.log.end_position
            self._codes[at] = _CODES[outcome]
        return asked.take(~known)

    def _outcome_of_gone(self, at: int, source: int, now_ms: int) -> str:
        for place in self._unreadable.get(at, ()):
            if place.block.cursor < place.block.count:
                self._errors[at] = Corrupt(str(place.error))
                return _ERROR
        return outcome_of_gone(self._scheduler, source, self.handles[at], now_ms)

    def _cancel(self, wanted: ToCancel, now_ms: int) -> None:
        scheduler, asked = self._scheduler, wanted.asked
        handles, far = self.handles, wanted.row == NOWHERE
        target = self._targets(wanted)
        table = log_entries.cancelled_table(
            handles.sources,
            handles.source[asked.at],
            asked.offset,
            asked.due_ms,
            scheduler.topics.marks(target),
        )
        _, self.end = scheduler.log.append(self.kind, [table.tobytes()])
        if not far.all():
            scheduler.near.drop(wanted.row[~far])
        self._uncount(wanted, target)
        since_ms = np.maximum(asked.due_ms, now_ms)
        for unmet, mine in ((True, far), (False, ~far)):
            if mine.any():
                scheduler.tombstones.add_all(
                    asked.source[mine], asked.offset[mine], since_ms[mine], unmet=unmet
                )
                scheduler.topics.cancelled(target[mine], unmet=unmet)
        if scheduler.schedules:
            for at in asked.at.tolist():
                handle = handles[at]
                scheduler.schedules.left(handle.source, (handle.offset,))
        scheduler.ledger.cancelled += len(target)

    def _uncount(self, wanted: ToCancel, target: Numbers) -> None:
        """Tells forecasts of those that lie in blocks."""
        scheduler, mine = self._scheduler, wanted.in_block
        if len(scheduler.due_counts) and mine.any():
            asked = wanted.asked.take(mine)
            blocks = [self._place(at).block for at in asked.at.tolist()]
            slots = scheduler.topics.slots(target[mine])
            scheduler.due_counts.cancelled(blocks, slots, asked.due_ms)

    def _targets(self, wanted: ToCancel) -> Numbers:
        """The number of each one's target."""
        scheduler, asked = self._scheduler, wanted.asked
        near = scheduler.near.table.target[wanted.row].astype(np.int64)
        target = np.where(wanted.in_block, self._sought.target[asked.at], near)
        listed = (wanted.row == NOWHERE) & ~wanted.in_block
        if listed.any():
            keys = keys_of(asked.source[listed], asked.offset[listed])
            lists = scheduler.tiers.lists()
            target[listed] = np.maximum(*(each.find_targets(keys) for each, _ in lists))
        return target

    def _place(self, at: int) -> BlockRow:
        """Where a handle's timer lies on disk, that was found pending there."""
        return BlockRow(self._blocks[int(self._sought.block[at])], int(self._sought.row[at]))


def _each_once(keys: npt.NDArray[np.uint64]) -> Any:
    """Places of each key, or all if each is there once."""
    if len(set(keys.tolist())) == len(keys):
        return slice(None)
    return np.unique(keys, return_index=True)[1]


def outcome_of_gone(scheduler: Scheduler, source: int, handle: Cancelled, now_ms: int) -> str:
    """Of a timer that arrived, is not pending, and is not remembered as cancelled."""
    if not scheduler.numbers.sources[source].had(handle.offset):
        return UNKNOWN
    if scheduler.fires.fired_late(source, handle.offset):
        return FIRED
    if handle.due_ms > max(now_ms, scheduler.fires.until_ms):
        return UNKNOWN  # nothing with this due time can have fired
    tombstones = scheduler.tombstones
    forgotten_ms = tombstones.forgotten_until_ms(source, handle.offset)
    kept_ms = max(now_ms - tombstones.keep_ms, forgotten_ms + 1)
    return FIRED if handle.due_ms >= kept_ms else UNKNOWN


def _arrived_from(scheduler: Scheduler, source_id: SourceId) -> tuple[int, int]:
    """A source's number, and the offset before which its timers have arrived."""
    numbers = scheduler.numbers
    number = numbers.find_source(source_id)
    return (0, 0) if number is None else (number, numbers.sources[number].next_offset)
