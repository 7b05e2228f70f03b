"""Counting by topic what neither checkpoint nor log says: once, at a start, by reading every block.

So it is after an older release, whose checkpoints and CANCEL entries name no topics, and after
damage was set aside.  The timers that had left before such a release's last checkpoint are in no
topic's ledger: those that were pending count as accepted.
"""

from __future__ import annotations

import numpy as np

from duemq_server.timer_service.far.reading import as_rows
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.rows import Rows


def recount(scheduler: Scheduler) -> None:
    """Does it.  Raises CorruptFile."""
    topics = scheduler.topics
    topics.recount()
    for each in scheduler.segments.blocks():
        index = scheduler.segments.index_of(each)
        found = as_rows(index, each.cursor, each.count)
        rows = scheduler.numbers.translate(found, index.sources, index.targets)
        topics.written([rows])
        _count_unmet(scheduler, rows)
    for rows, _ in scheduler.tiers.memtable.pieces:
        _count_unmet(scheduler, rows)
    topics.settle(scheduler)


def _count_unmet(scheduler: Scheduler, rows: Rows) -> None:
    unmet = scheduler.tombstones.unmet_in(rows)
    if unmet is not None:
        for ledger, count in scheduler.topics.split(rows.target[np.flatnonzero(unmet)]):
            ledger.unmet += count
