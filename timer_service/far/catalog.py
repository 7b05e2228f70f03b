"""Which blocks may hold a timer: what is known in memory of blocks on disk.

Owned by: FarSegments.  Mutated by: the thread that owns the scheduler; a look-up in another thread
(look_up.py) reads a `view`.  No clock, no I/O.

A cancel knows its timer's due time, source and offset.  The period files that the due time can lie
in are few, but each flush may have added a block to each.  Timers of one flush came about the same
time, so that their offsets lie close together: due times and offsets between which a block's timers
lie leave one block to be read, or two.  40 bytes a block and source:

    block  u32   its number here
    source u32   number of the source; ANY: not known, the block was written before this start
    first, last  offsets
    due, until   due times

and 20 more once a look-up needed the file: the order of its entries.

What is not known is learnt by the first look-up that has to read the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.protocol.limits import OFFSET_MAX
from duemq_server.timer_service.timers.log_entries import TargetId
from duemq_server.timer_service.timers.rows import keys_of

Entries = npt.NDArray[Any]

ANY = 0xFFFF_FFFF
ENTRY = np.dtype(
    [
        ("block", "<u4"),
        ("source", "<u4"),
        ("first", "<i8"),
        ("last", "<i8"),
        ("due", "<i8"),
        ("until", "<i8"),
    ]
)
assert ENTRY.itemsize == 40
_DEAD_MIN = 64  # entries of blocks that are done, before they are thrown out


@dataclass(slots=True)
class Block:
    """A block on disk and how far it is loaded."""

    file: str
    position: int  # of the INDEX entry
    index_length: int  # of that entry; the BODIES entry follows
    count: int
    cursor: int  # rows loaded
    next_due_ms: int  # of row `cursor`
    last_due_ms: int
    parked: TargetId | None = None
    keyed: int = 0  # rows with a timer key


class Ranges(NamedTuple):
    """Between which offsets the timers of a block lie, by source."""

    source: npt.NDArray[np.uint32]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


UNKNOWN = Ranges(
    np.array([ANY], dtype=np.uint32), np.array([0]), np.array([OFFSET_MAX], dtype=np.int64)
)


def ranges_of(source: npt.NDArray[np.uint32], offset: npt.NDArray[np.int64]) -> Ranges:
    """The ranges of a block's rows."""
    order = np.lexsort((offset, source))
    source, offset = source[order], offset[order]
    starts = np.concatenate(([0], np.flatnonzero(source[1:] != source[:-1]) + 1))
    ends = np.concatenate((starts[1:], [len(source)])) - 1
    return Ranges(source[starts], offset[starts], offset[ends])


class Order(NamedTuple):
    """Known entries by source and first offset, so that an offset is found by bisection."""

    at: npt.NDArray[np.uint32]  # which entry
    begins: npt.NDArray[np.uint64]  # keys (rows.keys_of) of the first offsets
    ends: npt.NDArray[np.uint64]  # of the last ones: the largest up to here


class Table:
    """Entries of a period file as they were at one time; they stay as they are."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries

    @cached_property
    def order(self) -> Order:
        """Made by the first look-up that needs it, in its thread, and kept with the entries.

        20 bytes an entry.
        """
        known = np.flatnonzero(self.entries["source"] != ANY)
        entries = self.entries[known]
        begins = keys_of(entries["source"], entries["first"])
        order = np.argsort(begins, kind="stable")
        ends = keys_of(entries["source"], entries["last"])[order]
        return Order(known[order].astype(np.uint32), begins[order], np.maximum.accumulate(ends))

    @cached_property
    def unknown(self) -> npt.NDArray[np.int64]:
        """Which entries are of blocks that nothing is known of."""
        return np.flatnonzero(self.entries["source"] == ANY)


class View(NamedTuple):
    """The entries of each period file, as they were at one time."""

    names: list[str]
    begin_ms: npt.NDArray[np.int64]
    end_ms: npt.NDArray[np.int64]
    tables: list[Table]


class _File:
    def __init__(self, begin_ms: int, end_ms: int) -> None:
        self.begin_ms = begin_ms
        self.end_ms = end_ms
        self.blocks: set[int] = set()  # not loaded to their ends
        self.count = 0
        self.entries: Entries = np.empty(4, dtype=ENTRY)
        self._table: Table | None = None

    def table(self) -> Table:
        """The entries as of now; the same one until they change."""
        if self._table is None:
            self._table = Table(self.entries[: self.count])
        return self._table

    def append(self, entries: Entries) -> None:
        end = self.count + len(entries)
        if end > len(self.entries):
            grown = np.empty(2 * end, dtype=ENTRY)
            grown[: self.count] = self.entries[: self.count]
            self.entries = grown
        self.entries[self.count : end] = entries
        self.count, self._table = end, None

    def without(self, gone: npt.NDArray[np.bool_]) -> None:
        """In a new array: a view of the old one may be in use."""
        self.entries = self.entries[: self.count][~gone]
        self.count, self._table = len(self.entries), None


class Catalog:
    """Blocks by period file."""

    def __init__(self) -> None:
        self.added = 0
        """Blocks ever added; the number of the next."""
        self._blocks: dict[int, Block] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # by file and position
        self._files: dict[str, _File] = {}
        self._view: View | None = None

    def add(self, each: Block, period: tuple[int, int], ranges: Ranges = UNKNOWN) -> int:
        """A block is there; its number.  `period`: in ms, of its file."""
        number, self.added, self._view = self.added, self.added + 1, None
        self._blocks[number] = each
        self._numbers[each.file, each.position] = number
        file = self._files.setdefault(each.file, _File(*period))
        file.blocks.add(number)
        file.append(_entries(number, ranges, each.next_due_ms, each.last_due_ms))
        return number

    def done(self, each: Block) -> int:
        """A block is loaded to its end; the number that it had."""
        self._view = None
        number = self._numbers.pop((each.file, each.position))
        del self._blocks[number]
        file = self._files[each.file]
        file.blocks.discard(number)
        if not file.blocks:
            del self._files[each.file]
        elif file.count > 2 * max(len(file.blocks), _DEAD_MIN):
            live = np.fromiter(file.blocks, dtype=np.uint32)
            gone = ~np.isin(file.entries["block"][: file.count], live)
            if 2 * gone.sum() > file.count:
                file.without(gone)
        return number

    def block(self, number: int) -> Block | None:
        """A block, or None if it is done.  From any thread."""
        return self._blocks.get(number)

    def since(self, number: int) -> list[Block]:
        """Blocks of this number and later that are not done."""
        return [each for at, each in self._blocks.items() if at >= number]

    def view(self) -> View:
        """All entries as of now; they stay as they are."""
        if self._view is None:
            files = self._files.values()
            self._view = View(
                list(self._files),
                np.array([file.begin_ms for file in files], dtype=np.int64),
                np.array([file.end_ms for file in files], dtype=np.int64),
                [file.table() for file in files],
            )
        return self._view

    def learn(self, found: Mapping[str, Mapping[int, Ranges]]) -> None:
        """Ranges of blocks that were not known, by file and number."""
        for name, ranges in found.items():
            self._view = None
            file = self._files.get(name)
            if file is None:
                continue
            entries = file.entries[: file.count]
            numbers = np.fromiter(ranges, dtype=np.uint32)
            unknown = (entries["source"] == ANY) & np.isin(entries["block"], numbers)
            learnt = [
                _entries(number, ranges[number], int(due_ms), int(until_ms))
                for number, _, _, _, due_ms, until_ms in entries[unknown].tolist()
            ]
            file.without(unknown)
            for each in learnt:
                file.append(each)


def _entries(number: int, ranges: Ranges, due_ms: int, until_ms: int) -> Entries:
    made = np.empty(len(ranges.source), dtype=ENTRY)
    made["block"], made["source"] = number, ranges.source
    made["first"], made["last"] = ranges.first, ranges.last
    made["due"], made["until"] = due_ms, until_ms
    return made
