import numpy as np
import pytest

from duemq.errors import InvariantError
from duemq_server.timer_service.timers.near import Near
from duemq_server.timer_service.timers.rows import Blob, Home, Rows, new_rows
from duemq_server.timer_service.timers.wheel import Ids

NOW = 1_000


def timers(*due_ms: int) -> Rows:
    rows = new_rows(len(due_ms))
    rows.wide[0], rows.wide[1] = due_ms, np.arange(len(due_ms))
    rows.narrow[:] = 0
    rows.narrow[3] = 1
    return rows


def near_with(*due_ms: int) -> Near:
    near = Near(NOW, 100, 1 << 20)
    near.add(timers(*due_ms), Blob(bytes(len(due_ms)), Home("", 0)))
    return near


def offsets(near: Near, ids: Ids) -> list[int]:
    return near.rows(ids).offset.tolist()


def test_what_was_handed_out_of_a_split_millisecond_is_not_put_back_by_an_eviction() -> None:
    near = near_with(*[NOW + 5] * 10)
    first = near.take_due(NOW + 10, 6)

    assert near.evict(NOW + 5) != []
    assert len(near.take_due(NOW + 10, 100)) == 0
    near.check(len(first))


def test_an_eviction_that_takes_nothing_changes_nothing() -> None:
    near = near_with(*[NOW + 5] * 10)
    out = offsets(near, near.take_due(NOW + 10, 6))

    assert near.evict(NOW + 1_000) == []
    out += offsets(near, near.take_due(NOW + 10, 100))
    assert out == list(range(10))


def test_late_timers_can_give_way_too() -> None:
    near = near_with(NOW - 20, NOW - 10)

    [(rows, _)] = near.evict(NOW - 10)

    assert rows.offset.tolist() == [1]
    assert offsets(near, near.take_due(NOW, 10)) == [0]


@pytest.mark.parametrize("handed_out", [False, True])
def test_a_dropped_timer_is_met_once_wherever_it_lies(handed_out: bool) -> None:
    near = near_with(NOW + 1)
    ids = near.take_due(NOW + 1, 10) if handed_out else near.pending_ids()
    near.drop(ids)

    assert near.pending == 0
    assert len(near) == 1
    assert len(near.live(ids) if handed_out else near.take_due(NOW + 1, 10)) == 0
    assert len(near) == 0
    near.check(0)


def test_what_is_handed_back_comes_out_again() -> None:
    near = near_with(NOW + 1, NOW + 2)

    near.hand_back(near.take_due(NOW + 2, 10))

    near.check(0)
    assert len(near.take_due(NOW, 10)) == 0
    assert offsets(near, near.take_due(NOW + 2, 10)) == [0, 1]


def test_only_what_was_handed_out_may_be_dispatched() -> None:
    near = near_with(NOW + 1)

    with pytest.raises(InvariantError):
        near.remove(near.pending_ids())
    with pytest.raises(InvariantError):
        near.hand_back(near.pending_ids())


def test_a_dispatcher_that_lost_a_timer_is_found_out() -> None:
    near = near_with(NOW + 1)
    near.take_due(NOW + 1, 10)

    with pytest.raises(InvariantError, match="1 were handed out, 0 wait"):
        near.check(0)
