"""Far timers on disk: blocks in due order, in one file a period of due times.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler, except `Flush.run` and
`Load.run` (loading.py), which only touch what they were given and the disk; they may run in any one
thread, one at a time.  No clock.

A flush sorts a memtable by due time and appends to each period's file a block of what falls into
the period.  The further away a timer is, the wider its period, so that a flush touches few files:

    due in less than   48 h    60 d    2 y     more
    period             1 h     1 d     30 d    360 d

A block is loaded from its front, as the near window moves over it; a file all of whose blocks
are loaded is deleted whole.  Bodies are never moved again: no merge, no cascade.  (Rejected: a
merged LSM tree; timers leave in due order anyway, and a merge would only rewrite bodies.)

Due timers that cannot be sent, because their topic or broker is gone, are parked when memory runs
short: flushed as blocks of one target, which wait outside of the due order until the target can be
sent to again.  So they hold up no other timer.

Files are not synced as they are written: the timer log still has the same timers.  A checkpoint
syncs them, notes their lengths, and only then lets go of the log.  After a crash everything past
the noted lengths is cut, and files that the checkpoint does not know are deleted.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq_server.storage import record
from duemq_server.storage.disk import Disk, write_all
from duemq_server.storage.errors import CorruptFile, DiskFull
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.catalog import UNKNOWN, Block, Catalog, Ranges, ranges_of
from duemq_server.timer_service.far.key_filter import KeyFilter
from duemq_server.timer_service.far.key_look_up import HandleAsk, KeyAsk, KeyLookUp
from duemq_server.timer_service.far.loading import Load, Windows
from duemq_server.timer_service.far.look_up import LookUp, Query
from duemq_server.timer_service.far.memtable import Piece
from duemq_server.timer_service.far.reading import read_index
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Hashes, Rows, concatenate

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
# (due in less than, period); the last one holds for everything beyond.
WIDTHS_MS = (
    (2 * DAY_MS, HOUR_MS),
    (60 * DAY_MS, DAY_MS),
    (730 * DAY_MS, 30 * DAY_MS),
)
WIDEST_MS = 360 * DAY_MS
SUFFIX = ".due"


class NumberTables(NamedTuple):
    """What the numbers in the columns `source` and `target` mean."""

    sources: Sequence[SourceId]
    targets: Sequence[TargetId]


def period_file(due_ms: int, now_ms: int) -> str:
    """Name of the file that a timer lies in: start of its period and width, in hours."""
    ahead = due_ms - now_ms
    width = next((width for below, width in WIDTHS_MS if ahead < below), WIDEST_MS)
    return f"{due_ms // width * width // HOUR_MS:010d}-{width // HOUR_MS:05d}{SUFFIX}"


def period_of(name: str) -> tuple[int, int]:
    """Begin and end of the due times in a period file."""
    start, width = map(int, name.removesuffix(SUFFIX).split("-"))
    return start * HOUR_MS, (start + width) * HOUR_MS


class FarSegments:
    """The far timers.  `directory` is a folder of their own."""

    def __init__(self, directory: str, disk: Disk) -> None:
        self.directory = directory
        self._disk = disk
        self.pending = 0  # rows not loaded, cancelled ones included
        self.lengths: dict[str, int] = {}  # of every file
        self.dirty: set[str] = set()  # written since the last sync
        self._blocks: list[tuple[int, int, Block]] = []  # heap by next due time
        self._parked: dict[TargetId, list[Block]] = {}
        self._number = itertools.count()
        self.catalog = Catalog()
        self._pinned: Counter[str] = Counter()
        self.key_filter = KeyFilter()
        self._windows = Windows()
        disk.makedirs(directory)

    def recover(self, lengths: dict[str, int], blocks: Iterable[Block]) -> None:
        """Takes over what a checkpoint noted; cuts and removes what is newer.

        Raises CorruptFile if a file is missing or shorter than noted.
        """
        for name in self._disk.listdir(self.directory):
            if name.endswith(SUFFIX) and name not in lengths:
                self._disk.unlink(self.path(name))
        for name, length in lengths.items():
            self._cut(name, length)
        self._disk.fsync_dir(self.directory)
        self.lengths = dict(lengths)
        for each in blocks:
            self._push(each)

    def path(self, name: str) -> str:
        """Where a period file lies."""
        return os.path.join(self.directory, name)

    def blocks(self) -> list[Block]:
        """Every block that is not loaded to its end, in no particular order."""
        parked = itertools.chain.from_iterable(self._parked.values())
        return [*(each for _, _, each in self._blocks), *parked]

    def parked(self) -> list[TargetId]:
        """Targets with parked timers."""
        return list(self._parked)

    def parked_counts(self) -> dict[TargetId, int]:
        """How many timers are parked, by target."""
        return {target: self.parked_for(target) for target in self._parked}

    def next_due_ms(self) -> int | None:
        """Due time of the first timer not loaded, parked ones apart."""
        return self._blocks[0][0] if self._blocks else None

    def overdue(self, now_ms: int) -> int:
        """Timers not loaded that are due; one of a block of which only a part is."""
        due = [each for each in self.blocks() if each.next_due_ms <= now_ms]
        return sum(each.count - each.cursor if each.last_due_ms <= now_ms else 1 for each in due)

    def flush(
        self,
        pieces: Sequence[Piece],
        tables: NumberTables,
        now_ms: int,
        parked: Sequence[TargetId] = (),
    ) -> Flush:
        """A job that writes a memtable out, or timers to be parked; `flushed` takes it over.

        `parked`: for which target, of each piece; those of one follow each other.
        """
        return Flush(self.directory, self._disk, pieces, tables, dict(self.lengths), now_ms, parked)

    def flushed(self, flush: Flush) -> None:
        """The job ran: its blocks are part of the far timers."""
        self.lengths.update(flush.lengths)
        self.dirty.update(flush.lengths)
        for each, ranges, hashes in zip(flush.blocks, flush.ranges, flush.hashes, strict=True):
            self._push(each, ranges, hashes)

    def load(self, horizon_ms: int, rows_max: int, bytes_max: int) -> Load:
        """A job that reads the timers due before `horizon_ms`, as many as fit, in due order."""
        chosen = [each for due, _, each in self._blocks if due < horizon_ms]
        return self._load(chosen, horizon_ms, rows_max, bytes_max)

    def parked_for(self, target: TargetId) -> int:
        """How many timers are parked for a target."""
        return sum(each.count - each.cursor for each in self._parked[target])

    def load_parked(self, targets: Iterable[TargetId], rows_max: int, bytes_max: int) -> Load:
        """As `load`, of the timers parked for these targets."""
        blocks = [each for target in targets for each in self._parked[target]]
        horizon_ms = max(each.last_due_ms for each in blocks) + 1
        return self._load(blocks, horizon_ms, rows_max, bytes_max)

    def _load(
        self, blocks: Sequence[Block], horizon_ms: int, rows_max: int, bytes_max: int
    ) -> Load:
        windows = self._windows
        return Load(self.directory, self._disk, blocks, horizon_ms, rows_max, bytes_max, windows)

    def loaded(self, load: Load) -> None:
        """The job ran: its blocks' cursors move."""
        for piece in load.pieces:
            self.pending -= piece.cursor - piece.block.cursor
            piece.block.cursor = piece.cursor
            piece.block.next_due_ms = piece.next_due_ms
            if piece.cursor == piece.block.count:
                self._windows.drop(piece.block)
                number = self.catalog.done(piece.block)
                if piece.block.keyed:
                    self.key_filter.remove(number)
        if load.pieces:
            left = [each for _, _, each in self._blocks if each.cursor < each.count]
            self._blocks = [(each.next_due_ms, next(self._number), each) for each in left]
            heapq.heapify(self._blocks)
            for target in {piece.block.parked for piece in load.pieces}:
                if target is not None:
                    blocks = self._parked.pop(target)
                    if blocks := [each for each in blocks if each.cursor < each.count]:
                        self._parked[target] = blocks

    def look_up(
        self, queries: Sequence[Query], number_of: Callable[[SourceId], int | None]
    ) -> LookUp:
        """A job that finds timers in blocks; `looked_up` takes it over."""
        return LookUp(self._disk, self.directory, self.catalog, number_of, queries)

    def looked_up(self, look_up: LookUp) -> None:
        """The job ran."""
        self.catalog.learn(look_up.learnt)

    @property
    def disk(self) -> Disk:
        """What the files lie on."""
        return self._disk

    def index_of(self, each: Block) -> block.Index:
        """The index of a block.  Raises CorruptFile."""
        return read_index(self._disk, self.path(each.file), each)

    def delete_done(self, needed: set[str]) -> None:
        """Deletes the files with nothing left to load, unless `needed`.

        Only after a checkpoint was saved that does not name them.
        """
        gone = set(self.lengths) - needed - self.unfinished() - self._pinned.keys()
        for name in gone:
            self._disk.unlink(self.path(name))
            del self.lengths[name]
            self.dirty.discard(name)

    @contextmanager
    def pinned(self, files: Collection[str]) -> Iterator[None]:
        """While somebody reads them, files stay even when all is loaded: a later save deletes."""
        self._pinned.update(files)
        try:
            yield
        finally:
            self._pinned.subtract(files)
            self._pinned = +self._pinned

    def unfinished(self) -> set[str]:
        """Files with timers that are not loaded."""
        return {each.file for each in self.blocks()}

    def key_look_up(
        self,
        asks: Sequence[KeyAsk],
        handles: Sequence[HandleAsk],
        number_of: Callable[[SourceId], int | None],
    ) -> KeyLookUp:
        """A job that finds timers in blocks, and reads them; `keys_looked_up` takes it over.

        Blocks whose keys are not known yet are learnt.
        """
        look_up = self.look_up([ask.query for ask in handles], number_of)
        known, where = self.key_filter, self.directory
        return KeyLookUp(self._disk, where, self.catalog, asks, handles, known, look_up)

    def keys_looked_up(self, look_up: KeyLookUp) -> None:
        """The job ran."""
        self.key_filter.learn(look_up.learnt)
        self.looked_up(look_up.look_up)

    def _push(self, each: Block, ranges: Ranges = UNKNOWN, hashes: Hashes | None = None) -> None:
        self.pending += each.count - each.cursor
        number = self.catalog.add(each, period_of(each.file), ranges)
        if each.keyed:
            self.key_filter.add(number, hashes)
        if each.parked is not None:
            self._parked.setdefault(each.parked, []).append(each)
        else:
            heapq.heappush(self._blocks, (each.next_due_ms, next(self._number), each))

    def _cut(self, name: str, length: int) -> None:
        path = self.path(name)
        if not self._disk.exists(path):
            raise CorruptFile(path, 0, "is missing", block.REMEDY)
        file = self._disk.open(path)
        try:
            if file.size() < length:
                raise CorruptFile(path, file.size(), f"ends before {length}", block.REMEDY)
            if file.size() > length:
                file.truncate(length)
                file.fdatasync()
        finally:
            file.close()


class Flush:
    """Sorts timers by due time and writes them as blocks."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        pieces: Sequence[Piece],
        tables: NumberTables,
        lengths: dict[str, int],
        now_ms: int,
        parked: Sequence[TargetId],
    ) -> None:
        self._parked = parked
        self._directory = directory
        self._disk = disk
        self.pieces = pieces
        self._tables = tables
        self._ends = lengths
        self._now_ms = now_ms
        self.blocks: list[Block] = []
        self.ranges: list[Ranges] = []  # of each block
        self.hashes: list[Hashes | None] = []  # of each block's timer keys
        self.lengths: dict[str, int] = {}  # of the files written to
        self._opened: set[str] = set()

    def run(self) -> None:
        """Does the work.  Raises DiskFull (nothing is lost, nothing is left), DiskFailed."""
        self.blocks, self.ranges, self.hashes, self.lengths = [], [], [], {}
        try:
            self._write_blocks()
        except DiskFull:
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        """No block knows of what was written, and the log may need the space.

        What cannot be cut now is overwritten by the next flush, at the same place.
        """
        for name in self._opened:
            end = self._ends.get(name, 0)
            with suppress(DiskFull):
                file = self._disk.open(os.path.join(self._directory, name))
                try:
                    if file.size() > end:
                        file.truncate(end)
                finally:
                    file.close()

    def _write_blocks(self) -> None:
        if not self._parked:
            self._write_pieces(self.pieces, None)
            return
        together = zip(self._parked, self.pieces, strict=True)
        for target, parked in itertools.groupby(together, key=lambda each: each[0]):
            self._write_pieces([piece for _, piece in parked], target)

    def _write_pieces(self, pieces: Sequence[Piece], parked: TargetId | None) -> None:
        rows = concatenate([rows for rows, _ in pieces])
        piece_of = np.repeat(np.arange(len(pieces)), [len(rows) for rows, _ in pieces])
        order = np.lexsort((rows.offset, rows.source, rows.due_ms))
        rows, piece_of = rows.take(order), piece_of.take(order)
        start = 0
        while start < len(rows):
            name = period_file(int(rows.due_ms[start]), self._now_ms)
            end = self._end_of_block(rows, start, name)
            records = self._records(pieces, rows, piece_of, start, end)
            self._write(name, rows.slice(start, end), records, parked)
            start = end

    def _end_of_block(self, rows: Rows, start: int, name: str) -> int:
        end = min(start + block.ROWS_MAX, len(rows))
        total = np.cumsum(rows.size[start:end], dtype=np.int64)
        end = start + max(1, int(np.searchsorted(total, block.BYTES_MAX, side="right")))
        low, high = start + 1, end  # the first row of another period, by bisection
        while low < high:
            middle = (low + high) // 2
            if period_file(int(rows.due_ms[middle]), self._now_ms) == name:
                low = middle + 1
            else:
                high = middle
        return low

    def _records(
        self,
        pieces: Sequence[Piece],
        rows: Rows,
        piece_of: npt.NDArray[Any],
        start: int,
        end: int,
    ) -> list[bytes | memoryview]:
        blobs = [blob for _, blob in pieces]
        records: list[bytes | memoryview] = []
        for piece, home, size in zip(
            piece_of[start:end].tolist(),
            rows.home[start:end].tolist(),
            rows.size[start:end].tolist(),
            strict=True,
        ):
            at = home - blobs[piece].start
            records.append(blobs[piece].data[at : at + size])
        return records

    def _write(
        self,
        name: str,
        rows: Rows,
        records: list[bytes | memoryview],
        parked: TargetId | None,
    ) -> None:
        index = block.encode_index(
            rows, block.crcs(records), list(self._tables.sources), list(self._tables.targets)
        )
        bodies = b"".join(records)
        position = self.lengths.get(name, self._ends.get(name, 0))
        middle = position + record.entry_bytes(len(index))
        buffers = record.encode(block.INDEX, [index], len(index), position, 0)
        buffers += record.encode(block.BODIES, [bodies], len(bodies), middle, 0)
        file = self._disk.open(os.path.join(self._directory, name), create=True)
        self._opened.add(name)
        try:
            end = write_all(file, buffers, position)
        finally:
            file.close()
        self.lengths[name] = end
        due = rows.due_ms
        hashes = None if rows.timer_key is None else rows.timer_key[rows.timer_key != 0]
        self.ranges.append(ranges_of(rows.source, rows.offset))
        self.hashes.append(hashes)
        self.blocks.append(
            Block(
                name,
                position,
                middle - position,
                len(rows),
                0,
                int(due[0]),
                int(due[-1]),
                parked,
                0 if hashes is None else len(hashes),
            )
        )
