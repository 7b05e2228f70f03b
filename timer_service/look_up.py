"""Looking far timers up on disk, many at once, in a thread of its own.

`LookUp.run` reads what it was given when it was made, and blocks from disk; it changes nothing but
its results and the cache.  They may be out of date when it is done: what is loaded or flushed
meanwhile is the caller's business (cancelling.py).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from storage import record
from storage.disk import Disk, DiskFile
from storage.errors import CorruptFile
from timer_service import block
from timer_service.catalog import ANY, Catalog, Entries, Ranges, ranges_of
from timer_service.entries import SourceId
from timer_service.keys import Keys
from timer_service.rows import KEY_BITS, keys_of, runs

if TYPE_CHECKING:
    from timer_service.segments import Block

Numbers = npt.NDArray[np.int64]

CACHE_BYTES_MAX = 16 << 20  # 250 full blocks
_PAIRS_MAX = 1 << 20  # compared at once
_PAUSE_EVERY = 8  # blocks read: about a millisecond of work
_NARROW = 8  # rows of a block with the same due time, up to which they are compared one by one


class Place(NamedTuple):
    """Where a timer lies: in this row, or, if there is an error, perhaps in this block."""

    block: Block
    row: int
    error: CorruptFile | None = None


class Query:
    """Timers to look for, and what was found."""

    def __init__(
        self, source: npt.NDArray[np.uint32], offset: Numbers, due_ms: Numbers, since: Numbers
    ) -> None:
        """`since`: in blocks of this number and later."""
        self.source = source
        self.offset = offset
        self.due_ms = due_ms
        self.since = since
        self.until = 0
        """Blocks below this number were looked at."""
        self.places: dict[int, list[Place]] = {}

    def __len__(self) -> int:
        return len(self.offset)


class _Columns(NamedTuple):
    """Of a block's rows: what a look-up compares."""

    due_ms: Numbers
    keys: Keys


class Cache:
    """The blocks read last.  Owned by the thread that looks up."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._columns: OrderedDict[int, _Columns] = OrderedDict()

    def get(self, number: int) -> _Columns | None:
        """A block's columns, if it was read lately."""
        columns = self._columns.get(number)
        if columns is not None:
            self._columns.move_to_end(number)
        return columns

    def put(self, number: int, columns: _Columns) -> None:
        """Keeps a block's columns; others go."""
        self._columns[number] = columns
        self.bytes += _bytes(columns)
        while self.bytes > self._bytes_max:
            _, gone = self._columns.popitem(last=False)
            self.bytes -= _bytes(gone)

    def clear(self) -> None:
        """Lets go of all."""
        self._columns.clear()
        self.bytes = 0


def _bytes(columns: _Columns) -> int:
    return columns.due_ms.nbytes + columns.keys.nbytes


class LookUp:
    """Finds the timers of several queries; each block is read once."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        cache: Cache,
        catalog: Catalog,
        number_of: Callable[[SourceId], int | None],
        queries: Sequence[Query],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._cache = cache
        self._block = catalog.block
        self._view = catalog.view()
        self._number_of = number_of
        self._queries = queries
        self._reads = 0
        self._pause: Callable[[], None] = lambda: None
        self.learnt: dict[str, dict[int, Ranges]] = {}
        for query in queries:
            query.until = catalog.added
            query.places = {}

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Does the work.  What cannot be read is among the results.

        `pause` is called every now and then: to let another thread have the interpreter.
        """
        self._pause = pause
        queries = self._queries
        asked = _Asked(
            np.concatenate([query.source for query in queries]),
            np.concatenate([query.offset for query in queries]),
            np.concatenate([query.due_ms for query in queries]),
            np.concatenate([query.since for query in queries]),
        )
        owners = [(query, at) for query in queries for at in range(len(query))]
        order = np.argsort(asked.due_ms, kind="stable")
        dues = asked.due_ms[order]
        view = self._view
        first = np.searchsorted(dues, view.begin_ms, side="left")
        last = np.searchsorted(dues, view.end_ms, side="left")
        for number in np.flatnonzero(first < last).tolist():
            mine = order[first[number] : last[number]]
            found = self._in_file(view.names[number], view.entries[number], asked.take(mine))
            for timer, place in found:
                query, at = owners[int(mine[timer])]
                query.places.setdefault(at, []).append(place)

    def _in_file(self, name: str, entries: Entries, asked: _Asked) -> Iterator[tuple[int, Place]]:
        with _Reader(self._disk, os.path.join(self._directory, name)) as reader:
            entries = self._known(name, entries, asked, reader)
            pairs = candidates(entries, asked)
            order = np.argsort(pairs[1], kind="stable")
            wanted, numbers = pairs[0][order], pairs[1][order]
            for start, end in runs(numbers):
                number, timers = int(numbers[start]), wanted[start:end]
                each = self._block(number)
                if each is None:
                    continue
                try:
                    columns = self._columns(number, each, reader)
                except CorruptFile as error:
                    yield from ((int(timer), Place(each, 0, error)) for timer in timers)
                    continue
                rows = _rows_in(columns, asked.take(timers))
                for at in np.flatnonzero(rows >= 0).tolist():
                    yield int(timers[at]), Place(each, int(rows[at]))

    def _known(self, name: str, entries: Entries, asked: _Asked, reader: _Reader) -> Entries:
        """The entries of the file; those that were unknown and are needed are learnt."""
        unknown = np.flatnonzero(entries["source"] == ANY)
        if not len(unknown):
            return entries
        dues = np.sort(asked.due_ms)
        first = np.searchsorted(dues, entries["due"][unknown], side="left")
        last = np.searchsorted(dues, entries["until"][unknown], side="right")
        learnt: dict[int, Ranges] = {}
        parts = [entries[entries["source"] != ANY]]
        for entry in entries[unknown[first < last]]:
            number = int(entry["block"])
            each = self._block(number)
            if each is None:
                continue
            try:
                columns = self._columns(number, each, reader)
            except CorruptFile:
                parts.append(entry.reshape(1))  # a candidate for every timer, see `candidates`
                continue
            source = (columns.keys >> np.uint64(KEY_BITS)).astype(np.uint32)
            offset = (columns.keys & np.uint64((1 << KEY_BITS) - 1)).astype(np.int64)
            learnt[number] = ranges = ranges_of(source, offset)
            exact = np.repeat(entry.reshape(1), len(ranges.source))
            exact["source"], exact["first"], exact["last"] = ranges
            parts.append(exact)
        if learnt:
            self.learnt[name] = learnt
        return np.concatenate(parts)

    def _columns(self, number: int, each: Block, reader: _Reader) -> _Columns:
        columns = self._cache.get(number)
        if columns is None:
            self._reads += 1
            if self._reads % _PAUSE_EVERY == 0:
                self._pause()
            columns = reader.columns(each, self._number_of)
            self._cache.put(number, columns)
        return columns


class _Asked(NamedTuple):
    """Timers in columns."""

    source: npt.NDArray[np.uint32]
    offset: Numbers
    due_ms: Numbers
    since: Numbers

    def take(self, index: npt.NDArray[Any]) -> _Asked:
        return _Asked(*(column[index] for column in self))


class _Reader:
    """Reads blocks of one file; a context manager."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def columns(self, each: Block, number_of: Callable[[SourceId], int | None]) -> _Columns:
        """Raises CorruptFile."""
        try:
            if self._file is None:
                self._file = self._disk.open(self._path)
            data = self._file.pread(each.index_length, each.position)
            entry = record.decode(memoryview(data), 0, each.position)
            sources, rows = block.decode_rows(entry.body)
        except (ValueError, OSError) as error:
            raise CorruptFile(
                self._path, each.position, f"block index: {error}", block.REMEDY
            ) from error
        numbers = [number_of(source) for source in sources]
        known = np.array([ANY if n is None else n for n in numbers], dtype=np.uint32)
        keys = keys_of(known[rows["source"]], rows["offset"])
        return _Columns(np.ascontiguousarray(rows["due_ms"]), keys)


def candidates(entries: Entries, asked: _Asked) -> tuple[Numbers, Numbers]:
    """Pairs (timer, block) such that the timer may lie in the block."""
    timers: list[Numbers] = []
    blocks: list[Numbers] = []
    sources = entries["source"]
    for source in {*asked.source.tolist(), ANY}:
        mine = entries[sources == source]
        asking = np.arange(len(asked.source))
        if source != ANY:
            asking = np.flatnonzero(asked.source == source)
        for timer, entry in _overlaps(mine, asked.offset, asking):
            found = mine[entry]
            due_ms = asked.due_ms[timer]
            fits = (
                (found["first"] <= asked.offset[timer])
                & (asked.offset[timer] <= found["last"])
                & (found["due"] <= due_ms)
                & (due_ms <= found["until"])
                & (found["block"] >= asked.since[timer])
            )
            timers.append(timer[fits])
            blocks.append(found["block"][fits].astype(np.int64))
    if not timers:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(timers), np.concatenate(blocks)


def _overlaps(
    entries: Entries, offset: Numbers, asking: Numbers
) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (timer, entry), some at a time: all whose offsets fit, and some more.

    Ranges of offsets hardly overlap: sorted by their begin, those that an offset can lie in follow
    one another.
    """
    if not len(asking):
        return
    if len(entries) * len(asking) <= _PAIRS_MAX // 16:  # few: not worth sorting
        yield np.repeat(asking, len(entries)), np.tile(np.arange(len(entries)), len(asking))
        return
    order = np.argsort(entries["first"], kind="stable")
    begins, ends = entries["first"][order], np.maximum.accumulate(entries["last"][order])
    low = np.searchsorted(ends, offset[asking], side="left")
    high = np.searchsorted(begins, offset[asking], side="right")
    widths = np.maximum(high - low, 0)
    totals = np.cumsum(widths)
    start = 0
    while start < len(asking):
        before = int(totals[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(totals, before + _PAIRS_MAX, side="right")))
        width = widths[start:end]
        within = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
        yield np.repeat(asking[start:end], width), order[np.repeat(low[start:end], width) + within]
        start = end


def _rows_in(columns: _Columns, asked: _Asked) -> Numbers:
    """The row of each timer, or -1."""
    keys = keys_of(asked.source, asked.offset)
    first = np.searchsorted(columns.due_ms, asked.due_ms, side="left")
    last = np.searchsorted(columns.due_ms, asked.due_ms, side="right")
    rows = np.full(len(keys), -1, dtype=np.int64)
    widest = int((last - first).max())
    if widest <= _NARROW:
        for step in range(widest):
            at = np.minimum(first + step, len(columns.keys) - 1)
            hit = (first + step < last) & (columns.keys[at] == keys)
            rows[hit] = at[hit]
        return rows
    if len(keys) <= _NARROW:
        for number, key in enumerate(keys):
            hits = np.flatnonzero((columns.keys == key) & (columns.due_ms == asked.due_ms[number]))
            rows[number] = hits[0] if len(hits) else -1
        return rows
    order = np.argsort(columns.keys)
    at = np.searchsorted(columns.keys, keys, sorter=order)
    at = order[np.minimum(at, len(order) - 1)]
    hit = (columns.keys[at] == keys) & (columns.due_ms[at] == asked.due_ms)
    rows[hit] = at[hit]
    return rows
