from types import SimpleNamespace

import pytest

from duemq_server.broker.groups.progress import Activity, QueueState
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue

KEY = GroupQueue("billing", "orders", 0)


class FakeQueue(SimpleNamespace):
    def entry(self, offset: int) -> tuple[int, ...]:
        if offset < self.min_offset:
            raise IndexError(offset)
        return (0, 0, 0, 0, 0, 1_000 + offset)

    entry_from = entry


def state(
    offset: int, *, settled: tuple[int, ...] = (), pulled: int = 0, low: int = 0
) -> QueueState:
    queue = FakeQueue(min_offset=low, max_offset=100)
    return QueueState(queue, GroupOffset(offset, 1), settled, pulled)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "waiting"),
    [
        (state(10), 10),
        (state(10, settled=(10, 11, 13)), 12),
        (state(10, settled=(12,)), 10),
        (state(5, low=20), 20),
        (state(98, settled=(98, 99)), 100),
    ],
)
def test_the_oldest_that_needs_a_delivery(given: QueueState, waiting: int) -> None:
    assert given.waiting_offset == waiting


def test_lag_is_the_age_of_the_oldest_that_waits() -> None:
    assert state(10, settled=(10,)).lag_ms(2_000) == 2_000 - 1_011
    assert state(100).lag_ms(2_000) == 0
    assert state(10).lag_ms(500) == 0  # a clock that was set back


def test_in_flight_is_what_was_handed_out_and_is_not_done() -> None:
    assert state(10, pulled=20).in_flight == 10
    assert state(10, pulled=20, settled=(12, 19, 25)).in_flight == 8
    assert state(10, pulled=0).in_flight == 0


def test_activity_is_bounded_and_forgets_what_is_gone() -> None:
    activity = Activity(entries_max=1)
    other = KEY._replace(queue_id=1)
    activity.pulled(KEY, 5)
    activity.pulled(KEY, 7)
    activity.pulled(other, 9)
    activity.committed(KEY, 1_000)
    assert [activity.pulled_to(key) for key in (KEY, other)] == [7, 0]
    assert activity.committed_ms(KEY) == 1_000
    activity.prune(lambda key: False)
    assert (activity.pulled_to(KEY), activity.committed_ms(KEY)) == (0, 0)


def test_a_move_forgets_what_was_handed_out() -> None:
    activity = Activity()
    activity.pulled(KEY, 5)
    activity.forget_pull(KEY)
    assert activity.pulled_to(KEY) == 0


def test_a_topic_and_a_group_that_are_made_anew_were_given_nothing() -> None:
    activity = Activity()
    others = [KEY._replace(group="another"), KEY._replace(topic="another")]
    for key in (KEY, *others):
        activity.pulled(key, 5)
        activity.committed(key, 1_000)
    activity.forget(topic=KEY.topic)
    assert [activity.pulled_to(key) for key in (KEY, *others)] == [0, 0, 5]
    assert [activity.committed_ms(key) for key in (KEY, *others)] == [0, 0, 1_000]
    activity.forget(group=KEY.group)
    assert activity.pulled_to(others[1]) == 0
