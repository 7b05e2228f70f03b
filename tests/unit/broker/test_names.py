"""What names are legal, and what is said of those that are not."""

import pytest

from broker import names
from duemq.errors import InvalidArgument


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 128])
def test_an_illegal_name_is_refused_by_a_rule_that_would_be_accepted(name: str) -> None:
    with pytest.raises(InvalidArgument, match="not a legal name") as refused:
        names.check_topic(name)
    assert "%" not in refused.value.limit, "no topic of a user's has it"
    with pytest.raises(InvalidArgument, match="not a legal name") as refused:
        names.check_group(name)
    assert refused.value.limit == "1 to 127 of [A-Za-z0-9_%|-]"
    names.check_group("50%|off")


@pytest.mark.parametrize("name", ["a b", names.TIMER_GROUP])
def test_the_field_that_is_wrong_is_named(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        names.check_own_group(name, "to_group")
    assert refused.value.field == "to_group"
    assert str(refused.value).startswith("to_group: ")
