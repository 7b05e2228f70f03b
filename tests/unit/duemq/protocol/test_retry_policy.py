from datetime import timedelta

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.retry_policy import DEFAULT_POLICY, ExponentialDelays, RetryPolicy, policy_of

# rocketmq.md §4.4: attempts 1 to 16.
ROCKETMQ_TABLE_S = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]


def test_delays_are_written_as_text_or_as_a_list() -> None:
    expected = RetryPolicy(3, (1_000, 60_000))
    assert policy_of(3, "1s 1m") == expected
    assert policy_of(3, ["1s", timedelta(minutes=1)]) == expected
    assert policy_of(3, [1, 60.0]) == expected


def test_exponential_delays_are_written_as_a_tuple() -> None:
    policy = policy_of(exponential=("5s", 2.0, "2h"))
    assert policy.exponential == ExponentialDelays(5_000, 2.0, 7_200_000)
    assert policy_of(exponential=policy.exponential) == policy


def test_what_is_not_given_is_the_brokers() -> None:
    assert policy_of() == RetryPolicy(None, (), None)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"retries_max": 1_001}, "retries_max"),
        ({"retries_max": -1}, "retries_max"),
        ({"retry_delays": "1s soon"}, "retry_delays"),
        ({"retry_delays": " "}, "retry_delays"),
        ({"retry_delays": []}, "retry_delays"),
        ({"retry_delays": "1s", "exponential": ("1s", 2, "1m")}, "exponential"),
    ],
)
def test_illegal_policies(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        policy_of(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_brokers_own_table_is_rocketmqs() -> None:
    policy = DEFAULT_POLICY
    delays = [policy.delay_ms(retry) for retry in range(1, (policy.retries_max or 0) + 1)]
    assert delays == [1_000 * seconds for seconds in ROCKETMQ_TABLE_S]
    deliveries = 1 + len(delays)
    assert deliveries == 17
    assert sum(delays) == 17_140_000  # 4 h 45 min 40 s


def test_the_last_delay_of_a_table_is_that_of_all_beyond() -> None:
    policy = RetryPolicy(9, (1_000, 5_000))
    assert [policy.delay_ms(retry) for retry in (1, 2, 3, 9)] == [1_000, 5_000, 5_000, 5_000]


def test_exponential_delays_stop_growing() -> None:
    delays = ExponentialDelays(5_000, 2.0, 7_200_000)  # RocketMQ's: 5 s * 2^n, 2 h at most
    assert [delays.delay_ms(retry) for retry in (1, 2, 3, 11, 12)] == [
        5_000,
        10_000,
        20_000,
        5_120_000,
        7_200_000,
    ]
    steepest = ExponentialDelays(1, 100.0, 60_000)
    assert steepest.delay_ms(1_000) == 60_000
    assert ExponentialDelays(1_000, 1.0, 1_000).delay_ms(1_000) == 1_000
