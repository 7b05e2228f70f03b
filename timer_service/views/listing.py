"""A page of a topic's pending timers, in due order.

Owned by: who made it.  Made by the thread that owns the scheduler, from what memory holds and which
blocks there are, and how far they are loaded; `Page.run` works on that, and reads blocks, in any
thread, while timers come and fire as ever; `still_pending` is asked in the first thread again.

Timers are ordered by due time and by where they came from, which never changes, and a page begins
behind a place in this order.  So pages fit together whatever moves between memory and disk
meanwhile: what is pending during all of them is on one of them, once.

A block's rows are sorted by due time.  All blocks that reach over a page's begin must be looked
at, one after the other as their rows are needed; behind `BLOCKS_MAX` of them, or `BYTES_MAX` of
bodies, the page ends, with the place to go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.far.bodies import BlockBodies, Bodies, Bytes, Files, InMemory
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.far_block import Index
from duemq_server.timer_service.far.reading import as_rows
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Rows

BLOCKS_MAX = 4_096  # read for a page, beside those that reach over its begin
BYTES_MAX = 4 << 20  # of bodies read for a page; one is always read
SCANNED_MAX = 4_096  # timers whose bodies are read for a page, where not all of them are wanted

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")


class Position(NamedTuple):
    """A timer's place in the order."""

    due_ms: int
    store_id: int
    queue_id: int
    offset: int


class PageQuery(NamedTuple):
    """What to list: due at or after `from_ms` and before `to_ms`, behind `after`."""

    topic: str
    from_ms: int
    to_ms: int
    limit: int
    after: Position | None = None

    @property
    def begin_ms(self) -> int:
        """Nothing due before it is on the page."""
        return max(self.from_ms, self.after.due_ms) if self.after else self.from_ms


class PageItem(NamedTuple, Generic[T]):
    """A timer on a page, and what was made of its record."""

    position: Position
    target: TargetId
    made: T


class Page(Generic[T]):
    """See the module."""

    def __init__(
        self,
        scheduler: Scheduler,
        wanted: PageQuery,
        make: Callable[[Bytes], T | None],
        *,
        wants_all: bool,
    ) -> None:
        """`make`: of a record's entry, None: it is not wanted, which `wants_all` rules out."""
        numbers, segments = scheduler.numbers, scheduler.segments
        self._wanted = wanted
        self._make = make
        self._scan = wanted.limit if wants_all else max(wanted.limit, SCANNED_MAX)
        self._targets = list(numbers.targets)
        mine = [each.topic == wanted.topic for each in self._targets]
        self._mine = np.array(mine, dtype=np.bool_)
        self._sources = [each.id for each in numbers.sources]
        self._disk, self._directory = segments.disk, segments.directory
        self._memory = list(self._held(scheduler))
        self._blocks = [
            (max(each.next_due_ms, wanted.begin_ms), each, each.cursor)
            for each in segments.blocks()
            if each.last_due_ms >= wanted.begin_ms and each.next_due_ms < wanted.to_ms
        ]
        self.listed: list[PageItem[T]] = []
        self.next: Position | None = None
        """Where the next page begins; None: this is the last one."""

    def files(self) -> set[str]:
        """Those that must stay while it runs."""
        return {each.file for _, each, _ in self._blocks}

    def run(self) -> None:
        """Fills `listed` and `next`.  Raises CorruptFile."""
        with Files(self._disk, self._directory) as files:
            parts, until_ms = self._collect(files)
            self._take(parts, until_ms, files)

    def still_pending(self, scheduler: Scheduler) -> list[PageItem[T]]:
        """What is listed, without what was cancelled: blocks do not tell."""
        numbers = scheduler.numbers

        def cancelled(at: Position) -> bool:
            source = numbers.find_source(SourceId(at.store_id, at.queue_id))
            return source is not None and scheduler.tombstones.has(source, at.offset)

        return [each for each in self.listed if not cancelled(each.position)]

    def _held(self, scheduler: Scheduler) -> Iterator[_Part]:
        """What memory holds of it."""
        near = scheduler.near
        ids = near.pending_ids()
        ids = ids[self._mine[near.table.target[ids]]]
        ids = ids[self._behind(near.table, ids, self._sources)]
        if len(ids) > self._scan:
            due_ms = near.table.due_ms[ids]
            ids = ids[due_ms <= np.partition(due_ms, self._scan)[self._scan]]
        rows = near.rows(ids)
        yield self._part(rows, InMemory(rows, list(near.blobs), near.blobs_of(ids)))
        for rows, blob in scheduler.tiers.pieces():
            found = np.flatnonzero(self._mine[rows.target])
            found = found[self._behind(rows, found, self._sources)]
            if len(found):
                part = rows.take(found)
                yield self._part(part, InMemory(part, [blob], np.zeros(len(part), dtype=np.int32)))

    def _part(self, rows: Rows, bodies: Bodies) -> _Part:
        return _Part(*_identity(rows, self._sources), rows.target, self._targets, bodies)

    def _behind(self, rows: Rows, at: Any, sources: Sequence[SourceId]) -> npt.NDArray[np.bool_]:
        """Which of the rows at these places are due in time, and behind the last page."""
        wanted, due_ms = self._wanted, rows.due_ms[at]
        mask = (due_ms >= wanted.begin_ms) & (due_ms < wanted.to_ms)
        after = wanted.after
        if after is None:
            return mask
        ties = np.flatnonzero(due_ms == after.due_ms)
        if len(ties):
            _, stores, queues, offsets = _identity(rows.take(at[ties]), sources)
            mask[ties] &= [
                each > after[1:]
                for each in zip(stores.tolist(), queues.tolist(), offsets.tolist(), strict=True)
            ]
        return mask

    def _collect(self, files: Files) -> tuple[list[_Part], int]:
        """Timers in time, among them the first `_scan` ones due before the answer's second part."""
        parts, until_ms = self._memory, self._wanted.to_ms
        enough_ms, unmeasured = self._enough_ms(parts), 0
        begin_ms = self._wanted.begin_ms
        for read, (due_ms, each, cursor) in enumerate(sorted(self._blocks, key=lambda x: x[0])):
            if due_ms > enough_ms:
                break
            if read >= BLOCKS_MAX and due_ms > begin_ms:
                until_ms = due_ms
                break
            part = self._in_block(files.index_of(each), each, cursor, enough_ms)
            if part is not None:
                parts.append(part)
                unmeasured += len(part.due_ms)
            if unmeasured > self._scan:
                enough_ms, unmeasured = self._enough_ms(parts), 0
        return parts, until_ms

    def _enough_ms(self, parts: list[_Part]) -> int:
        """What is due later is not needed."""
        due_ms = np.concatenate([part.due_ms for part in parts])
        if len(due_ms) <= self._scan:
            return self._wanted.to_ms
        return int(np.partition(due_ms, self._scan)[self._scan])

    def _in_block(self, index: Index, each: Block, cursor: int, enough_ms: int) -> _Part | None:
        due_ms = index.rows["due_ms"]
        start = max(cursor, int(np.searchsorted(due_ms, self._wanted.begin_ms)))
        end = int(np.searchsorted(due_ms, min(self._wanted.to_ms, enough_ms + 1)))
        mine = np.array([target.topic == self._wanted.topic for target in index.targets])
        at = np.arange(start, max(start, end))
        at = at[mine[index.rows["target"][at]]]
        if not len(at):
            return None
        rows = as_rows(index, 0, each.count)
        at = at[self._behind(rows, at, index.sources)]
        rows = rows.take(at)
        bodies = BlockBodies(each, rows, index.rows["crc32c"][at])
        return _Part(*_identity(rows, index.sources), rows.target, index.targets, bodies)

    def _take(self, parts: list[_Part], until_ms: int, files: Files) -> None:
        """The first ones of all, in order, as many as fit."""
        due_ms = np.concatenate([part.due_ms for part in parts])
        stores = np.concatenate([part.stores for part in parts])
        queues = np.concatenate([part.queues for part in parts])
        offsets = np.concatenate([part.offsets for part in parts])
        lengths = [len(part.due_ms) for part in parts]
        of_part = np.repeat(np.arange(len(parts)), lengths)
        row = np.concatenate([np.arange(length) for length in lengths])
        order = np.lexsort((offsets, queues, stores, due_ms))
        order = order[: int((due_ms < until_ms).sum())][: self._scan + 1]
        size = 0
        for done, at in enumerate(order.tolist()):
            if len(self.listed) == self._wanted.limit or done == self._scan or size >= BYTES_MAX:
                return
            part = parts[int(of_part[at])]
            here = Position(int(due_ms[at]), int(stores[at]), int(queues[at]), int(offsets[at]))
            body = part.bodies.read(int(row[at]), files)
            size += len(body)
            self.next = here
            made = self._make(body)
            if made is not None:
                self.listed.append(PageItem(here, part.targets[int(part.target[row[at]])], made))
        more = until_ms < self._wanted.to_ms
        self.next = Position(until_ms, 0, -1, -1) if more else None


class _Part(NamedTuple):
    """Timers that may be on the page, from one place."""

    due_ms: Numbers
    stores: npt.NDArray[np.uint64]
    queues: Numbers
    offsets: Numbers
    target: npt.NDArray[np.uint32]
    targets: Sequence[TargetId]
    bodies: Bodies


def _identity(
    rows: Rows, sources: Sequence[SourceId]
) -> tuple[Numbers, npt.NDArray[np.uint64], Numbers, Numbers]:
    """Due times, stores, queues and offsets of rows that have these sources."""
    stores = np.array([each.store_id for each in sources], dtype=np.uint64)
    queues = np.array([each.queue_id for each in sources], dtype=np.int64)
    return rows.due_ms, stores[rows.source], queues[rows.source], rows.offset
