"""Looking timers up in blocks, against a list of them all."""

import itertools
import random

import numpy as np
import pytest

from duemq_server.timer_service.far import candidates
from duemq_server.timer_service.far.far_segments import DAY_MS, FarSegments, NumberTables
from duemq_server.timer_service.far.look_up import Query
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Blob, Home, Rows, new_rows
from tests.crash.faulty_disk import FaultyDisk

NOW = 1_700_000_000_000
# In a block they are numbered anew; in memory these are 1 to 3.
TABLES = NumberTables(
    [SourceId(9, 0), SourceId(7, 5), SourceId(3, 2), SourceId(5, 1)], [TargetId("b", "t", -1)]
)

Timer = tuple[int, int, int]  # source, offset, due


def flushed(segments: FarSegments, timers: list[Timer]) -> None:
    rows: Rows = new_rows(len(timers))
    rows.narrow[:] = 0
    rows.narrow[0], rows.wide[1], rows.wide[0] = zip(*timers, strict=True)
    flush = segments.flush([(rows, Blob(b"", Home("", 0)))], TABLES, NOW)
    flush.run()
    segments.flushed(flush)


def found(segments: FarSegments, asked: list[Timer]) -> list[Timer]:
    """Those of the asked ones that lie in a block, each with the row's own word for it."""
    source, offset, due_ms = (
        np.array(column, dtype=np.int64) for column in zip(*asked, strict=True)
    )
    query = Query(source.astype(np.uint32), offset, due_ms, np.zeros(len(asked), dtype=np.int64))
    job = segments.look_up([query], list(TABLES.sources).index)
    job.run()
    segments.looked_up(job)
    return [asked[at] for at, _ in query.places()]


@pytest.mark.parametrize(
    ("few", "pairs_max"),
    [(0, 16), (0, candidates._PAIRS_MAX), (1 << 20, 16)],
    ids=["in parts", "at once", "one by one"],
)
@pytest.mark.parametrize("learnt", [False, True], ids=["known", "after a restart"])
def test_a_timer_is_found_by_source_offset_and_due_time_and_by_all_three(
    few: int, pairs_max: int, learnt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "FEW", few)
    monkeypatch.setattr(candidates, "_PAIRS_MAX", pairs_max)
    rng = random.Random(pairs_max)
    disk = FaultyDisk()
    segments = FarSegments("/segments", disk)
    dues = [NOW + DAY_MS + n * 11 * 3_600_000 for n in range(7)]  # many timers at each
    every = list(itertools.product((1, 2, 3), range(0, 120, 2), dues))
    rng.shuffle(every)
    # A source's offset lies in one place only.
    pending = list(
        {(source, offset): (source, offset, due) for source, offset, due in every}.values()
    )
    for part in (pending[:50], pending[50:51], pending[51:]):
        flushed(segments, part)
    if learnt:
        blocks, lengths = segments.blocks(), segments.lengths
        segments = FarSegments("/segments", disk)
        segments.recover(lengths, blocks)

    absent = [(source, offset + 1, due) for source, offset, due in pending]
    elsewhere = [(source % 3 + 1, offset, due + 1) for source, offset, due in pending]
    asked = [*pending, *absent, *elsewhere, *every]
    rng.shuffle(asked)
    assert found(segments, asked) == [each for each in asked if each in set(pending)]
    assert found(segments, pending[:1]) == pending[:1]
