import numpy as np
import pytest

from duemq_server.timer_service.far.tombstones import UNMET, UNMET_REPLACED, Tombstones
from duemq_server.timer_service.timers.rows import Rows, new_rows


def rows_of(source: int, *offsets: int) -> Rows:
    rows = new_rows(len(offsets))
    rows.wide[:] = 0
    rows.narrow[:] = 0
    rows.wide[1], rows.narrow[0] = offsets, source
    return rows


def test_cancelled_timers_are_met_once() -> None:
    stones = Tombstones(keep_ms=10)
    stones.add(1, 5, 100, unmet=True)
    stones.add(2, 6, 100, unmet=True)

    met = stones.meet(rows_of(1, 4, 5, 6), 100)

    assert met is not None
    assert met.tolist() == [False, True, False]
    assert stones.unmet == 1
    assert stones.meet(rows_of(1, 4, 5, 6), 100) is None
    assert stones.has(1, 5)


def test_a_cancelled_timer_is_remembered_for_a_while_after_it_was_due() -> None:
    stones = Tombstones(keep_ms=10)
    stones.add(1, 5, 100, unmet=False)

    stones.expire(110)
    assert stones.has(1, 5)
    stones.expire(111)
    assert not stones.has(1, 5)
    assert len(stones) == 0


def test_what_still_has_to_be_kept_from_firing_never_expires() -> None:
    stones = Tombstones(keep_ms=10)
    stones.add(1, 5, 100, unmet=True)

    stones.expire(1 << 50)

    assert stones.has(1, 5)
    assert np.array_equal(stones.meet(rows_of(1, 5), 100), [True])
    stones.expire(1 << 50)
    assert not stones.has(1, 5)


def test_what_is_met_is_remembered_from_its_due_time_or_its_cancel_on() -> None:
    for due_ms, met_ms in ((100, 50), (50, 100)):
        stones = Tombstones(keep_ms=10)
        stones.add(1, 5, 100, unmet=True)
        rows = rows_of(1, 5)
        rows.wide[0] = due_ms
        stones.meet(rows, met_ms)

        stones.expire(110)
        assert stones.has(1, 5)
        stones.expire(111)
        assert not stones.has(1, 5)
        assert stones.forgotten_ms == 100


def test_where_too_many_are_remembered_one_by_one_a_bit_is_left_of_the_others() -> None:
    stones = Tombstones(keep_ms=10, singles_max=2)
    for offset in range(5):
        stones.add(1, offset, 100, unmet=False)

    stones.add(2, 1, 100, unmet=True)
    stones.gone.mark_one(2, 3, 100)
    assert len(stones) == 2
    asked = np.array([1] * 6 + [2] * 5, dtype=np.uint32), np.array([*range(6), *range(5)])
    assert stones.find(*asked).tolist() == [True] * 5 + [False] + [False, True, False, True, False]
    assert all(stones.has(1, offset) for offset in range(5))
    assert not stones.has(1, 5)
    stones.expire(111)
    assert not any(stones.has(1, offset) for offset in range(5))


def test_what_gave_way_to_others_is_known_as_forgotten_at_once() -> None:
    stones = Tombstones(keep_ms=10)
    stones.gone.pages_max = 1
    stones.gone.mark_one(1, 5, 100)
    assert stones.forgotten_ms == 0

    stones.gone.mark_one(2, 5, 200)

    assert not stones.has(1, 5)
    assert stones.forgotten_ms == 100


def test_many_added_at_once_are_as_if_added_one_by_one() -> None:
    source, offset, since_ms = np.array([1, 2, 1]), np.array([5, 5, 9]), np.array([300, 200, 100])
    for unmet in (False, True):
        singly, at_once = Tombstones(keep_ms=10), Tombstones(keep_ms=10)
        for each in zip(source.tolist(), offset.tolist(), since_ms.tolist(), strict=True):
            singly.add(*each, unmet=unmet)
        at_once.add_all(source.astype(np.uint32), offset, since_ms, unmet=unmet)

        assert sorted(at_once.items()) == sorted(singly.items())
        assert at_once.left.keys().tolist() == singly.left.keys().tolist()
        assert (len(at_once), at_once.unmet) == (len(singly), singly.unmet)
        for stones in (singly, at_once):
            stones.expire(211)
        assert sorted(at_once.items()) == sorted(singly.items())
        assert (len(at_once), at_once.unmet) == ((0, 3) if unmet else (1, 0))


@pytest.mark.parametrize("state", [UNMET, UNMET_REPLACED])
def test_tombstones_of_a_checkpoint_of_a_release_before_become_bits(state: int) -> None:
    stones = Tombstones(keep_ms=10)
    stones.restore(1, 5, 100, state)

    assert (len(stones), stones.unmet) == (0, 1)
    assert stones.has(1, 5)
