import pytest

from duemq.errors import InvalidArgument
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from tests.unit.broker.groups.coordinating import (
    T0,
    TIMEOUT_MS,
    hello,
    new_coordinator,
    queues,
    told,
)

SQL = 1


def reading(member_id: str, wanted: dict[str, TopicFilter], **rest) -> Hello:
    return Hello("g", member_id, wanted, **rest)


@pytest.mark.parametrize(
    ("first", "second", "topic"),
    [
        ({"orders": TopicFilter("a")}, {"orders": TopicFilter("b")}, "orders: filter 'b'"),
        ({"orders": TopicFilter("a")}, {"orders": TopicFilter()}, "orders: filter '*'"),
        (
            {"orders": TopicFilter("a")},
            {"orders": TopicFilter("a", SQL)},
            "orders: filter 'a' (SQL)",
        ),
        (
            {"orders": TopicFilter("x = 1", SQL)},
            {"orders": TopicFilter("x = 2", SQL)},
            "orders: filter 'x = 2' (SQL)",
        ),
        ({"orders": TopicFilter()}, {"bills": TopicFilter()}, "bills: filter '*'"),
        (
            {"orders": TopicFilter(), "bills": TopicFilter()},
            {"orders": TopicFilter()},
            "bills: not subscribed",
        ),
    ],
)
def test_a_member_that_reads_something_else_is_refused(first, second, topic: str) -> None:
    coordinator = new_coordinator()
    coordinator.join(reading("m1", first), T0)
    with pytest.raises(InvalidArgument) as refused:
        coordinator.join(reading("m2", second), T0)
    assert (refused.value.field, refused.value.value) == ("subscriptions", topic)
    assert refused.value.limit.startswith(topic.partition(":")[0])
    assert "duemq group clone" in refused.value.message
    assert coordinator.group("g").members.keys() == {"m1"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TopicFilter(), TopicFilter("*")),
        (TopicFilter("a || b"), TopicFilter("b||a")),
        (TopicFilter("x = 1", SQL), TopicFilter(" x = 1\n", SQL)),
    ],
)
def test_filters_that_say_the_same_are_the_same(first: TopicFilter, second: TopicFilter) -> None:
    coordinator = new_coordinator()
    coordinator.join(reading("m1", {"orders": first}), T0)
    step = coordinator.join(reading("m2", {"orders": second}), T0)
    assert len(step.assignments) == 2


def test_a_member_that_is_alone_may_change_what_it_reads() -> None:
    coordinator = new_coordinator()
    coordinator.join(reading("m1", {"orders": TopicFilter("a")}), T0)
    step = coordinator.join(reading("m1", {"orders": TopicFilter("b")}, owned=queues(0)), T0)
    assert told(step) == {"m1": (0, 1, 2, 3)}


def test_former_members_decide_what_a_group_reads_when_it_has_moved() -> None:
    coordinator = new_coordinator()
    coordinator.join(reading("m0", {"orders": TopicFilter("b")}), T0, known_generation=7)
    coordinator.join(reading("m5", {"orders": TopicFilter("b")}), T0)
    names = ("m1", "m2")
    step = coordinator.join(hello("m1", generation=7, owned=queues(0, 1), members=names), T0)
    assert [(each.member_id, each.error.field) for each in step.turned_out] == [
        ("m0", "subscriptions"),
        ("m5", "subscriptions"),
    ]
    assert told(step) == {"m1": (0, 1)}
    with pytest.raises(InvalidArgument):
        coordinator.join(reading("m0", {"orders": TopicFilter("b")}), T0)
    with pytest.raises(InvalidArgument):  # among former members the first one decides
        coordinator.join(reading("m2", {"bills": TopicFilter()}, generation=7), T0)
    step = coordinator.join(hello("m2", generation=7, owned=queues(2, 3), members=names), T0)
    assert told(step) == {"m2": (2, 3)}


def test_former_members_decide_on_the_strategy_too() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m0", strategy="sticky"), T0, known_generation=7)
    step = coordinator.join(hello("m1", generation=7, owned=queues(0, 1, 2, 3)), T0)
    assert [(each.member_id, each.error.field) for each in step.turned_out] == [("m0", "strategy")]
    assert coordinator.group("g").strategy == "average"


def test_former_members_decide_where_nothing_of_them_was_known() -> None:
    coordinator = new_coordinator()
    assert told(coordinator.join(hello("m0", strategy="sticky"), T0)) == {"m0": (0, 1, 2, 3)}
    former = hello("m1", generation=7, owned=queues(0, 1, 2, 3))
    step = coordinator.join(former, T0 + TIMEOUT_MS - 1)
    assert [each.member_id for each in step.turned_out] == ["m0"]
    assert told(step) == {"m1": (0, 1, 2, 3)}


def test_a_group_that_has_settled_is_not_changed_by_one_that_was_away() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m0", strategy="sticky"), T0)
    with pytest.raises(InvalidArgument):
        coordinator.join(hello("m1", generation=7), T0 + TIMEOUT_MS)
    assert coordinator.group("g").members.keys() == {"m0"}
