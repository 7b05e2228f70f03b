import pytest

from duemq.errors import DuemqError, InvalidArgument, Overloaded
from duemq.protocol.retry_policy import DEFAULT_POLICY, DELAY_MS_MAX, ExponentialDelays, RetryPolicy
from duemq_server.broker.store import group_configs
from duemq_server.broker.store.group_configs import GroupConfig, GroupConfigs


def configs(**limits: int) -> GroupConfigs:
    return GroupConfigs(DEFAULT_POLICY, **limits)


def test_a_group_says_what_it_wants_and_gets_the_rest_from_the_broker() -> None:
    table = configs()
    table.put(GroupConfig("few", RetryPolicy(retries_max=2)))
    table.put(GroupConfig("fast", RetryPolicy(delays_ms=(5,))))
    table.put(GroupConfig("grows", RetryPolicy(exponential=ExponentialDelays(1, 2, 9))))
    few = table.effective("few").retry
    assert (few.retries_max, few.delay_ms(2)) == (2, 30_000)
    fast = table.effective("fast").retry
    assert (fast.retries_max, fast.delay_ms(7)) == (16, 5)
    grows = table.effective("grows").retry
    assert (grows.retries_max, grows.delay_ms(9), grows.delays_ms) == (16, 9, ())
    table.remove("few")
    assert table.effective("few").retry == DEFAULT_POLICY
    assert "few" not in table
    assert sorted(table) == ["fast", "grows"]


@pytest.mark.parametrize(
    ("policy", "field", "limit"),
    [
        (RetryPolicy(-1), "retries_max", "0 to 1000"),
        (RetryPolicy(1_001), "retries_max", "0 to 1000"),
        (RetryPolicy(delays_ms=(1, -1)), "delays_ms", f"0 to {DELAY_MS_MAX}"),
        (
            RetryPolicy(delays_ms=(DELAY_MS_MAX + 1,)),
            "delays_ms",
            f"0 to {DELAY_MS_MAX}",
        ),
        (RetryPolicy(delays_ms=(1,) * 257), "delays_ms", "at most 256"),
        (
            RetryPolicy(delays_ms=(1,), exponential=ExponentialDelays(1, 2, 3)),
            "exponential",
            "one of delays_ms, exponential",
        ),
        (
            RetryPolicy(exponential=ExponentialDelays(0, 2, 3)),
            "initial_ms",
            f"1 to {DELAY_MS_MAX}",
        ),
        (RetryPolicy(exponential=ExponentialDelays(1, 0.5, 3)), "multiplier", "1 to 100"),
        (RetryPolicy(exponential=ExponentialDelays(1, float("nan"), 3)), "multiplier", "1 to 100"),
        (RetryPolicy(exponential=ExponentialDelays(1, float("inf"), 3)), "multiplier", "1 to 100"),
        (
            RetryPolicy(exponential=ExponentialDelays(5, 2, 4)),
            "max_ms",
            f"5 to {DELAY_MS_MAX}",
        ),
    ],
)
def test_an_illegal_policy_names_field_and_limit(
    policy: RetryPolicy, field: str, limit: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        configs().check(GroupConfig("billing", policy))
    assert (caught.value.field, caught.value.limit) == (field, limit)


@pytest.mark.parametrize("group", ["", "a b", "x" * 128, "%TIMER%"])
def test_an_illegal_group_is_refused(group: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        configs().check(GroupConfig(group))
    assert caught.value.field == "group"


def test_the_number_of_groups_is_bounded() -> None:
    table = configs(groups_max=1)
    table.put(GroupConfig("a"))
    table.check(GroupConfig("a", RetryPolicy(3)))
    with pytest.raises(Overloaded):
        table.check(GroupConfig("b"))


def test_the_checkpoint_round_trips() -> None:
    table = configs()
    for config in (
        GroupConfig("a"),
        GroupConfig("b", RetryPolicy(0, (1, 2))),
        GroupConfig("c", RetryPolicy(None, (), ExponentialDelays(1, 1.5, 8))),
    ):
        table.put(config)
    again = configs()
    again.load(table.freeze()())
    assert again.freeze()() == table.freeze()()
    assert again.effective("c") == table.effective("c")


def test_an_unknown_group_is_told_what_to_do() -> None:
    error: DuemqError = group_configs.not_found("billing")
    assert "billing" in str(error)
    assert "auto_create_groups" in str(error)
