import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.errors import Overloaded
from duemq_server.broker.reading.waiters import Waiters

A, B = ("orders", 0), ("orders", 1)


def test_an_append_wakes_those_who_wait_for_the_queue_and_nobody_else() -> None:
    waiters: Waiters[str] = Waiters()
    waiters.park("first", [A, B], 100)
    waiters.park("second", [B], 100)
    assert waiters.wake(A) == ["first"]
    assert waiters.wake(A) == []
    assert waiters.wake(B) == ["second"]
    assert len(waiters) == 0


def test_deadlines_come_in_order_and_only_for_the_parked() -> None:
    waiters: Waiters[str] = Waiters()
    waiters.park("late", [A], 300)
    waiters.park("soon", [A], 100)
    waiters.park("gone", [A], 50)
    waiters.cancel("gone")
    assert waiters.next_ms() == 100
    assert waiters.expire(99) == []
    assert waiters.expire(100) == ["soon"]
    assert waiters.next_ms() == 300
    assert waiters.expire(1_000) == ["late"]
    assert waiters.next_ms() is None


def test_a_waiter_may_park_again_with_another_deadline() -> None:
    waiters: Waiters[str] = Waiters()
    waiters.park("w", [A], 100)
    waiters.wake(A)
    waiters.park("w", [A], 200)
    assert waiters.expire(150) == []
    assert "w" in waiters
    assert waiters.next_ms() == 200


def test_a_waiter_that_names_a_queue_twice_is_woken_once() -> None:
    made: Waiters[str] = Waiters()
    made.park("a", [("t", 0), ("t", 0)], 10)
    assert made.wake(("t", 0)) == ["a"]
    assert made.wake(("t", 0)) == []
    made.park("a", [("t", 0), ("t", 0)], 10)
    assert made.cancel("a")


def test_cancel_says_whether_there_was_anybody() -> None:
    waiters: Waiters[str] = Waiters()
    waiters.park("w", [A], 100)
    assert waiters.cancel("w")
    assert not waiters.cancel("w")


def test_the_number_of_waiters_is_bounded() -> None:
    waiters: Waiters[int] = Waiters(waiters_max=2)
    waiters.park(1, [A], 1)
    waiters.park(2, [A], 1)
    with pytest.raises(Overloaded) as caught:
        waiters.park(3, [A], 1)
    assert caught.value.limit == "2"


@pytest.mark.parametrize(
    ("most", "fits"), [({"places_max": 8}, [[A, B], [A], [B]]), ({"waiters_max": 2}, [[A], [B]])]
)
def test_queues_that_are_waited_for_are_bounded_too(
    most: dict[str, int], fits: list[list[tuple[str, int]]]
) -> None:
    waiters: Waiters[int] = Waiters(**most)
    for number in range(4 if "places_max" in most else 2):
        waiters.park(number, fits[0], 1, f"c{number}")
    with pytest.raises(Overloaded):
        waiters.park(9, [A], 1, "c9")
    assert waiters.cancel(0)
    waiters.park(9, [A], 1, "c9")
    assert waiters.places == sum(len(wait.keys) for wait in waiters._parked.values())


def test_a_connection_takes_a_part_and_leaves_the_rest_to_others() -> None:
    waiters: Waiters[int] = Waiters(waiters_max=8, places_max=100)
    waiters.park(1, [A], 1, "greedy")
    waiters.park(2, [A], 1, "greedy")
    with pytest.raises(Overloaded, match="for this connection"):
        waiters.park(3, [A], 1, "greedy")
    waiters.park(3, [A], 1, "modest")
    waiters.wake(A)
    assert waiters._connections == {}
    waiters.park(1, [A], 1, "greedy")


def test_one_alone_may_wait_for_more_than_is_allowed() -> None:
    waiters: Waiters[int] = Waiters(places_max=1)
    waiters.park(1, [A, B], 1, "c")


def test_the_heap_does_not_grow_with_those_woken() -> None:
    waiters: Waiters[int] = Waiters()
    for number in range(10_000):
        waiters.park(number, [A], 1_000_000)
        waiters.wake(A)
    assert len(waiters._deadlines) < 200


@given(st.lists(st.tuples(st.sampled_from("pwce"), st.integers(0, 5), st.integers(0, 50))))
def test_a_waiter_is_given_out_once(steps: list[tuple[str, int, int]]) -> None:
    waiters: Waiters[int] = Waiters()
    parked: dict[int, int] = {}
    for step, number, time_ms in steps:
        if step == "p" and number not in parked:
            waiters.park(number, [("t", number % 2)], time_ms)
            parked[number] = time_ms
        elif step == "w":
            woken = set(waiters.wake(("t", number % 2)))
            assert woken == {n for n in parked if n % 2 == number % 2}
            parked = {n: t for n, t in parked.items() if n not in woken}
        elif step == "c":
            assert waiters.cancel(number) == (parked.pop(number, None) is not None)
        elif step == "e":
            expired = set(waiters.expire(time_ms))
            assert expired == {n for n, t in parked.items() if t <= time_ms}
            parked = {n: t for n, t in parked.items() if n not in expired}
        assert waiters.next_ms() == min(parked.values(), default=None)
        assert len(waiters) == len(parked)
