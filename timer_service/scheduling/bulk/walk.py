"""A job at work: memory, then blocks, then memory again, a slice at a time.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

    step ── what memory holds of it, by identity ──► slices
     │  ── blocks ──► reading ──► read ──► slices        (reading.run: in another thread)
     └──── until memory was looked at, all blocks had been before, and nothing moved since

A timer may move between two steps: each slice looks for its timers where they are by then.  What
was loaded from a block meanwhile is found when memory is looked at once more; what was written to
one is found there, for new blocks are looked at, too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from duemq_server.timer_service.far.bodies import Bytes, Joined, cut
from duemq_server.timer_service.scheduling.bulk import entry, slices
from duemq_server.timer_service.scheduling.bulk.jobs import Job, Which
from duemq_server.timer_service.scheduling.bulk.matching import (
    BLOCKS_AT_ONCE,
    BlockMatch,
    Matcher,
    Reading,
    Unread,
    has_key,
)
from duemq_server.timer_service.scheduling.bulk.slices import Slice
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.keys import NOWHERE, Keys
from duemq_server.timer_service.timers.log_entries import TargetId
from duemq_server.timer_service.timers.rows import Rows, concatenate, keys_of

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

CANCELLED_AT_ONCE = 2_000  # some 2 ms of work
SHIFTED_AT_ONCE = 1_000  # some 2 ms
SHIFTED_BYTES_MAX = 1 << 20  # of a slice's bodies; one timer is always shifted
PROBLEMS_MAX = 3  # blocks that cannot be read, named in the answer


def accept(scheduler: Scheduler, job_id: bytes, which: Which, now_ms: int) -> Job:
    """A job begins; one that is open stands behind it.  Raises LogFull, DiskFull."""
    job = Job(job_id, which, slices.fences(scheduler))
    _begin(scheduler, job, now_ms)
    return job


def go_on(scheduler: Scheduler, now_ms: int) -> None:
    """The job that stood behind another one is open again.  Raises LogFull, DiskFull.

    The log has it once more, as it stands: an older release knows of one that is open only.
    """
    job = scheduler.bulk.behind
    assert job is not None
    _begin(scheduler, job, now_ms)


def _begin(scheduler: Scheduler, job: Job, now_ms: int) -> None:
    scheduler.log.append(log_entries.BULK, [entry.accepted(job, now_ms)])
    scheduler.bulk.begin(job)


class Walk:
    """The open job, from its begin or from where a crash left it."""

    def __init__(self, scheduler: Scheduler, job: Job) -> None:
        self._scheduler = scheduler
        self.job = job
        self._memory: Keys | None = None  # to be looked at; None: it must be asked what there is
        self._blocks: deque[Unread] = deque()
        self._since = 0  # blocks from this number on were not looked at
        self._found: deque[BlockMatch] = deque()
        self._moved = True  # something may be in memory now that was not
        self._problems: dict[str, None] = {}
        self._targets: dict[TargetId, TargetId] = {}  # that were moved, and where to

    def reading(self) -> Reading | None:
        """What must be read before the next step; to be handed to `read` when it was run."""
        if self._memory is None or len(self._memory) or self._found:
            return None
        self._see_blocks()
        if not self._blocks:
            return None
        noted = [self._blocks.popleft() for _ in range(min(len(self._blocks), BLOCKS_AT_ONCE))]
        self._moved |= any(block.cursor != cursor for block, cursor in noted)
        segments, job = self._scheduler.segments, self.job
        return Reading(
            segments.disk,
            segments.directory,
            job.which,
            job.fences,
            [Unread(block, block.cursor) for block, _ in noted if block.cursor < block.count],
            with_bodies=job.which.brings,
        )

    def read(self, reading: Reading) -> None:
        """It was run."""
        self._found += reading.found
        self._blocks.extendleft(reversed(reading.unread))
        self._problems.update(dict.fromkeys(reading.problems))

    def step(self, now_ms: int) -> bool:
        """Does a slice; False: the job is over.

        Raises LogFull, DiskFull: nothing was done, call again.
        """
        if self._memory is None:
            self._see_blocks()
            self._moved = False
            self._memory = self._in_memory()
        elif len(self._memory):
            self._memory_slice(self._memory, now_ms)
        elif self._found:
            self._block_slice(now_ms)
        elif self._blocks:
            raise AssertionError("blocks must be read first")
        elif self._moved:
            self._memory = None
        else:
            self._finish(now_ms)
            return False
        return True

    def _finish(self, now_ms: int) -> None:
        scheduler = self._scheduler
        named = list(self._problems)
        text = "; ".join(named[:PROBLEMS_MAX])
        if len(named) > PROBLEMS_MAX:
            text += f"; and {len(named) - PROBLEMS_MAX} more"
        scheduler.log.append(log_entries.BULK, [entry.over(self.job, text, now_ms)])
        scheduler.bulk.finish(now_ms, text)

    def _see_blocks(self) -> None:
        """Notes those that came since; what is loaded of them meanwhile will be in memory."""
        catalog, which = self._scheduler.segments.catalog, self.job.which
        if self._since == catalog.added:
            return
        new = catalog.since(self._since)
        self._since, self._moved = catalog.added, True
        self._blocks += sorted(
            (
                Unread(each, each.cursor)
                for each in new
                if each.last_due_ms >= which.from_ms and each.next_due_ms < which.to_ms
            ),
            key=lambda each: each.block.next_due_ms,
        )

    def _matcher(self) -> Matcher:
        numbers = self._scheduler.numbers
        sources = [each.id for each in numbers.sources]
        return Matcher(self.job.which, self.job.fences, sources, numbers.targets)

    def _in_memory(self) -> Keys:
        """Whatever memory holds that may be meant."""
        scheduler, matcher = self._scheduler, self._matcher()
        near = scheduler.near.table
        ids = matcher.among(near, scheduler.near.pending_ids())
        found = [keys_of(near.source[ids], near.offset[ids])]
        for rows, _ in scheduler.tiers.pieces():
            mask = matcher.mask(rows)
            if mask.any():
                found.append(keys_of(rows.source[mask], rows.offset[mask]))
        return np.concatenate(found)

    def _memory_slice(self, left: Keys, now_ms: int) -> None:
        size = self._at_once()
        asked = np.sort(left[:size])
        found = self._located(asked)
        taken = self._touch(found, now_ms)
        left = left[size:]
        if taken < len(found.rows):
            done = _key(found.rows, taken - 1)
            rest = asked[np.searchsorted(asked, done, side="right") :]
            left = np.concatenate([rest, left])
        self._memory = left

    def _located(self, keys: Keys) -> Slice:
        """Those of them that are pending in memory at this moment, in the order of the keys."""
        scheduler = self._scheduler
        ids = scheduler.near.find_all(keys)
        here = ids != NOWHERE
        rows = [scheduler.near.rows(ids[here])]
        order = [np.flatnonzero(here)]
        bodies: list[Bytes] = []
        wants_bodies = bool(self.job.which.key_prefix) or self.job.which.brings
        if wants_bodies:
            bodies += [scheduler.near.body(row) for row in ids[here].tolist()]
        for listed, pieces in scheduler.tiers.lists():
            for number, places, at in listed.find_rows(keys):
                piece, blob = pieces[number]
                rows.append(piece.take(at))
                order.append(places)
                if wants_bodies:
                    bodies += cut(blob, rows[-1])
        joined, places = concatenate(rows), np.concatenate(order)
        kept = np.argsort(places, kind="stable")
        gone = scheduler.tombstones.left.find(keys_of(joined.source, joined.offset))
        kept = kept[~gone[kept]]
        if self.job.which.key_prefix:
            prefix = self.job.which.key_prefix
            kept = kept[[has_key(bodies[n], prefix) for n in kept.tolist()]]
        near = np.append(ids[here], np.full(len(joined) - int(here.sum()), NOWHERE, dtype=np.int32))
        chosen = Joined.of([bodies[n] for n in kept.tolist()]) if wants_bodies else None
        return Slice(joined.take(kept), near[kept].astype(np.int32), chosen)

    def _block_slice(self, now_ms: int) -> None:
        """The next ones of a block that was read, as far as they still lie there."""
        scheduler, found = self._scheduler, self._found[0]
        block, size = found.block, self._at_once()
        rows = found.rows.slice(0, min(size, len(found.at)))
        rows = scheduler.numbers.translate(rows, found.sources, found.targets)
        there = found.at[:size] >= block.cursor
        self._moved |= not there.all()
        there &= ~scheduler.tombstones.left.find(keys_of(rows.source, rows.offset))
        kept = np.flatnonzero(there)
        bodies = None if found.bodies is None else found.bodies.take(kept)
        nowhere = np.full(len(kept), NOWHERE, dtype=np.int32)
        taken = self._touch(Slice(rows.take(kept), nowhere, bodies, block), now_ms)
        done = len(there) if taken == len(kept) else int(kept[taken])
        self._found.popleft()
        if done < len(found.at):
            self._found.appendleft(_from(found, done))

    def _at_once(self) -> int:
        return SHIFTED_AT_ONCE if self.job.which.brings else CANCELLED_AT_ONCE

    def _touch(self, found: Slice, now_ms: int) -> int:
        """Cancels, shifts or moves the first of them, as many as fit; how many."""
        count = len(found.rows)
        if not count:
            return 0
        if not self.job.which.brings:
            slices.cancel(self._scheduler, self.job, found, now_ms)
            return count
        ends = np.cumsum(found.rows.size, dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, SHIFTED_BYTES_MAX, side="right")))
        assert found.bodies is not None
        bodies = found.bodies.take(slice(0, count))
        part = Slice(found.rows.slice(0, count), found.near[:count], bodies, found.block)
        slices.bring_anew(self._scheduler, self.job, part, now_ms, self._targets)
        return len(part.rows)


def _key(rows: Rows, at: int) -> np.uint64:
    return np.uint64(keys_of(rows.source[at : at + 1], rows.offset[at : at + 1])[0])


def _from(found: BlockMatch, start: int) -> BlockMatch:
    """Without what is done."""
    return found._replace(
        at=found.at[start:],
        rows=found.rows.slice(start, len(found.at)),
        bodies=None if found.bodies is None else found.bodies.take(slice(start, None)),
    )
