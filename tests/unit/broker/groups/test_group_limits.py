import json

import pytest

from duemq.errors import GroupNotFound, InvalidArgument, Overloaded
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from tests.unit.broker.groups.coordinating import (
    T0,
    TIMEOUT_MS,
    hello,
    new_coordinator,
    queues,
    restarted,
    told,
    two_members,
)
from tests.unit.broker.groups.stepping import SteppingCoordinator


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Hello("", "m1", {"orders": TopicFilter()}), "group"),
        (Hello("a b", "m1", {"orders": TopicFilter()}), "group"),
        (Hello("g" * 128, "m1", {"orders": TopicFilter()}), "group"),
        (Hello("g", "", {"orders": TopicFilter()}), "member_id"),
        (Hello("g", "m" * 256, {"orders": TopicFilter()}), "member_id"),
        (Hello("g", "m1", {}), "subscriptions"),
        (Hello("g", "m1", {"orders": TopicFilter()}, session_timeout_ms=999), "session_timeout_ms"),
        (
            Hello("g", "m1", {"orders": TopicFilter()}, session_timeout_ms=300_001),
            "session_timeout_ms",
        ),
        (Hello("g", "m1", {"orders": TopicFilter()}, session_timeout_ms=-1), "session_timeout_ms"),
        (Hello("g", "m1", {"orders": TopicFilter()}, strategy="averge"), "strategy"),
        (hello("m", generation=(1 << 63) - 1), "generation"),
        (hello("m", generation=-1), "generation"),
        (hello("m", topics=("a b",)), "topic"),
        (hello("m", topics=tuple(f"t{n}" for n in range(1_001))), "subscriptions"),
        (hello("m", client="c" * 1_025), "client"),
        (hello("m", owned=queues(*range(65_537))), "owned"),
        (hello("m", members=("m" * 256,)), "members"),
        (hello("m", members=tuple(f"m{n}" for n in range(16_385))), "members"),
    ],
)
def test_a_wrong_hello_is_refused_by_field(wrong: Hello, field: str) -> None:
    coordinator = new_coordinator()
    with pytest.raises(InvalidArgument) as refused:
        coordinator.join(wrong, T0)
    assert refused.value.field == field
    assert refused.value.limit


def test_members_of_a_group_use_one_strategy() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    with pytest.raises(InvalidArgument) as refused:
        coordinator.join(hello("m2", strategy="average-by-circle"), T0)
    assert (refused.value.field, refused.value.limit) == ("strategy", "average")
    coordinator.leave("g", "m1", T0)
    step = coordinator.join(hello("m2", strategy="average-by-circle"), T0)
    assert told(step) == {"m2": (0, 1, 2, 3)}


def test_a_group_can_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duemq_server.broker.groups.arrival.MEMBERS_MAX", 2)
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.join(hello("m2"), T0)
    with pytest.raises(Overloaded) as refused:
        coordinator.join(hello("m3"), T0)
    assert (refused.value.field, refused.value.limit) == ("members", "2")
    coordinator.join(hello("m2"), T0)


def test_a_broker_can_be_full_of_groups() -> None:
    coordinator = new_coordinator(groups_max=1)
    coordinator.join(hello("m1"), T0)
    with pytest.raises(Overloaded) as refused:
        coordinator.join(Hello("g2", "m1", {"orders": TopicFilter()}), T0)
    assert (refused.value.field, refused.value.limit) == ("group", "1")


def test_a_group_that_is_empty_for_longest_makes_room() -> None:
    coordinator = new_coordinator(groups_max=2)
    for number, group in enumerate(("older", "newer")):
        coordinator.join(Hello(group, "m1", {"orders": TopicFilter()}), T0 + number)
    for number, group in enumerate(("older", "newer")):
        coordinator.leave(group, "m1", T0 + 10 + number)
    assert b"older" in coordinator.table.snapshot()
    coordinator.join(hello("m1"), T0 + 20)
    assert sorted(group.name for group in coordinator.groups()) == ["g", "newer"]
    assert b"older" not in coordinator.table.snapshot()


def test_a_snapshot_is_whole_however_little_has_changed() -> None:
    coordinator = new_coordinator()
    for group in ("g1", "g2", "g3"):
        coordinator.join(Hello(group, "m1", {"orders": TopicFilter()}), T0)
    coordinator.table.snapshot()
    coordinator.leave("g1", "m1", T0 + 1)
    coordinator.forget("g1")
    coordinator.join(Hello("g2", "m2", {"orders": TopicFilter()}), T0 + 2)
    kept = json.loads(coordinator.table.snapshot())["groups"]
    assert {name: sorted(group["members"]) for name, group in kept.items()} == {
        "g2": ["m1", "m2"],
        "g3": ["m1"],
    }
    again = SteppingCoordinator("b1")
    again.table.restore(coordinator.table.snapshot(), T0 + 3)
    assert json.loads(again.table.snapshot())["groups"] == kept


def test_a_group_that_may_not_be_made_by_joining_is_refused() -> None:
    def check_known(group: str) -> None:
        raise GroupNotFound(f"no group {group}")

    coordinator = SteppingCoordinator("b1", check_known=check_known)
    coordinator.routes_changed({"orders": queues(0)}, ["b1"], T0)
    with pytest.raises(GroupNotFound):
        coordinator.join(hello("m1"), T0)
    assert not list(coordinator.groups())
    # It is there: it has offsets here, or came with its members from another broker.
    coordinator.join(hello("m1"), T0, known_generation=7)
    coordinator.forget("unknown")
    with pytest.raises(InvalidArgument) as refused:
        coordinator.forget("g")
    assert refused.value.field == "group"
    coordinator.leave("g", "m1", T0)
    coordinator.forget("g")
    coordinator.join(hello("m1", generation=7), T0)


def test_a_group_is_not_deleted_while_members_of_before_a_restart_are_awaited() -> None:
    before, _ = two_members()
    coordinator = restarted(before, T0 + 1_000)
    with pytest.raises(InvalidArgument, match="awaits"):
        coordinator.forget("g")
    coordinator.tick(T0 + 1_000 + TIMEOUT_MS)
    coordinator.forget("g")
    assert not list(coordinator.groups())
