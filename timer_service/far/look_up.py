"""Looking far timers up on disk, many at once, in a thread of its own.

`LookUp.run` reads what it was given when it was made, and block indexes from disk; it changes
nothing but its results.  They may be out of date when it is done: what is loaded or flushed
meanwhile is the caller's business (cancelling.py).

A block costs some 10 us to read and to verify, most of it the read, and each timer a few more:
rows are sorted, so that its due time is bisected.  Each look-up also costs 5 ms if it needs every
file of ten million timers; so it pays to look up many at once.  Few of ten million random timers
share a block, so no block is kept; the page cache has what is read again.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.catalog import (
    ANY,
    Block,
    Catalog,
    Entries,
    Ranges,
    Table,
    ranges_of,
)
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import keys_of, runs

Numbers = npt.NDArray[np.int64]

_PAIRS_MAX = 1 << 20  # compared at once
_PAUSE_EVERY = 64  # blocks read: less than a millisecond of work; a pause costs 0.2 ms and more


class Place(NamedTuple):
    """Where a timer lies: in this row, or, if there is an error, perhaps in this block."""

    block: Block
    row: int
    error: CorruptFile | None = None
    target: TargetId | None = None
    """Of the timer in this row."""


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


class LookUp:
    """Finds the timers of several queries; each block is read once."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        catalog: Catalog,
        number_of: Callable[[SourceId], int | None],
        queries: Sequence[Query],
    ) -> None:
        self._disk = disk
        self._directory = directory
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
        homes = [(query.places, at) for query in queries for at in range(len(query))]
        order = np.argsort(asked.due_ms, kind="stable")
        dues = asked.due_ms[order]
        view = self._view
        first = np.searchsorted(dues, view.begin_ms, side="left")
        last = np.searchsorted(dues, view.end_ms, side="left")
        for number in np.flatnonzero(first < last).tolist():
            mine = order[first[number] : last[number]]
            found = self._in_file(view.names[number], view.tables[number], asked.take(mine))
            whose = mine.tolist()
            for timer, place in found:
                places, at = homes[whose[timer]]
                places.setdefault(at, []).append(place)

    def _in_file(self, name: str, table: Table, asked: _Asked) -> Iterator[tuple[int, Place]]:
        with _Reader(self._disk, os.path.join(self._directory, name), self._number_of) as reader:
            table = self._known(name, table, asked, reader)
            timers, numbers = candidates(table, asked)
            order = np.argsort(numbers, kind="stable")
            timers, numbers = timers[order], numbers[order]
            source, offset = asked.source[timers].tolist(), asked.offset[timers].tolist()
            wanted = list(zip(asked.due_ms[timers].tolist(), source, offset, strict=True))
            whose = timers.tolist()
            for start, end in runs(numbers):
                each = self._block(int(numbers[start]))
                if each is None:
                    continue
                try:
                    index = self._read(each, reader)
                except CorruptFile as error:
                    for timer in whose[start:end]:
                        yield timer, Place(each, 0, error)
                    continue
                for at in range(start, end):
                    row = index.row_of(*wanted[at])
                    if row is not None:
                        yield whose[at], Place(each, row, target=reader.target_of(index, row))

    def _known(self, name: str, table: Table, asked: _Asked, reader: _Reader) -> Table:
        """The entries of the file; those that were unknown and are needed are learnt."""
        unknown = table.unknown
        if not len(unknown):
            return table
        entries, dues = table.entries, np.sort(asked.due_ms)
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
                learnt[number] = ranges = self._read(each, reader).ranges()
            except CorruptFile:
                parts.append(entry.reshape(1))  # a candidate for every timer, see `candidates`
                continue
            exact = np.repeat(entry.reshape(1), len(ranges.source))
            exact["source"], exact["first"], exact["last"] = ranges
            parts.append(exact)
        if learnt:
            self.learnt[name] = learnt
        return Table(np.concatenate(parts))

    def _read(self, each: Block, reader: _Reader) -> _Index:
        self._reads += 1
        if self._reads % _PAUSE_EVERY == 0:
            self._pause()
        return reader.index(each)


class _Asked(NamedTuple):
    """Timers in columns."""

    source: npt.NDArray[np.uint32]
    offset: Numbers
    due_ms: Numbers
    since: Numbers

    def take(self, index: Any) -> _Asked:
        return _Asked(*(column[index] for column in self))


class _Index:
    """A block's rows, and what its numbers of sources mean."""

    def __init__(self, body: memoryview, sources: Sequence[int], rows: block.RowsAt) -> None:
        self.body = body
        self.rows = rows
        self._sources = sources
        self._count, self._start = rows
        self._due_ms = block.due_column(body, rows)

    def row_of(self, due_ms: int, source: int, offset: int) -> int | None:
        """The row of a timer."""
        if source not in self._sources:
            return None
        wanted = (due_ms, self._sources.index(source), offset)
        row = int(self._due_ms.searchsorted(due_ms))
        if row == self._count:
            return None
        found = self._place(row)
        if found < wanted and found[0] == due_ms:  # others are due in the same millisecond
            end = int(self._due_ms.searchsorted(due_ms, side="right"))
            row = bisect.bisect_left(range(end), wanted, row, end, key=self._place)
            if row == end:
                return None
            found = self._place(row)
        return row if found == wanted else None

    def _place(self, row: int) -> tuple[int, int, int]:
        """What rows are sorted by."""
        at = self._start + row * block.ROW_BYTES
        due_ms, offset, source = block.IDENTITY.unpack_from(self.body, at)
        return due_ms, source, offset

    def ranges(self) -> Ranges:
        numbers = np.array(self._sources, dtype=np.uint32)
        _, rows = block.decode_rows(self.body)
        return ranges_of(numbers[rows["source"]], rows["offset"])


class _Reader:
    """Reads blocks of one file; a context manager."""

    def __init__(self, disk: Disk, path: str, number_of: Callable[[SourceId], int | None]) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None
        self._number_of = number_of
        self._sources: dict[bytes, list[int]] = {}  # blocks of a file mostly have the same ones
        self._targets: dict[bytes, list[TargetId]] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def index(self, each: Block) -> _Index:
        """Raises CorruptFile."""
        try:
            if self._file is None:
                self._file = self._disk.open(self._path)
            data = self._file.pread(each.index_length, each.position)
            body = record.decode(data, 0, each.position).body
            rows = block.rows_at(body)
        except (ValueError, OSError) as error:
            raise CorruptFile(
                self._path, each.position, f"block index: {error}", block.REMEDY
            ) from error
        table = block.source_table(body)
        sources = self._sources.get(table)
        if sources is None:
            sources = self._sources[table] = self._numbers(table)
        return _Index(body, sources, rows)

    def target_of(self, index: _Index, row: int) -> TargetId:
        """The target of a row."""
        table = block.target_table(index.body)
        targets = self._targets.get(table)
        if targets is None:
            count = block.targets_in(index.body)
            targets = self._targets[table] = block.decode_targets(table, count)
        return targets[block.target_of(index.body, index.rows, row)]

    def _numbers(self, table: bytes) -> list[int]:
        numbers = [self._number_of(source) for source in block.decode_sources(table)]
        return [ANY if number is None else number for number in numbers]


def candidates(table: Table, asked: _Asked) -> tuple[Numbers, Numbers]:
    """Pairs (timer, block) such that the timer may lie in the block."""
    found_timers: list[Numbers] = []
    found_blocks: list[Numbers] = []
    for timers, at in _overlaps(table, asked):
        found = table.entries[at]
        fits = _fits(found, asked.take(timers))
        found_timers.append(timers[fits])
        found_blocks.append(found["block"][fits].astype(np.int64))
    return np.concatenate(found_timers), np.concatenate(found_blocks)


def _fits(entries: Entries, asked: _Asked) -> npt.NDArray[np.bool_]:
    """Whether each timer may lie in the block beside it."""
    return np.asarray(
        ((entries["source"] == asked.source) | (entries["source"] == ANY))
        & (entries["first"] <= asked.offset)
        & (asked.offset <= entries["last"])
        & (entries["due"] <= asked.due_ms)
        & (asked.due_ms <= entries["until"])
        & (entries["block"] >= asked.since)
    )


def _overlaps(table: Table, asked: _Asked) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (timer, entry), some at a time: all whose source and offset fit, and some more.

    Ranges of offsets hardly overlap: sorted by their begin, those that an offset can lie in follow
    one another.
    """
    order, keys = table.order, keys_of(asked.source, asked.offset)
    low = np.searchsorted(order.ends, keys, side="left")
    high = np.searchsorted(order.begins, keys, side="right")
    for timers, within in _pairs(np.maximum(high - low, 0)):
        yield timers, order.at[low[timers] + within]
    unknown = table.unknown
    if len(unknown):
        for timers, within in _pairs(np.full(len(keys), len(unknown))):
            yield timers, unknown[within]


def _pairs(widths: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Each place with 0, 1, ... up to its width, some at a time."""
    totals = np.cumsum(widths)
    start = 0
    while start < len(widths):
        before = int(totals[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(totals, before + _PAIRS_MAX, side="right")))
        width = widths[start:end]
        within = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
        yield np.repeat(np.arange(start, end), width), within
        start = end
