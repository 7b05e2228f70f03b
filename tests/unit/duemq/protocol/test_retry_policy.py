from datetime import timedelta

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.retry_policy import ExponentialDelays, RetryPolicy, policy_of


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
        ({"retry_delays": "1s soon"}, "delay"),
        ({"retry_delays": " "}, "retry_delays"),
        ({"retry_delays": []}, "retry_delays"),
        ({"retry_delays": "1s", "exponential": ("1s", 2, "1m")}, "exponential"),
    ],
)
def test_illegal_policies(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        policy_of(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
