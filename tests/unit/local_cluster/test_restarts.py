"""Pauses grow with rapid deaths, are forgotten after a stable life, and end."""

from duemq_server.local_cluster.restarts import (
    PAUSE_FIRST_MS,
    PAUSE_MAX_MS,
    RAPID_DEATHS_MAX,
    STABLE_MS,
    RestartPolicy,
)


def test_the_first_death_is_answered_almost_at_once() -> None:
    policy = RestartPolicy()
    policy.started(1_000)
    assert policy.died(1_500) == 1_500 + PAUSE_FIRST_MS


def test_rapid_deaths_double_the_pause_to_its_bound_and_then_end_it() -> None:
    policy = RestartPolicy()
    pauses = []
    for _ in range(RAPID_DEATHS_MAX):
        policy.started(0)
        pauses.append(policy.died(1))
    assert [pause - 1 for pause in pauses[:3]] == [100, 200, 400]
    assert max(pauses) == 1 + PAUSE_MAX_MS
    policy.started(0)
    assert policy.died(1) is None


def test_a_stable_life_forgets_earlier_deaths() -> None:
    policy = RestartPolicy()
    for _ in range(RAPID_DEATHS_MAX):
        policy.started(0)
        policy.died(1)
    policy.started(0)
    assert policy.died(STABLE_MS) == STABLE_MS + PAUSE_FIRST_MS


def test_deaths_that_were_asked_for_are_no_sign_of_anything() -> None:
    policy = RestartPolicy()
    policy.started(0)
    for now_ms in range(2 * RAPID_DEATHS_MAX):
        assert policy.died(now_ms, wanted=True) == now_ms + PAUSE_FIRST_MS
    assert policy.died(100) == 100 + PAUSE_FIRST_MS  # a first one
