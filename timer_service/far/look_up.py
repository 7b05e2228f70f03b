"""Looking far timers up on disk, many at once, in a thread of its own.

`LookUp.run` reads what it was given when it was made, and block indexes from disk; it changes
nothing but its results.  They may be out of date when it is done: what is loaded or flushed
meanwhile is the caller's business (cancelling.py).

A block costs some 10 us to read and to verify, two thirds of it in the kernel and in the CRC, and
each timer 2 more: rows are sorted, so that its due time is bisected.  Each look-up also costs 5 ms
if it needs every file of ten million timers; so it pays to look up many at once.  Few of ten
million random timers share a block, so no block is kept; the page cache has what is read again.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk, DiskFile
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.candidates import AskedTimers, candidates
from duemq_server.timer_service.far.catalog import ANY, Block, Catalog, Ranges, Table, ranges_of
from duemq_server.timer_service.timers.keys import NOWHERE
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId

Numbers = npt.NDArray[np.int64]

_PAUSE_EVERY = 64  # blocks read: less than a millisecond of work; a pause costs 0.2 ms and more


class BlockRow(NamedTuple):
    """Where a timer lies: in this row, or, if there is an error, perhaps in this block."""

    block: Block
    row: int
    error: CorruptFile | None = None


class FoundTimers(NamedTuple):
    """Where timers lie, in columns."""

    block: Numbers
    """Number of the block, NOWHERE: in none.  If it was found in several, the youngest: it was
    loaded from the others before that one was written."""
    row: Numbers
    target: Numbers
    """Place in `Query.targets`."""


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
        self.found = _nothing(0)
        self.blocks: Mapping[int, Block] = {}
        """Those that were read, by number."""
        self.targets: Sequence[TargetId] = ()
        self.errors: dict[int, list[BlockRow]] = {}
        """Blocks that could not be read, by timer."""

    def __len__(self) -> int:
        return len(self.offset)

    def places(self) -> Iterator[tuple[int, BlockRow]]:
        """Which timers were found, and where."""
        for at in np.flatnonzero(self.found.block != NOWHERE).tolist():
            number, row = int(self.found.block[at]), int(self.found.row[at])
            yield at, BlockRow(self.blocks[number], row)


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
        self._tables = _Tables(number_of)
        self._queries = queries
        self._hits: list[int] = []  # timer, block, row, target; and so on
        self._blocks: dict[int, Block] = {}
        self._errors: list[tuple[int, BlockRow]] = []
        self._reads = 0
        self._pause: Callable[[], None] = lambda: None
        self.learnt: dict[str, dict[int, Ranges]] = {}
        for query in queries:
            query.until = catalog.added

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Does the work.  What cannot be read is among the results.  Raises DiskFull.

        `pause` is called every now and then: to let another thread have the interpreter.
        """
        self._pause = pause
        queries = self._queries
        asked = AskedTimers(
            np.concatenate([query.source for query in queries]),
            np.concatenate([query.offset for query in queries]),
            np.concatenate([query.due_ms for query in queries]),
            np.concatenate([query.since for query in queries]),
        )
        order = np.argsort(asked.due_ms, kind="stable")
        asked = asked.take(order)
        view = self._view
        first = np.searchsorted(asked.due_ms, view.begin_ms, side="left")
        last = np.searchsorted(asked.due_ms, view.end_ms, side="left")
        for number in np.flatnonzero(first < last).tolist():
            start, end = int(first[number]), int(last[number])
            mine = asked.take(slice(start, end))
            self._in_file(view.names[number], view.tables[number], mine, start)
        self._answer(order)

    def _in_file(self, name: str, table: Table, asked: AskedTimers, start: int) -> None:
        """`asked` are those from `start` on of all, in due order."""
        with _Reader(self._disk, os.path.join(self._directory, name)) as reader:
            table = self._known(name, table, asked, reader)
            timers, numbers = candidates(table, asked)
            due_ms, source = asked.due_ms.tolist(), asked.source.tolist()
            offset, hit = asked.offset.tolist(), self._hits.extend
            last, rows = NOWHERE, None
            for number, timer in zip(numbers, timers, strict=True):
                if number != last:
                    last, rows = number, self._rows_of(number, reader)
                if isinstance(rows, _Rows):
                    found = rows.find(due_ms[timer], source[timer], offset[timer])
                    if found is not None:
                        hit((start + timer, number, *found))
                elif rows is not None:
                    self._errors.append((start + timer, rows))

    def _rows_of(self, number: int, reader: _Reader) -> _Rows | BlockRow | None:
        """Rows of a block, or why they are not known; None: all of it was loaded."""
        each = self._block(number)
        if each is None:
            return None
        self._blocks[number] = each
        try:
            return self._rows(each, reader)
        except CorruptFile as error:
            return BlockRow(each, 0, error)

    def _known(self, name: str, table: Table, asked: AskedTimers, reader: _Reader) -> Table:
        """The entries of the file; those that were unknown and are needed are learnt."""
        unknown = table.unknown
        if not len(unknown):
            return table
        entries, dues = table.entries, asked.due_ms
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
                learnt[number] = ranges = self._rows(each, reader).ranges()
            except CorruptFile:
                parts.append(entry.reshape(1))  # a candidate for every timer, see `candidates`
                continue
            exact = np.repeat(entry.reshape(1), len(ranges.source))
            exact["source"], exact["first"], exact["last"] = ranges
            parts.append(exact)
        if learnt:
            self.learnt[name] = learnt
        return Table(np.concatenate(parts))

    def _rows(self, each: Block, reader: _Reader) -> _Rows:
        self._reads += 1
        if self._reads % _PAUSE_EVERY == 0:
            self._pause()
        body, at = reader.index(each)
        return _Rows(body, at, self._tables.meaning(block.tables_in(body, at)))

    def _answer(self, order: Numbers) -> None:
        """Tells each query its part; `order`: whose the sorted timers are."""
        found = _found(np.array(self._hits, dtype=np.int64).reshape(-1, 4), order)
        errors = [(int(order[timer]), place) for timer, place in self._errors]
        end = 0
        for query in self._queries:
            start, end = end, end + len(query)
            query.found = FoundTimers(*(column[start:end] for column in found))
            query.blocks, query.targets = self._blocks, self._tables.targets
            query.errors = {}
            for timer, place in errors:
                if start <= timer < end:
                    query.errors.setdefault(timer - start, []).append(place)


def _nothing(count: int) -> FoundTimers:
    none = np.full(count, NOWHERE, dtype=np.int64)
    return FoundTimers(none, none.copy(), none.copy())


def _found(hits: Numbers, order: Numbers) -> FoundTimers:
    """`hits`: a row each; `order`: whose the sorted timers are."""
    found = _nothing(len(order))
    hits = hits[np.argsort(hits[:, 1], kind="stable")]  # the youngest block's stays
    whose = order[hits[:, 0]]
    for column, hit in zip(found, hits[:, 1:].T, strict=True):
        column[whose] = hit
    return found


class _Meaning(NamedTuple):
    """What the numbers of a block's rows mean."""

    sources: list[int]
    """The shard's number of each source; ANY: it has none."""
    places: dict[int, int]
    """The other way round."""
    targets: list[int]
    """Place of each target in `_Tables.targets`."""


class _Tables:
    """What tables of blocks mean; most blocks have the same ones."""

    def __init__(self, number_of: Callable[[SourceId], int | None]) -> None:
        self.targets: list[TargetId] = []
        self._number_of = number_of
        self._places: dict[TargetId, int] = {}
        self._meanings: dict[block.Tables, _Meaning] = {}

    def meaning(self, tables: block.Tables) -> _Meaning:
        """Of a block that has these."""
        found = self._meanings.get(tables)
        if found is None:
            numbers = [self._number_of(source) for source in tables.sources()]
            sources = [ANY if number is None else number for number in numbers]
            places = {number: at for at, number in enumerate(sources)}
            targets = [self._place(target) for target in tables.targets()]
            found = self._meanings[tables] = _Meaning(sources, places, targets)
        return found

    def _place(self, target: TargetId) -> int:
        place = self._places.setdefault(target, len(self.targets))
        if place == len(self.targets):
            self.targets.append(target)
        return place


class _Rows:
    """A block's rows."""

    __slots__ = ("_at", "_body", "_due_ms", "_meaning")

    def __init__(self, body: memoryview, at: block.RowsAt, meaning: _Meaning) -> None:
        self._body = body
        self._at = at
        self._meaning = meaning
        self._due_ms = block.due_column(body, at)

    def find(self, due_ms: int, source: int, offset: int) -> tuple[int, int] | None:
        """Row and target of a timer."""
        place = self._meaning.places.get(source)
        if place is None:
            return None
        count, start = self._at
        row = int(self._due_ms.searchsorted(due_ms))
        if row == count:
            return None
        found = block.IDENTITY.unpack_from(self._body, start + row * block.ROW_BYTES)
        if found[0] != due_ms:
            return None
        if found[1] != offset or found[2] != place:  # others are due in the same millisecond
            end = int(self._due_ms.searchsorted(due_ms, side="right"))
            row = bisect.bisect_left(range(end), (place, offset), row, end, key=self._order)
            if row == end or self._order(row) != (place, offset):
                return None
            found = block.IDENTITY.unpack_from(self._body, start + row * block.ROW_BYTES)
        return row, self._meaning.targets[found[3]]

    def _order(self, row: int) -> tuple[int, int]:
        """What the rows of one millisecond are sorted by."""
        at = self._at.start + row * block.ROW_BYTES
        _, offset, source, _ = block.IDENTITY.unpack_from(self._body, at)
        return source, offset

    def ranges(self) -> Ranges:
        numbers = np.array(self._meaning.sources, dtype=np.uint32)
        rows = block.decode_rows(self._body, self._at)
        return ranges_of(numbers[rows["source"]], rows["offset"])


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

    def index(self, each: Block) -> tuple[memoryview, block.RowsAt]:
        """The verified body of a block's index.  Raises CorruptFile, DiskFull."""
        try:
            if self._file is None:
                self._file = self._disk.open(self._path)
            data = self._file.pread(each.index_length, each.position)
            body = record.decode(data, 0, each.position).body
            return body, block.rows_at(body)
        except (ValueError, OSError) as error:
            raise CorruptFile(
                self._path, each.position, f"block index: {error}", block.REMEDY
            ) from error
