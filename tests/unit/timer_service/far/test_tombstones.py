import numpy as np

from duemq_server.timer_service.far.tombstones import Tombstones
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

    met = stones.meet(rows_of(1, 4, 5, 6))

    assert met is not None
    assert met.tolist() == [False, True, False]
    assert stones.unmet == 1
    assert stones.meet(rows_of(1, 4, 5, 6)) is None
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
    assert np.array_equal(stones.meet(rows_of(1, 5)), [True])
    stones.expire(1 << 50)
    assert not stones.has(1, 5)


def test_many_added_at_once_are_as_if_added_one_by_one() -> None:
    source, offset, since_ms = np.array([1, 2, 1]), np.array([5, 5, 9]), np.array([300, 200, 100])
    for unmet in (False, True):
        singly, at_once = Tombstones(keep_ms=10), Tombstones(keep_ms=10)
        for each in zip(source.tolist(), offset.tolist(), since_ms.tolist(), strict=True):
            singly.add(*each, unmet=unmet)
        at_once.add_all(source.astype(np.uint32), offset, since_ms, unmet=unmet)

        assert sorted(at_once.items()) == sorted(singly.items())
        assert (len(at_once), at_once.unmet) == (len(singly), singly.unmet)
        for stones in (singly, at_once):
            stones.expire(211)
        assert sorted(at_once.items()) == sorted(singly.items())
        assert len(at_once) == (3 if unmet else 1)
