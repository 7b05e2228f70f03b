"""How many timers of blocks fall due when, by topic: a small table a period file.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  `CountBlocks.run` only reads
what it was given, and the disk; it may run in any other thread.  No clock.

Nothing is counted before somebody asks.  Then each block is read once (`CountBlocks`), and from
then on its part is kept up to date as its timers are loaded and cancelled.  Steps are as fine as a
forecast needs them (`Edges`): a file whose time comes nearer is forgotten, and read once more.

    entry   u64 topic's slot << 40 | due time / step   and how many; 16 bytes

At most `ENTRIES_MAX` entries are kept: files beyond that are read again by each forecast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.protocol.due import Edges
from duemq_server.storage.disk import Disk
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.far_segments import period_of
from duemq_server.timer_service.far.reading import as_rows, read_index
from duemq_server.timer_service.timers.log_entries import SourceId
from duemq_server.timer_service.timers.rows import Rows

Numbers = npt.NDArray[np.int64]
Unmet = Callable[[Rows], npt.NDArray[np.bool_] | None]

ENTRIES_MAX = 1 << 20
SLOT_BIT = 40
ANY_SOURCE = 0xFFFF_FFFF


class CountedBlock(NamedTuple):
    """A block that was read: its rows, in the shard's numbers, and their topics' slots."""

    block: Block
    cursor: int  # as it was then
    rows: Rows
    slots: Numbers
    keys: Numbers  # of the rows from the cursor on, each once
    counts: Numbers


class CountBlocks:
    """A job that reads blocks; DueCounts.join takes it over."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        blocks: Sequence[tuple[Block, int]],
        slot_of: Callable[[str], int],
        number_of: Callable[[SourceId], int | None],
    ) -> None:
        """`blocks`: each with the step of its file."""
        self._disk = disk
        self._directory = directory
        self._blocks = blocks
        self._slot_of = slot_of
        self._number_of = number_of
        self.counted: list[CountedBlock] = []

    def run(self) -> None:
        """Does the work.  Raises CorruptFile."""
        self.counted = [self._count(each, step_ms) for each, step_ms in self._blocks]

    def _count(self, each: Block, step_ms: int) -> CountedBlock:
        index = read_index(self._disk, os.path.join(self._directory, each.file), each)
        rows = as_rows(index, 0, each.count)
        slots = np.array([self._slot_of(target.topic) for target in index.targets], dtype=np.int64)
        numbers = [self._number_of(source) for source in index.sources]
        known = [ANY_SOURCE if number is None else number for number in numbers]
        of_rows = slots[rows.target]
        rows.narrow[0] = np.array(known, dtype=np.uint32)[rows.source]
        cursor = each.cursor
        keys, counts = _sums(of_rows[cursor:], rows.due_ms[cursor:], step_ms)
        return CountedBlock(each, cursor, rows, of_rows, keys, counts)


class _File:
    def __init__(self, step_ms: int) -> None:
        self.step_ms = step_ms
        self.known: set[int] = set()  # positions of blocks that are counted
        self.keys: Numbers = np.empty(0, dtype=np.int64)
        self.counts: Numbers = np.empty(0, dtype=np.int64)

    def add(self, parts: Sequence[tuple[Numbers, Numbers]]) -> None:
        joined = np.concatenate([self.keys, *(keys for keys, _ in parts)])
        counts = np.concatenate([self.counts, *(counts for _, counts in parts)])
        self.keys, which = np.unique(joined, return_inverse=True)
        self.counts = np.zeros(len(self.keys), dtype=np.int64)
        np.add.at(self.counts, which, counts)

    def take(self, slots: Any, due_ms: Numbers) -> None:
        keys, counts = _sums(slots, due_ms, self.step_ms)
        self.counts[np.searchsorted(self.keys, keys)] -= counts


class DueCounts:
    """The tables of all files."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def __len__(self) -> int:
        """Files of which something is counted."""
        return len(self._files)

    def missing(self, blocks: Iterable[Block], edges: Edges) -> list[tuple[Block, int]]:
        """Blocks to be read before a forecast can be made, with their steps, by file.

        Forgets files that are no more, or that are counted in steps too large.
        """
        steps: dict[str, int] = {}
        found: list[tuple[Block, int]] = []
        for each in blocks:
            step_ms = steps.get(each.file)
            if step_ms is None:
                step_ms = steps[each.file] = edges.step_ms(period_of(each.file)[0])
                if each.file in self._files and self._files[each.file].step_ms > step_ms:
                    del self._files[each.file]
            file = self._files.get(each.file)
            if file is None or each.position not in file.known:
                found.append((each, step_ms if file is None else file.step_ms))
        for name in self._files.keys() - steps.keys():
            del self._files[name]
        return sorted(found, key=lambda each: (each[0].file, each[0].position))

    def join(self, counted: Iterable[CountedBlock], steps: Sequence[int], unmet: Unmet) -> None:
        """Blocks were read; less what was loaded or cancelled meanwhile.  `steps`: of each."""
        parts: dict[str, list[tuple[Numbers, Numbers]]] = {}
        for each, step_ms in zip(counted, steps, strict=True):
            block = each.block
            if block.cursor == block.count:
                continue
            file = self._files.setdefault(block.file, _File(step_ms))
            if file.step_ms != step_ms or block.position in file.known:
                continue
            file.known.add(block.position)
            parts.setdefault(block.file, []).append(_left(each, step_ms, unmet))
        for name, added in parts.items():
            self._files[name].add(added)

    def loaded(self, block: Block, slots: Any, due_ms: Numbers) -> None:
        """Timers of a block were loaded; `slots` and `due_ms` of those not cancelled before."""
        file = self._files.get(block.file)
        if file is not None and block.position in file.known:
            file.take(slots, due_ms)

    def done(self, block: Block) -> None:
        """A block is loaded to its end; another one may come to lie at its place."""
        if block.file in self._files:
            self._files[block.file].known.discard(block.position)

    def cancelled(self, blocks: Sequence[Block], slots: Any, due_ms: Numbers) -> None:
        """Timers that lie in blocks were cancelled."""
        by_file: dict[str, list[int]] = {}
        for n, block in enumerate(blocks):
            file = self._files.get(block.file)
            if file is not None and block.position in file.known:
                by_file.setdefault(block.file, []).append(n)
        for name, mine in by_file.items():
            self._files[name].take(slots[mine], due_ms[mine])

    def forget(self, names: Iterable[str]) -> None:
        """Files of which timers were cancelled, nobody knows in which block: counted anew."""
        for name in names:
            self._files.pop(name, None)

    def tables(self, slot: int | None) -> list[tuple[int, Numbers, Numbers]]:
        """(step, number of the step, timers) of each file, copied; of one slot, or all."""
        found = []
        for file in self._files.values():
            first, last = 0, len(file.keys)
            if slot is not None:
                ends = np.array([slot << SLOT_BIT, (slot + 1) << SLOT_BIT])
                first, last = np.searchsorted(file.keys, ends).tolist()
            steps = file.keys[first:last] & ((1 << SLOT_BIT) - 1)
            found.append((file.step_ms, steps, file.counts[first:last].copy()))
        return found

    def shrink(self) -> None:
        """Forgets files until what is kept is within the bound."""
        sizes = {name: len(file.keys) for name, file in self._files.items()}
        total = sum(sizes.values())
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if total <= ENTRIES_MAX:
                return
            total -= sizes[name]
            del self._files[name]


def _left(each: CountedBlock, step_ms: int, unmet: Unmet) -> tuple[Numbers, Numbers]:
    """What a block that was read has left by now."""
    cursor = each.block.cursor
    mask = unmet(each.rows)
    if mask is None and cursor == each.cursor:
        return each.keys, each.counts
    left = np.ones(len(each.rows), dtype=np.bool_) if mask is None else ~mask
    left[:cursor] = False
    return _sums(each.slots[left], each.rows.due_ms[left], step_ms)


def _sums(slots: Any, due_ms: Numbers, step_ms: int) -> tuple[Numbers, Numbers]:
    keys, counts = np.unique(
        slots.astype(np.int64) << SLOT_BIT | due_ms // step_ms, return_counts=True
    )
    return keys, counts.astype(np.int64)
