from duemq_server.timer_service.scheduling.clocks import (
    STEP_MS_MIN,
    WINDOW_MS,
    BrokerClock,
    ClockSteps,
)

NOW = 1_700_000_000_000


def test_the_smallest_difference_within_a_while_counts() -> None:
    clock = BrokerClock()
    assert (clock.known, clock.ahead_ms) == (False, 0)
    for answer_took_ms in (40, 3, 90):
        clock.observe(NOW + 2_000 + answer_took_ms, NOW, 0)
    assert clock.ahead_ms == 2_003


def test_a_difference_that_grew_is_believed_after_a_while() -> None:
    clock = BrokerClock()
    for second in range(60):
        ahead_ms = 0 if second < 20 else 500
        clock.observe(NOW + 1_000 * second + ahead_ms, NOW + 1_000 * second, 1_000 * second)
        assert clock.ahead_ms in (0, 500)
    assert clock.ahead_ms == 500
    clock.observe(NOW - 7, NOW, 60_000)
    assert clock.ahead_ms == -7


def test_the_broker_is_not_set_with_this_machine_s_clock() -> None:
    clock = BrokerClock()
    clock.clock_set(3_600_000)
    assert (clock.known, clock.ahead_ms) == (False, 0)
    clock.observe(NOW + 50, NOW, 0)
    clock.clock_set(3_600_000)
    assert clock.ahead_ms == 3_600_050
    clock.clock_set(-600_000)
    assert clock.ahead_ms == 3_000_050


def test_the_first_answer_after_the_clock_was_set_counts_alone() -> None:
    """Also where the broker was set back with it, which the smallest difference would hide."""
    for step_ms in (3_600_000, -3_600_000):
        clock = BrokerClock()
        clock.observe(NOW, NOW, 0)
        clock.clock_set(step_ms)
        clock.observe(NOW + WINDOW_MS, NOW, 1)
        assert clock.ahead_ms == WINDOW_MS
        clock.observe(NOW + 3, NOW, 2)
        assert clock.ahead_ms == 3


def test_a_set_clock_is_noticed_once_and_slewing_adds_up() -> None:
    watch = ClockSteps(NOW, 5)
    assert watch.look(NOW + 1_000, 1_005) == 0
    assert watch.look(NOW - 3_598_000, 2_005) == -3_600_000
    assert watch.look(NOW - 3_597_000, 3_005) == 0
    slewed = [watch.look(NOW - 3_597_000 + 1_001 * n, 3_005 + 1_000 * n) for n in range(500)]
    assert sum(slewed) >= 4 * STEP_MS_MIN
    assert set(slewed) == {0, STEP_MS_MIN}
