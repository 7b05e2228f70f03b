import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.due import DEFAULT_LEVELS, LEVELS_MAX, parse_levels


def test_the_default_table_has_rocketmqs_eighteen_levels() -> None:
    levels = parse_levels(DEFAULT_LEVELS)
    assert len(levels) == 18
    assert levels[:3] == (1_000, 5_000, 10_000)
    assert levels[-1] == 7_200_000


@pytest.mark.parametrize(
    "text", ["", "1", "1x", "s", "-1s", "1s,2s", "1s " * (LEVELS_MAX + 1), "١s"]
)
def test_a_table_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_levels(text, "retry_delays")
    assert refused.value.field == "retry_delays"


def test_units_may_differ_within_a_table() -> None:
    assert parse_levels("1ms 2s 3m 4h 5d") == (1, 2_000, 180_000, 14_400_000, 432_000_000)
