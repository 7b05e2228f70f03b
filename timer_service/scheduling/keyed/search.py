"""What waits under keys, or under handles: in memory at once, on disk with a look-up.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

`look` says what waits at this moment, or that a look-up must be run first: `asks` of it go to
key_look_up.py, while timers come and fire as ever.  Then `look` is called again and sees to
what changed meanwhile, as in cancelling.py:

    read in a block           and not loaded since, nor cancelled   → waits there
    nowhere, or loaded        and in memory now                     → waits there
                              and other blocks may have it          → those are looked at, too
                              and neither                           → nothing waits

The answer holds until something else happens to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.key_look_up import FarTimer, HandleAsk, KeyAsk
from duemq_server.timer_service.far.look_up import BlockRow, Query
from duemq_server.timer_service.timers.key_hash import hash_of, key_in
from duemq_server.timer_service.timers.keyed import Handle, TimerKey
from duemq_server.timer_service.timers.keys import NOWHERE, KeyList, KeyListRow
from duemq_server.timer_service.timers.rows import Hashes, Rows, keys_of

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


class InKeyList(NamedTuple):
    """Where a timer lies that is not yet in a block."""

    keys: KeyList
    found: KeyListRow
    rows: Rows  # of its piece


class Waiting(NamedTuple):
    """A pending timer."""

    handle: Handle
    target: int  # number
    tag_hash: int
    key_hash: int
    timer_key: int
    body: bytes | memoryview
    row: int = NOWHERE  # of the near table
    listed: InKeyList | None = None
    block: Block | None = None
    """That it lies in."""

    def forget(self) -> None:
        """It was taken away; before it is met and dropped, nobody shall find it by its key."""
        if self.listed is not None and self.listed.rows.timer_key is not None:
            self.listed.keys.forget_hash(self.timer_key, self.listed.found.at)
            self.listed.rows.timer_key[self.listed.found.row] = 0


class KeySearch:
    """Of several keys."""

    def __init__(self, scheduler: Scheduler, keys: Sequence[TimerKey]) -> None:
        self.keys = keys
        self.hashes = np.empty(0, dtype=np.uint64)
        self.waiting: list[Waiting | None] = []
        """After `look` said True: what waits under each key."""
        self.errors: dict[int, Corrupt] = {}
        """And of which keys that is not known."""
        self._scheduler = scheduler
        self._distinct = self.hashes
        self._places: list[list[int]] = []  # of each distinct hash
        self._asks: dict[int, KeyAsk] = {}
        self._learn = False
        self._looked: dict[int, set[int]] = {}  # numbers of blocks, by key
        self._far: dict[int, list[FarTimer]] = {}
        self._errors: dict[int, list[BlockRow]] = {}

    def _hash(self) -> None:
        """Not at once, for a list of keys is decided on in parts, one after the other."""
        self.hashes = np.array([hash_of(key) for key in self.keys], dtype=np.uint64)
        places: dict[int, list[int]] = {}
        for place, hashed in enumerate(self.hashes.tolist()):
            places.setdefault(hashed, []).append(place)
        self._distinct = np.array(list(places), dtype=np.uint64)
        self._places = list(places.values())

    def look(self) -> bool:
        """Whether it is known what waits under each; False: a look-up must be run first."""
        if len(self.hashes) != len(self.keys):
            self._hash()
        self.waiting, self.errors = [None] * len(self.keys), {}
        self._asks, self._learn = {}, False
        self._in_memory()
        missing = [at for at, found in enumerate(self.waiting) if found is None]
        if missing and len(self._scheduler.segments.key_filter):
            self._on_disk(missing)
        return not self._asks and not self._learn

    def asks(self) -> list[KeyAsk]:
        """What to look for, once `look` said False; none: the blocks' keys must be learnt."""
        return list(self._asks.values())

    def answered(self) -> None:
        """The look-up was run."""
        for at, ask in self._asks.items():
            self._looked.setdefault(at, set()).update(ask.blocks)
            self._far.setdefault(at, []).extend(ask.found)
            self._errors.setdefault(at, []).extend(ask.errors)

    def _in_memory(self) -> None:
        near = self._scheduler.near
        for distinct, row in _pairs(near.find_timer_keys(self._distinct)):
            self._take(distinct, near_timer(self._scheduler, row))
        for distinct, listed in in_lists(self._scheduler, self._distinct):
            each = listed_timer(self._scheduler, listed)
            if each is not None:
                self._take(distinct, each)

    def _take(self, distinct: int, found: Waiting) -> None:
        for at in self._places[distinct]:
            key = self.keys[at]
            if self._scheduler.numbers.targets[found.target].topic != key.topic:
                continue
            if key_in(found.body) == key.key:
                self.waiting[at] = found

    def _on_disk(self, missing: list[int]) -> None:
        for at in missing:
            for far in self._far.get(at, ()):
                if waits(self._scheduler, far):
                    self.waiting[at] = far_timer(self._scheduler, far)
        missing = [at for at in missing if self.waiting[at] is None]
        if not missing:
            return
        known = self._scheduler.segments.key_filter
        if known.unknown:
            self._learn = True
            return
        candidates = known.candidates(self.hashes[missing])
        for at, blocks in zip(missing, candidates, strict=True):
            wanted = blocks - self._looked.get(at, set())
            if wanted:
                self._asks[at] = KeyAsk(self.keys[at], int(self.hashes[at]), sorted(wanted))
            else:
                self._note_errors(at)

    def _note_errors(self, at: int) -> None:
        for place in self._errors.get(at, ()):
            if place.block.cursor < place.block.count:
                self.errors[at] = Corrupt(str(place.error))


class HandleSearch:
    """Of several timers, by handle, all of which arrived and are not known to be cancelled."""

    def __init__(self, scheduler: Scheduler, handles: Sequence[Handle]) -> None:
        self.handles = handles
        self.waiting: list[Waiting | None] = []
        """After `look` said True: what waits; with another due time than the handle's, too."""
        self.errors: dict[int, Corrupt] = {}
        """And of which timers that is not known."""
        self._scheduler = scheduler
        find = scheduler.numbers.find_source
        self._sources = np.array([find(each.source) or 0 for each in handles], dtype=np.uint32)
        self._offsets = np.array([each.offset for each in handles], dtype=np.int64)
        self._keys, which = np.unique(keys_of(self._sources, self._offsets), return_inverse=True)
        self._at = {distinct: at for at, distinct in enumerate(which.tolist())}
        self._ask: HandleAsk | None = None
        self._until = 0  # blocks below this number were looked at
        self._far: dict[tuple[int, int], FarTimer] = {}  # by source and offset
        self._errors: list[BlockRow] = []

    def look(self) -> bool:
        """As KeySearch's; no handle occurs twice."""
        scheduler, self._ask, self.errors = self._scheduler, None, {}
        self.waiting = [None] * len(self.handles)
        if not self.handles:
            return True
        self._in_memory()
        places = zip(self.waiting, self._sources.tolist(), self._offsets.tolist(), strict=True)
        missing = [
            at
            for at, (found, source, offset) in enumerate(places)
            if found is None and not scheduler.tombstones.has(source, offset)
        ]
        return not missing or self._on_disk(missing)

    def _in_memory(self) -> None:
        scheduler = self._scheduler
        rows = scheduler.near.find_all(self._keys).tolist()
        for distinct, row in enumerate(rows):
            if row >= 0:
                self.waiting[self._at[distinct]] = near_timer(scheduler, row)
        for keys, pieces in scheduler.tiers.lists():
            for distinct, found in keys.find_places(self._keys):
                listed = InKeyList(keys, found, pieces[found.piece][0])
                self.waiting[self._at[distinct]] = listed_timer(scheduler, listed)

    def asks(self) -> list[HandleAsk]:
        """What to look for, once `look` said False."""
        return [] if self._ask is None else [self._ask]

    def answered(self) -> None:
        """The look-up was run."""
        if self._ask is not None:
            self._until = self._ask.query.until
            self._errors += self._ask.errors
            for far in self._ask.found:
                number = self._scheduler.numbers.find_source(far.source)
                self._far[number or 0, far.offset] = far

    def _on_disk(self, missing: list[int]) -> bool:
        scheduler = self._scheduler
        for at in missing:
            far = self._far.get((int(self._sources[at]), int(self._offsets[at])))
            if far is not None and waits(scheduler, far):
                self.waiting[at] = far_timer(scheduler, far)
        missing = [at for at in missing if self.waiting[at] is None]
        if not missing or self._until == scheduler.segments.catalog.added:
            for at in missing:
                self._note_errors(at)
            return True
        due_ms = np.array([self.handles[at].due_ms for at in missing], dtype=np.int64)
        since = np.full(len(missing), self._until, dtype=np.int64)
        query = Query(self._sources[missing], self._offsets[missing], due_ms, since)
        self._ask = HandleAsk(query)
        return False

    def _note_errors(self, at: int) -> None:
        due_ms = self.handles[at].due_ms
        for place in self._errors:
            each = place.block
            if each.cursor < each.count and each.next_due_ms <= due_ms <= each.last_due_ms:
                self.errors[at] = Corrupt(str(place.error))


def near_timer(scheduler: Scheduler, row: int) -> Waiting:
    """A row of the near table."""
    table = scheduler.near.table
    return _waiting(scheduler, table, row, scheduler.near.body(row))._replace(row=row)


def in_lists(scheduler: Scheduler, hashes: Hashes) -> list[tuple[int, InKeyList]]:
    """Timers of the memtable, and of the one being flushed, by their keys' hashes."""
    return [
        (at, InKeyList(keys, found, pieces[found.piece][0]))
        for keys, pieces in scheduler.tiers.lists()
        for at, found in keys.find_hashes(hashes)
    ]


def listed_timer(scheduler: Scheduler, listed: InKeyList) -> Waiting | None:
    """A timer of the memtable; None: it was cancelled."""
    rows, row = listed.rows, listed.found.row
    if scheduler.tombstones.has(int(rows.source[row]), int(rows.offset[row])):
        return None
    for keys, pieces in scheduler.tiers.lists():
        if keys is listed.keys:
            blob = pieces[listed.found.piece][1]
            start = int(rows.home[row]) - blob.start
            body = blob.data[start : start + int(rows.size[row])]
            return _waiting(scheduler, rows, row, body)._replace(listed=listed)
    return None


def _waiting(scheduler: Scheduler, rows: Rows, row: int, body: bytes | memoryview) -> Waiting:
    source = scheduler.numbers.sources[int(rows.source[row])].id
    return Waiting(
        Handle(source, int(rows.offset[row]), int(rows.due_ms[row])),
        int(rows.target[row]),
        int(rows.tag_hash[row]),
        int(rows.key_hash[row]),
        0 if rows.timer_key is None else int(rows.timer_key[row]),
        body,
    )


def waits(scheduler: Scheduler, far: FarTimer) -> bool:
    """Whether a timer that was read is still where it lay."""
    if far.row < far.block.cursor:
        return False
    number = scheduler.numbers.find_source(far.source)
    return number is not None and not scheduler.tombstones.has(number, far.offset)


def far_timer(scheduler: Scheduler, far: FarTimer) -> Waiting:
    """A timer that was read."""
    return Waiting(
        Handle(far.source, far.offset, far.due_ms),
        scheduler.numbers.number_target(far.target),
        far.tag_hash,
        far.key_hash,
        far.timer_key,
        far.body,
        block=far.block,
    )


def _pairs(found: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]) -> list[tuple[int, int]]:
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))
