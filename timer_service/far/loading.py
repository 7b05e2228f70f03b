"""Loading: timers come back from blocks, in due order over all of them.

Owned by: FarSegments.  `Load.run` only touches what it was given and the disk; it may run in any
one thread, one load at a time.  No clock.

Each flush leaves blocks of the same time, so that what is due next lies in hundreds of them, a few
rows in each.  A load is one merge: of each block the rows that are among the first due of all, and
no others.  So what waits for a load is due no sooner than what was loaded.

    block   due times             taken by a load of 6 rows
    A       1 4 7 9 9             1 4 7
    B       3 5 8                 3 5
    C       6 9                   6

An index is read and verified whole; the rows that the next loads will want are kept, copied, as a
window.  Windows are bounded by `WINDOWS_BYTES_MAX`, and are smaller where there are more blocks; of
those that are not kept the index is read anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.far import far_block as block
from duemq_server.timer_service.far.bodies import Files
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.reading import Packed, bodies_at, in_columns
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Blob, Hashes, Home, Rows

WINDOWS_BYTES_MAX = 32 << 20
WINDOW_BYTES = 512  # of a window, beside its rows
NAME_BYTES = 250  # of a source or target
WINDOW_ROWS = 256  # at least, where that many of all blocks are within the bound
LOADS_AHEAD = 4  # so many loads' rows lie in the windows of all blocks together, or more
PIECE_BYTES_MAX = 1 << 20  # bodies are let go piece by piece


Name = TypeVar("Name", SourceId, TargetId)


class Piecewise(NamedTuple):
    """Rows loaded from a block, in the block's own numbering of sources and targets."""

    block: Block
    cursor: int  # the block's, after this
    next_due_ms: int
    rows: Rows
    sources: list[SourceId]
    targets: list[TargetId]
    blob: Blob


class Window:
    """Rows of a block from `start` on, copied from its verified index.

    If there are more behind them, the last one only says when the next is due.
    """

    def __init__(self, each: Block, index: block.Index, start: int, rows: int) -> None:
        end = min(start + rows + 1, each.count)
        self.block = each
        self.start = start
        self.usable = min(rows, each.count - start)
        self.packed: Packed = index.rows[start:end].copy()
        hashes = index.timer_key
        self.hashes: Hashes | None = None if hashes is None else hashes[start:end].copy()
        self.body_at = bodies_at(each) + int(index.rows["size"][:start].sum(dtype=np.int64))
        self.sources = _used(index.sources, self.packed["source"])
        self.targets = _used(index.targets, self.packed["target"])

    @property
    def whole(self) -> bool:
        """Whether it reaches to the end of the block."""
        return self.start + self.usable == self.block.count

    @property
    def bytes(self) -> int:
        """What it takes in memory, about."""
        keys = 0 if self.hashes is None else self.hashes.nbytes
        names = NAME_BYTES * (len(self.sources) + len(self.targets))
        return self.packed.nbytes + keys + names + WINDOW_BYTES

    def due_ms(self) -> npt.NDArray[np.int64]:
        """Due times from the block's cursor on, of the rows that may be taken."""
        due: npt.NDArray[np.int64] = self.packed["due_ms"][self._first() : self.usable]
        return due

    def sizes(self) -> npt.NDArray[np.uint32]:
        """Bytes of the records of the same rows."""
        size: npt.NDArray[np.uint32] = self.packed["size"][self._first() : self.usable]
        return size

    def until_ms(self) -> int | None:
        """When the first row behind it is due; None: there is none."""
        return None if self.whole else int(self.packed["due_ms"][self.usable])

    def has_next(self) -> bool:
        """Whether the row at the block's cursor may be taken of it."""
        return 0 <= self._first() < self.usable

    def _first(self) -> int:
        return self.block.cursor - self.start


def _used(named: list[Name], numbers: npt.NDArray[np.uint16]) -> list[Name]:
    """Those that rows have; `numbers` are changed to their places among these."""
    used, places = np.unique(numbers, return_inverse=True)
    if len(used) == len(named):
        return named
    numbers[:] = places
    return [named[number] for number in used.tolist()]


class Windows:
    """The windows of blocks that are being loaded, the one used last at the end."""

    def __init__(self, bytes_max: int = WINDOWS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._windows: OrderedDict[tuple[str, int], Window] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._windows)

    def rows_ahead(self, blocks: int, rows_max: int) -> int:
        """Of each of so many blocks, beyond what a load of `rows_max` takes now; 1 at least."""
        share = min(LOADS_AHEAD * rows_max // max(1, blocks), block.ROWS_MAX)
        room = self._bytes_max // max(1, blocks) - WINDOW_BYTES
        return max(1, min(max(WINDOW_ROWS, share), room // block.ROW_BYTES))

    def get(self, each: Block) -> Window | None:
        """The window of a block."""
        window = self._windows.get((each.file, each.position))
        if window is None or window.block is not each:
            return None
        self._windows.move_to_end((each.file, each.position))
        return window

    def put(self, window: Window) -> None:
        """Keeps a window, in place of the block's last one; others give way."""
        self.drop(window.block)
        self._windows[window.block.file, window.block.position] = window
        self.bytes += window.bytes
        while self.bytes > self._bytes_max:
            _, oldest = self._windows.popitem(last=False)
            self.bytes -= oldest.bytes

    def drop(self, each: Block) -> None:
        """Forgets the window of a block."""
        window = self._windows.pop((each.file, each.position), None)
        if window is not None:
            self.bytes -= window.bytes


class Taken(NamedTuple):
    """Rows of a window that become one piece: from its row `first` on."""

    window: Window
    first: int
    end: int
    position: int  # of their bodies in the file
    size: int


class Load:
    """Reads timers from blocks, the first due first."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        blocks: Sequence[Block],
        horizon_ms: int,
        rows_max: int,
        bytes_max: int,
        windows: Windows,
    ) -> None:
        self._files = Files(disk, directory)
        self._blocks = sorted(blocks, key=lambda each: each.next_due_ms)
        self._horizon_ms = horizon_ms
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._windows = windows
        self._ahead = windows.rows_ahead(len(blocks), rows_max)
        self.pieces: list[Piecewise] = []

    def run(self) -> None:
        """Does the work.  Raises CorruptFile, DiskFailed."""
        self.pieces = []
        if self._rows_max <= 0 or self._bytes_max <= 0:
            return
        with self._files:
            taken = [piece for each in self._first_due() for piece in _pieces(*each)]
            if not taken:
                return
            packed = np.concatenate([each.window.packed[each.first : each.end] for each in taken])
            start = 0
            for each, rows in zip(taken, _columns(taken, packed), strict=True):
                end = start + len(rows)
                self.pieces.append(self._piece(each, rows, packed["crc32c"][start:end]))
                start = end

    def _first_due(self) -> list[tuple[Window, int]]:
        """Which blocks have rows among the first due, and how many."""
        windows, limit_ms = self._gather()
        due = [window.due_ms() for window in windows]
        due = [each[: np.searchsorted(each, limit_ms)] for each in due]
        if not due:
            return []
        # Stable: of one block the first rows, of equal due times those of the older flush.
        order = np.argsort(np.concatenate(due), kind="stable")[: self._rows_max]
        sizes = [each.sizes()[: len(of)] for each, of in zip(windows, due, strict=True)]
        total = np.cumsum(np.concatenate(sizes)[order], dtype=np.int64)
        fits = max(1, int(np.searchsorted(total, self._bytes_max, side="right")))
        block_of = np.repeat(np.arange(len(due)), [len(each) for each in due])
        counts = np.bincount(block_of[order[:fits]], minlength=len(due)).tolist()
        return [each for each in zip(windows, counts, strict=True) if each[1]]

    def _gather(self) -> tuple[list[Window], int]:
        """Windows of all blocks that may have one of the first rows, and before when these are due.

        All rows that are due before that are in the windows.
        """
        windows: list[Window] = []
        due: list[npt.NDArray[np.int64]] = []
        limit_ms, rows, judged_at = self._horizon_ms, 0, self._rows_max
        for each in self._blocks:
            if each.next_due_ms >= limit_ms:
                break
            window = self._window(each)
            if window is not None:
                windows.append(window)
                due.append(window.due_ms())
                rows += len(due[-1])
            if rows >= judged_at:  # enough: what is due later than all of this is not wanted
                limit_ms = min(limit_ms, self._last_wanted_ms(due) + 1)
                judged_at = 2 * rows
        if rows >= self._rows_max:
            limit_ms = min(limit_ms, self._last_wanted_ms(due) + 1)
        wide = (self._window(each.block, limit_ms) for each in windows)
        return [each for each in wide if each is not None], limit_ms

    def _last_wanted_ms(self, due: list[npt.NDArray[np.int64]]) -> int:
        last = self._rows_max - 1
        return int(np.partition(np.concatenate(due), last)[last])

    def _window(self, each: Block, until_ms: int = 0) -> Window | None:
        """Rows of a block from its cursor on, all that are due before `until_ms` among them.

        None: nothing can be read.
        """
        window = self._windows.get(each)
        if window is not None and window.has_next():
            end_ms = window.until_ms()
            if end_ms is None or end_ms >= until_ms:
                return window
        index = self._files.index_of(each)
        wanted = int(np.searchsorted(index.rows["due_ms"], until_ms)) - each.cursor
        window = Window(each, index, each.cursor, max(wanted, 0) + self._ahead)
        self._windows.put(window)
        return window

    def _piece(self, taken: Taken, rows: Rows, crcs: npt.NDArray[np.uint32]) -> Piecewise:
        each = taken.window.block
        data = self._read(taken)
        places = zip(rows.home.tolist(), rows.size.tolist(), crcs.tolist(), strict=True)
        for at, size, crc in places:
            if google_crc32c.value(data[at : at + size]) != crc:
                path, position = self._files.path(each.file), taken.position + at
                raise CorruptFile(path, position, "CRC-32C of a record is wrong", block.REMEDY)
        return cut_piece(taken, rows, data)

    def _read(self, taken: Taken) -> bytes:
        """The bodies.  Raises CorruptFile if they are not all there."""
        name = taken.window.block.file
        data = self._files.read(name, taken.position, taken.size)
        if len(data) < taken.size:
            path, at = self._files.path(name), taken.position + len(data)
            raise CorruptFile(path, at, "ends too early", block.REMEDY)
        return data


def cut_piece(taken: Taken, rows: Rows, data: bytes) -> Piecewise:
    """Rows that were taken, whose bodies are `data`."""
    window, each = taken.window, taken.window.block
    more = taken.end < len(window.packed)
    due_ms = int(window.packed["due_ms"][taken.end]) if more else each.last_due_ms
    blob = Blob(data, Home(each.file, taken.position))
    cursor = window.start + taken.end
    return Piecewise(each, cursor, due_ms, rows, window.sources, window.targets, blob)


def _pieces(window: Window, count: int) -> Iterator[Taken]:
    """The next `count` rows of a block, in pieces of `PIECE_BYTES_MAX`, or of one larger row."""
    first = window.block.cursor - window.start
    end = first + count
    starts = block.body_starts(window.packed[:end])
    while first < end:
        fits = int(np.searchsorted(starts, starts[first] + PIECE_BYTES_MAX, side="right")) - 1
        last = min(max(fits, first + 1), end)
        begin = int(starts[first])
        yield Taken(window, first, last, window.body_at + begin, int(starts[last]) - begin)
        first = last


def _columns(taken: Sequence[Taken], packed: Packed) -> Iterator[Rows]:
    """The rows of each piece, with homes relative to its first body."""
    hashes = None
    if any(each.window.hashes is not None for each in taken):
        hashes = np.concatenate([_hashes(each) for each in taken])
    rows = in_columns(packed, hashes)
    ends = np.cumsum([each.end - each.first for each in taken]).tolist()
    firsts = [0, *ends[:-1]]
    counts = [end - first for first, end in zip(firsts, ends, strict=True)]
    rows.narrow[2] -= np.repeat(rows.home[firsts], counts)
    return (
        _without_keys(rows.slice(first, end), each)
        for first, end, each in zip(firsts, ends, taken, strict=True)
    )


def _hashes(each: Taken) -> Hashes:
    if each.window.hashes is None:
        return np.zeros(each.end - each.first, dtype=np.uint64)
    return each.window.hashes[each.first : each.end].astype(np.uint64)


def _without_keys(rows: Rows, each: Taken) -> Rows:
    """Rows of a block without keys have no such column."""
    return rows if each.window.hashes is not None else Rows(rows.wide, rows.narrow)
