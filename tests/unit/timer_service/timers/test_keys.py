"""What is not yet in a block, by key."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from duemq_server.timer_service.timers.keys import NOWHERE, KeyList
from duemq_server.timer_service.timers.rows import Rows, key_of, new_rows

Timer = tuple[int, int]  # source, offset


def rows_of(timers: Sequence[Timer]) -> Rows:
    """Due at ten times the offset, for the target of the source's number."""
    rows = new_rows(len(timers))
    rows.narrow[:] = 0
    rows.narrow[0], rows.wide[1] = zip(*timers, strict=True)
    rows.wide[0], rows.narrow[1] = 10 * rows.offset, rows.source
    return rows


@pytest.mark.parametrize("at_once", [False, True], ids=["batch by batch", "of batches"])
@pytest.mark.parametrize("count", [3, 300], ids=["few", "many"])
def test_all_that_came_is_found_and_nothing_else(at_once: bool, count: int) -> None:
    rng = random.Random(count)
    timers = rng.sample([(source, offset) for source in (0, 2, 5) for offset in range(200)], 450)
    batches = [rows_of(timers[start : start + 7]) for start in range(0, 300, 7)]  # of any sources
    listed = set(timers[: 7 * len(batches)])
    if at_once:
        keys = KeyList.of(batches)
    else:
        keys = KeyList()
        for batch in batches:
            keys.add(batch)

    asked = rng.choices([*timers, (1, 3), (9, 3), (5, 1 << 40)], k=count)
    wanted = np.array([key_of(*each) for each in asked], dtype=np.uint64)

    due_ms = [10 * each[1] if each in listed else NOWHERE for each in asked]
    assert keys.find(wanted).tolist() == due_ms
    target = [each[0] if each in listed else NOWHERE for each in asked]
    assert keys.find_targets(wanted).tolist() == target


def test_nothing_is_in_an_empty_one() -> None:
    for keys in (KeyList(), KeyList.of([])):
        assert keys.find(np.array([0, key_of(1, 1)], dtype=np.uint64)).tolist() == [NOWHERE] * 2
