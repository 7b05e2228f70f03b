"""What names are legal, and what is said of those that are not."""

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol import names


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 128])
def test_an_illegal_name_is_refused_by_a_rule_that_would_be_accepted(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not allowed") as refused:
        names.check_topic(name)
    assert "%" not in refused.value.limit, "no topic of a user's has it"
    with pytest.raises(InvalidArgument, match="is not allowed") as refused:
        names.check_group(name)
    assert refused.value.limit == "1 to 127 of [A-Za-z0-9_%|-]"
    names.check_group("50%|off")


@pytest.mark.parametrize("name", ["orders.eu.v2", ".x", "x.", "...", "a..b", "x" * 127])
def test_topics_may_have_dots(name: str) -> None:
    names.check_topic(name)


@pytest.mark.parametrize("name", [".", ".."])
def test_no_topic_is_called_as_a_directory_is(name: str) -> None:
    with pytest.raises(InvalidArgument, match="neither"):
        names.check_topic(name)


@pytest.mark.parametrize("name", ["a b", names.TIMER_GROUP])
def test_the_field_that_is_wrong_is_named(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        names.check_own_group(name, "to_group")
    assert refused.value.field == "to_group"
    assert str(refused.value).startswith("to_group: ")
