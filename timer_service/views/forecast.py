"""What falls due when: a histogram of all pending timers, exact.

Owned by: who made it.  Made by the thread that owns the scheduler, from what memory holds and
due_counts.py; `Forecast.run` works on copies, and may run in any thread.  No clock, no I/O.

Overdue is what was due before now.  Then come minutes (the first one from now on), then hours, then
days, as `Edges` says; at most `BUCKETS_MAX`, the last one of which has all that is later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.protocol.due import DAY_MS, HOUR_MS, MINUTE_MS, Edges
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.due_counts import CountedBlock
from duemq_server.timer_service.scheduling.scheduler import Scheduler

Numbers = npt.NDArray[np.int64]

BUCKETS_MAX = 10_000


class DueBucket(NamedTuple):
    """Timers due at or after `from_ms` and before `to_ms`; `from_ms` is 0 of what is overdue."""

    from_ms: int
    to_ms: int
    pending: int


def split_blocks(scheduler: Scheduler, now_ms: int) -> list[Block]:
    """Blocks whose rows must be looked at to tell what is overdue: the step has both."""
    begin_ms = now_ms // MINUTE_MS * MINUTE_MS
    return [
        each
        for each in scheduler.segments.blocks()
        if each.next_due_ms < now_ms and each.last_due_ms >= begin_ms
    ]


class Forecast:
    """Pending timers as they are when it is made; of one topic's slot, or all."""

    def __init__(
        self,
        scheduler: Scheduler,
        now_ms: int,
        edges: Edges,
        slot: int | None,
        read: Mapping[tuple[str, int], CountedBlock],
    ) -> None:
        """`read`: the split blocks, by file and position."""
        self._now_ms = now_ms
        self._edges = edges
        self._slot = slot
        self._near = _near(scheduler)
        self._tables = scheduler.due_counts.tables(slot)
        self._overdue = sum(
            self._overdue_of(scheduler, each, read[each.file, each.position])
            for each in split_blocks(scheduler, now_ms)
        )

    def _overdue_of(self, scheduler: Scheduler, block: Block, counted: CountedBlock) -> int:
        """What is overdue of the step that now lies in."""
        due_ms = counted.rows.due_ms
        found = (due_ms < self._now_ms) & (due_ms >= self._now_ms // MINUTE_MS * MINUTE_MS)
        found[: block.cursor] = False
        if self._slot is not None:
            found &= counted.slots == self._slot
        unmet = scheduler.tombstones.unmet_in(counted.rows)
        if unmet is not None:
            found &= ~unmet
        return int(found.sum())

    def run(self) -> list[DueBucket]:
        """The buckets, in order, without empty ones."""
        slots, due_ms = self._near
        if self._slot is not None:
            due_ms = due_ms[slots == self._slot]
        overdue = self._overdue + int((due_ms < self._now_ms).sum())
        due_ms = due_ms[due_ms >= self._now_ms]
        dues = [due_ms // MINUTE_MS * MINUTE_MS]
        counts = [np.ones(len(due_ms), dtype=np.int64)]
        now_step_ms = self._now_ms // MINUTE_MS * MINUTE_MS
        for step_ms, steps, pending in self._tables:
            begins = steps * step_ms
            past = begins < now_step_ms
            overdue += int(pending[past].sum())
            dues.append(begins[~past])
            counts.append(pending[~past])
        begins, which = np.unique(self._bucket(np.concatenate(dues)), return_inverse=True)
        sums = np.zeros(len(begins), dtype=np.int64)
        np.add.at(sums, which, np.concatenate(counts))
        if len(sums):
            sums[0] -= self._overdue if begins[0] == now_step_ms else 0
        return self._buckets(overdue, begins, sums)

    def _bucket(self, due_ms: Numbers) -> Numbers:
        """Where the bucket of each due time begins."""
        hours, days = due_ms // HOUR_MS * HOUR_MS, due_ms // DAY_MS * DAY_MS
        later = np.where(due_ms < self._edges.hours_ms, hours, days)
        return np.where(due_ms < self._edges.minutes_ms, due_ms, later)

    def _buckets(self, overdue: int, begins: Numbers, sums: Numbers) -> list[DueBucket]:
        begins, sums = begins[sums > 0], sums[sums > 0]
        found = [DueBucket(0, self._now_ms, overdue)] if overdue else []
        for begin_ms, pending in zip(
            begins[:BUCKETS_MAX].tolist(), sums[:BUCKETS_MAX].tolist(), strict=True
        ):
            from_ms = max(begin_ms, self._now_ms)
            found.append(DueBucket(from_ms, begin_ms + self._width_ms(begin_ms), pending))
        if len(begins) > BUCKETS_MAX:
            last, end_ms = found[-1], int(begins[-1]) + DAY_MS
            rest = int(sums[BUCKETS_MAX:].sum())
            found[-1] = DueBucket(last.from_ms, end_ms, last.pending + rest)
        return found

    def _width_ms(self, begin_ms: int) -> int:
        if begin_ms < self._edges.minutes_ms:
            return MINUTE_MS
        return HOUR_MS if begin_ms < self._edges.hours_ms else DAY_MS


def _near(scheduler: Scheduler) -> tuple[Numbers, Numbers]:
    """Topics' slots and due times of what memory holds, copied."""
    near = scheduler.near
    ids = near.pending_ids()
    targets, dues = [near.table.target[ids]], [near.table.due_ms[ids]]
    for rows, _ in scheduler.tiers.pieces():
        unmet = scheduler.tombstones.unmet_in(rows)
        if unmet is not None:
            rows = rows.take(~unmet)
        targets.append(rows.target)
        dues.append(rows.due_ms)
    return scheduler.topics.slots(np.concatenate(targets)), np.concatenate(dues)
