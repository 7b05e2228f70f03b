from broker.clock import JUMP_MS, SETTLED_MS, ClockWatch

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
