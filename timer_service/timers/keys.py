"""Where timers are that lie in memory, by identity (rows.key_of).

Owned by: Near, Memtable.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.rows import KEY_BITS, Rows, key_of, keys_of, runs
from duemq_server.timer_service.timers.wheel import Ids

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
NOWHERE = -1
_NO_PLACES: Places = np.empty(0, dtype=np.int64)
_NOTHING = np.array([[np.iinfo(np.uint64).max], [0]], dtype=np.uint64)  # bounds of no keys
_NO_BOUNDS = _NOTHING[:, :0]

_PROBES = 24  # slots that a row may lie in; at most half are taken in all
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FEW = 8  # up to this many rows a plain loop beats NumPy's fixed cost
_MASK64 = (1 << 64) - 1


class RowTable:
    """Row numbers by key: a hash table of row numbers, whose keys lie in the rows themselves.

    A row lies in one of the `_PROBES` slots behind the one that its key names, or, rarely, beside
    the table.  A lookup looks at all of them, so that taking a row out is emptying its slot.
    """

    def __init__(self, capacity: int) -> None:
        """For rows with numbers below `capacity`."""
        bits = max(6, (2 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._slots = np.full((1 << bits) + _PROBES, NOWHERE, dtype=np.int32)
        self._slot_of = np.full(capacity, NOWHERE, dtype=np.int32)
        self._beside: dict[int, list[int]] = {}  # key -> rows
        self._key_beside: dict[int, int] = {}  # row -> key

    def add(self, ids: Ids, keys: Keys) -> None:
        """Rows come in; their numbers were not in use."""
        if len(ids) <= _FEW:
            slots, slot_of = self._slots.data, self._slot_of.data
            for row, key in zip(ids.tolist(), keys.tolist(), strict=True):
                home = (key * int(_GOLDEN) & _MASK64) >> self._shift
                for at in range(home, home + _PROBES):
                    if slots[at] < 0:
                        slots[at] = row
                        slot_of[row] = at
                        break
                else:
                    self._put_beside(row, key)
            return
        home = self._homes(keys)
        left = np.arange(len(ids))
        for probe in range(_PROBES):
            wanted = home[left] + probe
            free = self._slots[wanted] == NOWHERE
            tried, wanted = left[free], wanted[free]
            self._slots[wanted] = ids[tried]  # of those that want the same slot the last one has it
            won = self._slots[wanted] == ids[tried]
            self._slot_of[ids[tried[won]]] = wanted[won]
            left = np.concatenate((left[~free], tried[~won]))
            if not len(left):
                return
        for row, key in zip(ids[left].tolist(), keys[left].tolist(), strict=True):
            self._put_beside(row, key)

    def remove(self, ids: Ids) -> None:
        """Rows go, also such as are not in it."""
        slots = self._slot_of[ids]
        self._slots[slots[slots >= 0]] = NOWHERE
        self._slot_of[ids] = NOWHERE
        if self._key_beside:
            for row in ids[slots < 0].tolist():
                key = self._key_beside.pop(row, None)
                if key is not None:
                    self._beside[key].remove(row)
                    if not self._beside[key]:
                        del self._beside[key]

    def find(self, keys: Keys, rows: Rows) -> Ids:
        """The row of each key, or NOWHERE.  `rows` are all rows, by number."""
        if len(keys) <= _FEW:
            return np.array([self._find_one(int(key), rows) for key in keys], dtype=np.int32)
        slots = self._homes(keys)[:, None] + np.arange(_PROBES)
        candidates = self._slots[slots]
        own = keys_of(rows.source[candidates], rows.offset[candidates])
        hits = (candidates != NOWHERE) & (own == keys[:, None])
        found = np.where(hits, candidates, NOWHERE).max(axis=1).astype(np.int32)
        if self._beside:
            for at in np.flatnonzero(found == NOWHERE).tolist():
                found[at] = self._find_beside(int(keys[at]))
        return found

    def find_all(self, keys: Keys, own: Keys) -> tuple[Ids, Ids]:
        """Pairs (place in `keys`, row) of all rows that have these keys; a key may have several.

        `own`: the keys of all rows, by number.
        """
        candidates = self._slots[self._homes(keys)[:, None] + np.arange(_PROBES)]
        hits = (candidates != NOWHERE) & (own[candidates] == keys[:, None])
        which, rows = np.nonzero(hits)[0].astype(np.int32), candidates[hits]
        if self._key_beside:
            beside = [(at, row) for at, key in enumerate(keys.tolist()) for row in self._rows(key)]
            more = np.array(beside, dtype=np.int32).reshape(-1, 2)
            which, rows = np.append(which, more[:, 0]), np.append(rows, more[:, 1])
        return which, rows

    def _find_one(self, key: int, rows: Rows) -> int:
        home = (key * int(_GOLDEN) & _MASK64) >> self._shift
        for row in self._slots[home : home + _PROBES].tolist():
            if row != NOWHERE and key_of(int(rows.source[row]), int(rows.offset[row])) == key:
                return int(row)
        return self._find_beside(key)

    def _rows(self, key: int) -> list[int]:
        return self._beside.get(key, [])

    def _find_beside(self, key: int) -> int:
        return next(iter(self._rows(key)), NOWHERE)

    def _homes(self, keys: Keys) -> npt.NDArray[np.int64]:
        return ((keys * _GOLDEN) >> np.uint64(self._shift)).astype(np.int64)

    def _put_beside(self, row: int, key: int) -> None:
        self._beside.setdefault(key, []).append(row)
        self._key_beside[row] = key


class KeyListRow(NamedTuple):
    """A timer of a KeyList."""

    at: int  # in the list
    piece: int  # the batch that it came with
    row: int  # of that batch


class KeyList:
    """Far timers that are not yet in a block, by key: due times and targets.

    Some tens of thousands.  They came last, so that a look at the offsets of each source rules most
    keys out.
    """

    def __init__(self) -> None:
        self._count = 0
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._due_ms = np.empty(0, dtype=np.int64)
        self._target = np.empty(0, dtype=np.uint32)
        self._ends: list[int] = []  # of each batch
        self._bounds = _NO_BOUNDS  # least and largest key of each source
        self._by_hash: dict[int, list[int]] = {}  # places of those that have a timer key

    @classmethod
    def of(cls, parts: Iterable[Rows]) -> KeyList:
        """All of several batches."""
        made, listed = cls(), list(parts)
        if listed:
            made._keys = np.concatenate([keys_of(rows.source, rows.offset) for rows in listed])
            made._due_ms = np.concatenate([rows.due_ms for rows in listed])
            made._target = np.concatenate([rows.target for rows in listed])
            made._count = len(made._keys)
            made._bound(made._keys)
            made._ends = list(itertools.accumulate(len(rows) for rows in listed))
            for rows, end in zip(listed, made._ends, strict=True):
                made._add_hashes(rows, end - len(rows))
        return made

    def add(self, rows: Rows) -> None:
        """Further timers."""
        end = self._count + len(rows)
        if end > len(self._keys):
            self._keys = _grown(self._keys, 2 * end)
            self._due_ms = _grown(self._due_ms, 2 * end)
            self._target = _grown(self._target, 2 * end)
        self._keys[self._count : end] = keys = keys_of(rows.source, rows.offset)
        self._bound(keys)
        self._due_ms[self._count : end] = rows.due_ms
        self._target[self._count : end] = rows.target
        self._add_hashes(rows, self._count)
        self._ends.append(end)
        self._count = end

    def _bound(self, keys: Keys) -> None:
        """Widens the bounds by keys that come."""
        if not len(keys):
            return
        sources = keys >> np.uint64(KEY_BITS)
        if sources[0] != sources[-1] or (sources != sources[0]).any():
            for source in np.unique(sources).tolist():
                self._bound(keys[sources == source])
            return
        source = int(sources[0])
        more = source + 1 - self._bounds.shape[1]
        if more > 0:
            self._bounds = np.hstack([self._bounds, np.repeat(_NOTHING, more, axis=1)])
        low, high = self._bounds[:, source]
        self._bounds[:, source] = min(low, keys.min()), max(high, keys.max())

    def _possible(self, keys: Keys) -> Places:
        """Places of those that may be here."""
        if not self._count:
            return _NO_PLACES
        source = (keys >> np.uint64(KEY_BITS)).astype(np.int64)
        low, high = self._bounds.take(source, axis=1, mode="clip")  # an unknown one: another's
        return np.flatnonzero((low <= keys) & (keys <= high))

    def _add_hashes(self, rows: Rows, start: int) -> None:
        if rows.timer_key is not None:
            for at, hashed in enumerate(rows.timer_key.tolist(), start):
                if hashed:
                    self._by_hash.setdefault(hashed, []).append(at)

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The due time of each of these, or NOWHERE."""
        return self._of(self._due_ms, keys)

    def find_targets(self, keys: Keys) -> npt.NDArray[np.int64]:
        """As `find`, the number of the target."""
        return self._of(self._target, keys)

    def _of(self, column: npt.NDArray[Any], keys: Keys) -> npt.NDArray[np.int64]:
        found = np.full(len(keys), NOWHERE, dtype=np.int64)
        possible = self._possible(keys)
        if not len(possible):
            return found
        own = self._keys[: self._count]
        if len(possible) <= _FEW:
            for at in possible.tolist():
                hits = np.flatnonzero(own == keys[at])
                if len(hits):
                    found[at] = column[hits[0]]
            return found
        wanted, which = np.unique(keys[possible], return_inverse=True)
        places, hits = self._find(wanted)
        of_wanted = np.full(len(wanted), NOWHERE, dtype=np.int64)
        of_wanted[places] = column[hits]
        found[possible] = of_wanted[which]
        return found

    def find_hashes(self, hashes: Keys) -> list[tuple[int, KeyListRow]]:
        """Pairs (place in `hashes`, timer) of all timers that have these."""
        if not self._by_hash:
            return []
        places = [(n, self._by_hash.get(hashed, ())) for n, hashed in enumerate(hashes.tolist())]
        return [(n, self._place(at)) for n, found in places for at in found]

    def find_places(self, keys: Keys) -> list[tuple[int, KeyListRow]]:
        """Of keys, ascending and each once: where they lie."""
        which, found = self._find(keys)
        pairs = zip(which.tolist(), found.tolist(), strict=True)
        return [(n, self._place(at)) for n, at in pairs]

    def find_rows(self, keys: Keys) -> list[tuple[int, Places, Places]]:
        """As `find_places`, by batch: its number, places in `keys`, and rows of the batch."""
        which, found = self._find(keys)
        batch = np.searchsorted(self._ends, found, side="right")
        starts = [0, *self._ends]
        return [
            (piece, which[start:end], found[start:end] - starts[piece])
            for start, end in runs(batch)
            for piece in (int(batch[start]),)
        ]

    def _find(self, keys: Keys) -> tuple[Places, Places]:
        """Places in `keys` and here of all that are here, in the order of these."""
        if not len(keys) or not self._count:
            return _NO_PLACES, _NO_PLACES
        own = self._keys[: self._count]
        which = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        found = np.flatnonzero(keys[which] == own)
        return which[found], found

    def _place(self, at: int) -> KeyListRow:
        piece = bisect.bisect_right(self._ends, at)
        return KeyListRow(at, piece, at - (self._ends[piece - 1] if piece else 0))

    def forget_hash(self, hashed: int, at: int) -> None:
        """The timer at this place is not found by its hash any more: another has its key."""
        places = self._by_hash.get(hashed, [])
        if at in places:
            places.remove(at)
        if not places:
            self._by_hash.pop(hashed, None)


def _grown(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    grown = np.empty(capacity, dtype=column.dtype)
    grown[: len(column)] = column
    return grown
