import numpy as np
import pytest

from duemq.errors import InvariantError
from duemq_server.timer_service.timers.wheel import SPAN_MS, Wheel

NOW = 1_700_000_000_000
MANY = 1 << 20


def wheel_with(*due_ms: int, now_ms: int = NOW) -> Wheel:
    wheel = Wheel(now_ms)
    wheel.add(np.arange(len(due_ms), dtype=np.int32), np.array(due_ms, dtype=np.int64))
    return wheel


def test_an_empty_wheel_has_nothing_due() -> None:
    wheel = Wheel(NOW)

    assert wheel.next_due_ms() is None
    assert wheel.advance(NOW + 10, MANY).tolist() == []
    assert wheel.now_ms == NOW + 10


def test_a_timer_comes_out_at_its_millisecond_and_not_before() -> None:
    wheel = wheel_with(NOW + 7)

    assert wheel.next_due_ms() == NOW + 7
    assert wheel.advance(NOW + 6, MANY).tolist() == []
    assert wheel.advance(NOW + 7, MANY).tolist() == [0]
    assert len(wheel) == 0


def test_timers_come_out_in_due_order_and_within_a_millisecond_first_in_first_out() -> None:
    wheel = wheel_with(NOW + 3, NOW + 1, NOW + 3, NOW + 2)
    wheel.add(np.array([9], dtype=np.int32), np.array([NOW + 3]))

    assert wheel.advance(NOW + 3, MANY).tolist() == [1, 3, 0, 2, 9]


def test_many_timers_are_linked_like_few() -> None:
    due_ms = [NOW + 1 + n % 5 for n in range(100)]
    wheel = wheel_with(*due_ms)
    wheel.add(np.array([100], dtype=np.int32), np.array([NOW + 1]))

    expected = sorted([*range(100), 100], key=lambda n: due_ms[n] if n < 100 else NOW + 1)
    assert wheel.advance(NOW + 5, MANY).tolist() == expected


def test_a_timer_that_is_already_due_comes_out_at_once() -> None:
    wheel = wheel_with(NOW - 5, NOW + 1, NOW - 9, NOW)

    assert wheel.next_due_ms() == NOW - 9
    assert wheel.advance(NOW, MANY).tolist() == [2, 0, 3]
    assert wheel.next_due_ms() == NOW + 1


def test_a_clock_that_went_back_lets_nothing_out_early() -> None:
    wheel = Wheel(NOW)
    wheel.add(np.array([1], dtype=np.int32), np.array([NOW - 10]))

    assert wheel.advance(NOW - 11, MANY).tolist() == []
    assert wheel.next_due_ms() == NOW - 10
    assert wheel.advance(NOW - 10, MANY).tolist() == [1]
    assert wheel.now_ms == NOW


def test_a_hot_millisecond_is_split() -> None:
    wheel = wheel_with(*[NOW + 4] * 10, NOW + 5)

    assert wheel.advance(NOW + 9, 4).tolist() == [0, 1, 2, 3]
    assert wheel.next_due_ms() == NOW + 4
    assert wheel.advance(NOW + 9, 4).tolist() == [4, 5, 6, 7]
    assert wheel.advance(NOW + 9, 4).tolist() == [8, 9, 10]


def test_due_times_go_round_the_ring() -> None:
    wheel = wheel_with(NOW + SPAN_MS - 1)
    wheel.advance(NOW + 1_000, MANY)
    wheel.add(np.array([5], dtype=np.int32), np.array([NOW + SPAN_MS + 900]))

    assert wheel.next_due_ms() == NOW + SPAN_MS - 1
    assert wheel.advance(NOW + 2 * SPAN_MS, MANY).tolist() == [0, 5]


def test_a_due_time_past_the_span_is_a_bug_of_the_caller() -> None:
    wheel = Wheel(NOW)

    with pytest.raises(InvariantError, match="horizon"):
        wheel.add(np.array([0], dtype=np.int32), np.array([NOW + SPAN_MS]))


def test_replace_holds_what_it_is_given_and_nothing_else() -> None:
    wheel = wheel_with(NOW - 2, NOW - 1, NOW + 5, NOW + 6)

    wheel.replace(np.array([1, 3], dtype=np.int32), np.array([NOW - 1, NOW + 6]))

    assert len(wheel) == 2
    assert wheel.advance(NOW, MANY).tolist() == [1]
    assert wheel.advance(NOW + 10, MANY).tolist() == [3]


def test_it_tells_what_may_be_sooner_than_it_said() -> None:
    wheel, told = Wheel(NOW), []
    wheel.on_sooner = told.append

    wheel.add(np.array([0, 1], dtype=np.int32), np.array([NOW + 7, NOW + 5]))
    wheel.replace(np.array([0], dtype=np.int32), np.array([NOW + 7]))

    assert told == [NOW + 5, NOW + 7]
