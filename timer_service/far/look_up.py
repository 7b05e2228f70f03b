"""Looking far timers up on disk, many at once, in a thread of its own.

`LookUp.run` reads what it was given when it was made, and block indexes from disk; it changes
nothing but its results.  They may be out of date when it is done: what is loaded or flushed
meanwhile is the caller's business (cancelling.py).

A block costs some 15 us to read and to verify, however many timers are looked for in it, and each
timer 6 us more: rows are sorted, so that a dozen are looked at.  Few of ten million random timers
share a block, so nothing is kept; the page cache has what is read again.
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
from duemq_server.timer_service.far.catalog import ANY, Block, Catalog, Entries, Ranges, ranges_of
from duemq_server.timer_service.timers.log_entries import SourceId
from duemq_server.timer_service.timers.rows import runs

Numbers = npt.NDArray[np.int64]

_PAIRS_MAX = 1 << 20  # compared at once
_PAUSE_EVERY = 16  # blocks read: less than half a millisecond of work


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
        ends = np.cumsum([len(query) for query in queries]).tolist()
        order = np.argsort(asked.due_ms, kind="stable")
        dues = asked.due_ms[order]
        view = self._view
        first = np.searchsorted(dues, view.begin_ms, side="left")
        last = np.searchsorted(dues, view.end_ms, side="left")
        for number in np.flatnonzero(first < last).tolist():
            mine = order[first[number] : last[number]]
            found = self._in_file(view.names[number], view.entries[number], asked.take(mine))
            for timer, place in found:
                at = int(mine[timer])
                which = bisect.bisect_right(ends, at)
                query = queries[which]
                query.places.setdefault(at - ends[which] + len(query), []).append(place)

    def _in_file(self, name: str, entries: Entries, asked: _Asked) -> Iterator[tuple[int, Place]]:
        with _Reader(self._disk, os.path.join(self._directory, name)) as reader:
            entries = self._known(name, entries, asked, reader)
            timers, numbers = candidates(entries, asked)
            order = np.argsort(numbers, kind="stable")
            timers, numbers = timers[order], numbers[order]
            source, offset = asked.source[timers].tolist(), asked.offset[timers].tolist()
            wanted = list(zip(asked.due_ms[timers].tolist(), source, offset, strict=True))
            for start, end in runs(numbers):
                each = self._block(int(numbers[start]))
                if each is None:
                    continue
                try:
                    index = self._read(each, reader)
                except CorruptFile as error:
                    for timer in timers[start:end].tolist():
                        yield timer, Place(each, 0, error)
                    continue
                for timer, identity in zip(
                    timers[start:end].tolist(), wanted[start:end], strict=True
                ):
                    row = index.row_of(*identity)
                    if row is not None:
                        yield timer, Place(each, row)

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
                learnt[number] = ranges = self._read(each, reader).ranges()
            except CorruptFile:
                parts.append(entry.reshape(1))  # a candidate for every timer, see `candidates`
                continue
            exact = np.repeat(entry.reshape(1), len(ranges.source))
            exact["source"], exact["first"], exact["last"] = ranges
            parts.append(exact)
        if learnt:
            self.learnt[name] = learnt
        return np.concatenate(parts)

    def _read(self, each: Block, reader: _Reader) -> _Index:
        self._reads += 1
        if self._reads % _PAUSE_EVERY == 0:
            self._pause()
        return reader.index(each, self._number_of)


class _Asked(NamedTuple):
    """Timers in columns."""

    source: npt.NDArray[np.uint32]
    offset: Numbers
    due_ms: Numbers
    since: Numbers

    def take(self, index: Any) -> _Asked:
        return _Asked(*(column[index] for column in self))

    def upright(self) -> _Asked:
        """Each to be paired with every entry of a row."""
        return self.take((slice(None), None))


class _Index:
    """A block's rows, and what its numbers of sources mean."""

    def __init__(self, body: memoryview, number_of: Callable[[SourceId], int | None]) -> None:
        """Raises ValueError if the lengths do not add up."""
        sources, self._rows = block.decode_rows(body)
        numbers = [number_of(source) for source in sources]
        self._sources = [ANY if number is None else number for number in numbers]
        self._body = body
        self._start = len(body) - len(self._rows) * block.ROW_BYTES

    def row_of(self, due_ms: int, source: int, offset: int) -> int | None:
        """The row of a timer."""
        if source not in self._sources:
            return None
        wanted = (due_ms, self._sources.index(source), offset)
        row = bisect.bisect_left(range(len(self._rows)), wanted, key=self._place)
        return row if row < len(self._rows) and self._place(row) == wanted else None

    def _place(self, row: int) -> tuple[int, int, int]:
        """What rows are sorted by."""
        at = self._start + row * block.ROW_BYTES
        due_ms, offset, source = block.IDENTITY.unpack_from(self._body, at)
        return due_ms, source, offset

    def ranges(self) -> Ranges:
        numbers = np.array(self._sources, dtype=np.uint32)
        return ranges_of(numbers[self._rows["source"]], self._rows["offset"])


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

    def index(self, each: Block, number_of: Callable[[SourceId], int | None]) -> _Index:
        """Raises CorruptFile."""
        try:
            if self._file is None:
                self._file = self._disk.open(self._path)
            data = self._file.pread(each.index_length, each.position)
            return _Index(record.decode(data, 0, each.position).body, number_of)
        except (ValueError, OSError) as error:
            raise CorruptFile(
                self._path, each.position, f"block index: {error}", block.REMEDY
            ) from error


def candidates(entries: Entries, asked: _Asked) -> tuple[Numbers, Numbers]:
    """Pairs (timer, block) such that the timer may lie in the block."""
    if len(entries) * len(asked.offset) <= _PAIRS_MAX // 16:  # few: not worth sorting
        timers, at = np.nonzero(_fits(entries, asked.upright()))
        return timers, entries["block"][at].astype(np.int64)
    found_timers: list[Numbers] = [np.empty(0, dtype=np.int64)]
    found_blocks: list[Numbers] = [np.empty(0, dtype=np.int64)]
    for source in {*asked.source.tolist(), ANY}:
        mine = entries[entries["source"] == source]
        asking = np.arange(len(asked.source))
        if source != ANY:
            asking = np.flatnonzero(asked.source == source)
        for timers, at in _overlaps(mine, asked.offset, asking):
            found = mine[at]
            fits = _fits(found, asked.take(timers))
            found_timers.append(timers[fits])
            found_blocks.append(found["block"][fits].astype(np.int64))
    return np.concatenate(found_timers), np.concatenate(found_blocks)


def _fits(entries: Entries, asked: _Asked) -> npt.NDArray[np.bool_]:
    """Whether a timer may lie in a block; NumPy pairs them."""
    return np.asarray(
        ((entries["source"] == asked.source) | (entries["source"] == ANY))
        & (entries["first"] <= asked.offset)
        & (asked.offset <= entries["last"])
        & (entries["due"] <= asked.due_ms)
        & (asked.due_ms <= entries["until"])
        & (entries["block"] >= asked.since)
    )


def _overlaps(
    entries: Entries, offset: Numbers, asking: Numbers
) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (timer, entry), some at a time: all whose offsets fit, and some more.

    Ranges of offsets hardly overlap: sorted by their begin, those that an offset can lie in follow
    one another.
    """
    if not len(asking) or not len(entries):
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
