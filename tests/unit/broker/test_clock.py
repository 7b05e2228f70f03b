import pytest

from duemq_server.broker.clock import (
    JUMP_MS,
    SET_BACK_KEPT_MS,
    SET_BACK_MS_MIN,
    SETTLED_MS,
    ClockWatch,
    DueClock,
)

NOW_MS = 1_760_000_000_000
DAY_MS = 86_400_000


def test_a_clock_that_goes_on_evenly_is_believed() -> None:
    clock = ClockWatch(NOW_MS - 5, NOW_MS, 77)
    assert clock.is_settled(77)
    for second in range(1, 10):
        # A clock that is corrected slowly does not jump.
        assert clock.look(NOW_MS + second * 1_100, 77 + second * 1_000) == 0
    assert clock.is_settled(10_000)


def test_a_jump_is_told_once_and_is_not_believed_for_an_hour() -> None:
    for jump in (4 * DAY_MS, -4 * DAY_MS, JUMP_MS + 1):
        clock = ClockWatch(NOW_MS, NOW_MS, 0)
        assert clock.look(NOW_MS + 5_000 + jump, 5_000) == jump
        assert clock.look(NOW_MS + 10_000 + jump, 10_000) == 0
        assert not clock.is_settled(5_000 + SETTLED_MS - 1)
        assert clock.is_settled(5_000 + SETTLED_MS)


def test_a_clock_that_comes_back_has_jumped_again() -> None:
    clock = ClockWatch(NOW_MS, NOW_MS, 0)
    clock.look(NOW_MS + DAY_MS, 5_000)
    assert clock.look(NOW_MS + 10_000, 10_000) == 5_000 - DAY_MS
    assert not clock.is_settled(5_000 + SETTLED_MS)


def test_after_a_long_time_off_the_clock_is_not_believed_at_once() -> None:
    assert not ClockWatch(NOW_MS - DAY_MS, NOW_MS, 0).is_settled(SETTLED_MS - 1)
    assert not ClockWatch(NOW_MS + DAY_MS, NOW_MS, 0).is_settled(0)
    assert ClockWatch(NOW_MS - DAY_MS, NOW_MS, 0).is_settled(SETTLED_MS)


@pytest.mark.parametrize("back_ms", [SET_BACK_MS_MIN + 10, 3_600_000])
def test_what_was_due_before_the_clock_was_set_back_is_due_for_a_while(back_ms: int) -> None:
    clock = DueClock(NOW_MS, 0)
    assert clock.look(NOW_MS + 10_000, 10_000) == 0
    for passed, back in ((10_003, back_ms), (20_000, 0), (SET_BACK_KEPT_MS, 0)):
        assert clock.look(NOW_MS + passed - back_ms, passed) == back
        assert clock.of(NOW_MS + passed) == NOW_MS + passed
    passed = 10_003 + SET_BACK_KEPT_MS
    clock.look(NOW_MS + passed - back_ms, passed)
    assert clock.of(NOW_MS + passed) == NOW_MS + passed - back_ms


def test_what_is_due_soon_after_the_clock_was_set_back_waits_for_it() -> None:
    clock = DueClock(NOW_MS, 0)
    clock.look(NOW_MS + 5 - 3_600_000, 5)
    now_ms = NOW_MS + 5 - 3_600_000
    for later_ms in (0, 3, SET_BACK_MS_MIN):
        assert clock.of(now_ms + later_ms) == now_ms
        assert not clock.was_due(now_ms + later_ms)
    assert clock.was_due(now_ms + SET_BACK_MS_MIN + 1)


def test_a_clock_set_back_twice_is_due_by_its_furthest() -> None:
    clock = DueClock(NOW_MS, 0)
    assert clock.look(NOW_MS + 1_000 - 5_000, 1_000) == 5_000
    assert clock.look(NOW_MS + 2_000 - 9_000, 2_000) == 4_000
    assert clock.of(NOW_MS) == NOW_MS + 2_000


def test_a_clock_set_ahead_or_slewed_is_what_it_says() -> None:
    clock = DueClock(NOW_MS, 0)
    for now_ms, steady_ms in ((1_000, 1_000), (90_000, 2_000), (90_500, 3_000), (90_900, 4_000)):
        assert clock.look(NOW_MS + now_ms, steady_ms) == 0
        for due_ms in (0, NOW_MS + now_ms + 3, NOW_MS + DAY_MS):
            assert clock.of(due_ms) == NOW_MS + now_ms
