import json
from typing import Any
from zlib import crc32

import pytest

from duemq.errors import (
    FencedMember,
    GroupNotFound,
    InvalidArgument,
    NotCoordinator,
    NotReady,
    Overloaded,
)
from duemq.protocol.balance import MessageQueue
from duemq.protocol.balance import coordinator as coordinator_of
from duemq.protocol.pieces import PIECE, Pieces, finish
from duemq_server.broker.groups.coordinator import (
    EMPTY_GROUP_KEPT_MS,
    STALL_MS_MAX,
    Assignment,
    Coordinator,
    Step,
)
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from duemq_server.broker.store.offsets import CLOCK_MS_MIN, GENERATION_MARKS, newest_generation

T0 = 1_700_000_000_000
TIMEOUT_MS = 10_000
MARK = crc32(b"b1") % GENERATION_MARKS
# Of b1, made at T0.
FIRST = T0 * GENERATION_MARKS + MARK


def queues(*ids: int, topic: str = "orders", broker: str = "b1") -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, broker, queue_id) for queue_id in ids)


def hello(member_id: str, *, topics=("orders",), **rest) -> Hello:
    return Hello("g", member_id, dict.fromkeys(topics, TopicFilter()), **rest)


def new_coordinator(queue_count: int = 4, **options: Any) -> Coordinator:
    made = Coordinator("b1", session_timeout_ms=TIMEOUT_MS, **options)
    made.routes_changed({"orders": queues(*range(queue_count))}, ["b1"], T0)
    return made


def told(step: Step) -> dict[str, tuple[int, ...]]:
    """Member → ids of the queues that it is told to own."""
    return {each.member_id: tuple(q.queue_id for q in each.queues) for each in step.assignments}


def only(step: Step) -> Assignment:
    (assignment,) = step.assignments
    return assignment


# --- sharing ----------------------------------------------------------------------------------


def test_the_first_member_of_a_new_group_gets_everything_at_once() -> None:
    assignment = only(new_coordinator().join(hello("m1"), T0))
    assert assignment == Assignment("g", "m1", FIRST, queues(0, 1, 2, 3), ("m1",))


def test_a_queue_is_released_before_it_is_given_away() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    step = coordinator.join(hello("m2"), T0 + 1)
    assert told(step) == {"m1": (0, 1), "m2": ()}
    generation = step.assignments[0].generation
    assert generation > T0
    step = coordinator.released("g", "m1", generation, queues(2), T0 + 2)
    assert told(step) == {"m2": (2,)}
    step = coordinator.released("g", "m1", generation, queues(3), T0 + 3)
    assert only(step) == Assignment("g", "m2", generation, queues(2, 3), ("m1", "m2"))


def test_the_next_owner_gets_a_released_queue_if_the_first_one_died_meanwhile() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.join(hello("m2"), T0)
    step = coordinator.leave("g", "m2", T0 + 5)
    assert told(step) == {"m1": (0, 1, 2, 3)}


def test_everyone_is_told_who_the_members_are_and_keeps_what_need_not_move() -> None:
    coordinator = new_coordinator(queue_count=2)
    coordinator.join(hello("m1"), T0)
    generation = coordinator.join(hello("m2"), T0).assignments[0].generation
    coordinator.released("g", "m1", generation, queues(1), T0)
    step = coordinator.join(hello("m3"), T0)
    assert told(step) == {"m1": (0,), "m2": (1,), "m3": ()}
    assert {each.members for each in step.assignments} == {("m1", "m2", "m3")}
    assert all(each.generation > generation for each in step.assignments)


def test_members_that_a_change_of_the_routes_does_not_concern_are_not_told() -> None:
    coordinator = new_coordinator(queue_count=2)
    coordinator.join(hello("m1"), T0)
    step = coordinator.join(hello("m2"), T0)
    coordinator.released("g", "m1", step.assignments[0].generation, queues(1), T0)
    assert told(coordinator.routes_changed({"orders": queues(0)}, ["b1"], T0)) == {"m2": ()}


def test_a_generation_stays_while_nothing_changes() -> None:
    coordinator = new_coordinator(queue_count=1)
    first = only(coordinator.join(hello("m1"), T0))
    again = hello("m1", generation=first.generation, owned=first.queues)
    assert only(coordinator.join(again, T0 + 50)).generation == first.generation
    assert coordinator.routes_changed({"orders": queues(0)}, ["b1"], T0).assignments == []


def test_generations_never_go_back_even_if_the_clock_does() -> None:
    coordinator = new_coordinator()
    first = only(coordinator.join(hello("m1"), T0)).generation
    coordinator.leave("g", "m1", T0 - 60_000)
    assert only(coordinator.join(hello("m1"), T0 - 50_000)).generation > first


def test_a_member_that_reports_a_newer_generation_moves_the_groups_on() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    reported = T0 + 1_000_000
    step = coordinator.join(hello("m1", generation=reported, owned=queues(0, 1, 2, 3)), T0)
    assert only(step).generation > reported


def test_a_topic_that_grows_is_shared_anew() -> None:
    coordinator = new_coordinator(queue_count=1)
    coordinator.join(hello("m1"), T0)
    coordinator.join(hello("m2"), T0)
    step = coordinator.routes_changed({"orders": queues(0, 1)}, ["b1"], T0)
    assert told(step) == {"m2": (1,)}


def test_queues_of_a_broker_that_is_gone_are_taken_from_their_owner() -> None:
    coordinator = Coordinator("b1")
    both = queues(0, broker="b1") + queues(0, broker="b0")
    coordinator.routes_changed({"orders": both}, ["b1"], T0)
    coordinator.join(hello("m1"), T0)
    step = coordinator.routes_changed({"orders": queues(0, broker="b1")}, ["b1"], T0)
    assert only(step).queues == queues(0, broker="b1")


def test_a_group_may_wait_for_a_topic_that_is_not_there_yet() -> None:
    coordinator = Coordinator("b1")
    coordinator.routes_changed({}, ["b1"], T0)
    assert only(coordinator.join(hello("m1"), T0)).queues == ()
    step = coordinator.routes_changed({"orders": queues(0)}, ["b1"], T0)
    assert only(step).queues == queues(0)


def test_the_topic_of_retries_is_shared_among_its_subscribers_only() -> None:
    coordinator = new_coordinator(queue_count=2)
    retries = queues(0, topic="%RETRY%g")
    coordinator.routes_changed({"orders": queues(0, 1), "%RETRY%g": retries}, ["b1"], T0)
    coordinator.join(hello("m1"), T0)
    step = coordinator.join(hello("m2", topics=("orders", "%RETRY%g")), T0)
    by_member = {each.member_id: each.queues for each in step.assignments}
    assert by_member == {"m1": queues(0), "m2": retries}


# --- coming back ------------------------------------------------------------------------------


def test_a_member_whose_stream_broke_keeps_its_queues() -> None:
    coordinator = new_coordinator()
    first = only(coordinator.join(hello("m1"), T0))
    again = hello("m1", generation=first.generation, owned=first.queues)
    assert only(coordinator.join(again, T0 + 9_000)) == first


def test_a_release_that_was_lost_on_the_way_is_in_the_next_hello() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    generation = coordinator.join(hello("m2"), T0).assignments[0].generation
    step = coordinator.join(hello("m1", generation=generation, owned=queues(0, 1)), T0)
    assert told(step) == {"m1": (0, 1), "m2": (2, 3)}


def test_a_grant_that_was_lost_on_the_way_is_repeated() -> None:
    coordinator = new_coordinator()
    first = only(coordinator.join(hello("m1"), T0))
    assert only(coordinator.join(hello("m1"), T0)) == first


def test_a_release_overtaken_by_a_new_grant_frees_nothing() -> None:
    coordinator = new_coordinator(queue_count=2)
    coordinator.join(hello("m1"), T0)
    revoked = coordinator.join(hello("m2"), T0 + 1).assignments[0]
    assert told(coordinator.leave("g", "m2", T0 + 2)) == {"m1": (0, 1)}
    # m1's answer to the assignment before the last one
    step = coordinator.released("g", "m1", revoked.generation, queues(1), T0 + 3)
    assert step.assignments == []
    step = coordinator.join(hello("m2"), T0 + 4)
    assert told(step) == {"m1": (0,), "m2": ()}


def test_only_the_holder_releases() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    generation = coordinator.join(hello("m2"), T0).assignments[0].generation
    assert coordinator.released("g", "m2", generation + 1, queues(2, 3), T0).assignments == []


# --- death ------------------------------------------------------------------------------------


def test_a_silent_member_loses_its_queues_after_its_session_timeout() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1", session_timeout_ms=3_000), T0)
    coordinator.join(hello("m2"), T0)
    assert coordinator.next_ms() == T0 + 3_000
    assert coordinator.tick(T0 + 2_999).assignments == []
    coordinator.next_ms()
    assert told(coordinator.tick(T0 + 3_000)) == {"m2": (0, 1, 2, 3)}


def test_every_event_of_a_member_keeps_it_alive() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.heartbeat("g", "m1", T0 + 6_000)
    coordinator.released("g", "m1", 1, (), T0 + 12_000)
    coordinator.tick(T0 + 21_999)
    assert coordinator.heartbeat("g", "m1", T0 + 21_999) == FIRST


def test_a_member_that_is_over_must_join_again() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.tick(T0 + TIMEOUT_MS)
    with pytest.raises(FencedMember):
        coordinator.heartbeat("g", "m1", T0 + TIMEOUT_MS)
    with pytest.raises(FencedMember):
        coordinator.released("g", "m1", T0, (), T0 + TIMEOUT_MS)
    with pytest.raises(FencedMember):
        coordinator.heartbeat("unknown", "m1", T0)


def test_a_coordinator_that_slept_does_not_blame_the_members() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    assert coordinator.next_ms() == T0 + TIMEOUT_MS
    coordinator.tick(T0 + 3_600_000)
    assert coordinator.next_ms() == T0 + 3_600_000 + STALL_MS_MAX
    coordinator.heartbeat("g", "m1", T0 + 3_600_000)
    assert coordinator.next_ms() == T0 + 3_600_000 + TIMEOUT_MS


def test_leaving_twice_is_harmless() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.leave("g", "m1", T0)
    assert coordinator.leave("g", "m1", T0).assignments == []
    assert coordinator.leave("unknown", "m1", T0).assignments == []


# --- restart ----------------------------------------------------------------------------------


def restarted(coordinator: Coordinator, now_ms: int) -> Coordinator:
    made = Coordinator("b1", session_timeout_ms=TIMEOUT_MS)
    made.table.restore(coordinator.table.snapshot(), now_ms)
    made.routes_changed({"orders": queues(0, 1, 2, 3)}, ["b1"], now_ms)
    return made


def two_members() -> tuple[Coordinator, int]:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    generation = coordinator.join(hello("m2"), T0).assignments[0].generation
    coordinator.released("g", "m1", generation, queues(2, 3), T0)
    return coordinator, generation


def test_after_a_restart_members_keep_what_they_had_until_all_are_back() -> None:
    before, generation = two_members()
    coordinator = restarted(before, T0 + 1_000)
    step = coordinator.join(hello("m2", generation=generation, owned=queues(2, 3)), T0 + 1_100)
    assert told(step) == {"m2": (2, 3)}
    step = coordinator.join(hello("m1", generation=generation, owned=queues(0, 1)), T0 + 1_200)
    assert told(step) == {"m1": (0, 1)}
    assert step.assignments[0].generation > generation


def test_after_a_restart_the_queues_of_one_that_never_comes_back_are_given_in_the_end() -> None:
    before, generation = two_members()
    coordinator = restarted(before, T0 + 1_000)
    coordinator.join(hello("m2", generation=generation, owned=queues(2, 3)), T0 + 1_100)
    assert coordinator.next_ms() == T0 + 1_000 + TIMEOUT_MS
    assert told(coordinator.tick(T0 + 1_000 + TIMEOUT_MS)) == {"m2": (0, 1, 2, 3)}


def test_after_a_restart_a_newcomer_waits_too() -> None:
    before, generation = two_members()
    coordinator = restarted(before, T0 + 1_000)
    assert told(coordinator.join(hello("m0"), T0 + 1_100)) == {"m0": ()}
    coordinator.join(hello("m1", generation=generation, owned=queues(0, 1)), T0 + 1_200)
    step = coordinator.join(hello("m2", generation=generation, owned=queues(2, 3)), T0 + 1_300)
    assert told(step) == {"m1": (), "m2": (3,)}  # m0: 0 and 1, m1: 2, as they are released


def test_a_group_whose_members_all_left_is_assigned_at_once_after_a_restart() -> None:
    before, _ = two_members()
    before.leave("g", "m1", T0)
    before.leave("g", "m2", T0)
    coordinator = restarted(before, T0 + 1_000)
    assert told(coordinator.join(hello("m3"), T0 + 1_000)) == {"m3": (0, 1, 2, 3)}


def test_generations_go_on_after_a_restart() -> None:
    before, generation = two_members()
    before.leave("g", "m1", T0)
    before.leave("g", "m2", T0)
    coordinator = restarted(before, T0 - 60_000)
    assert only(coordinator.join(hello("m3"), T0 - 60_000)).generation > generation


def test_a_second_restart_still_knows_who_was_missing() -> None:
    before, generation = two_members()
    once = restarted(before, T0 + 1_000)
    once.join(hello("m2", generation=generation, owned=queues(2, 3)), T0 + 1_100)
    twice = restarted(once, T0 + 2_000)
    step = twice.join(hello("m2", generation=generation, owned=queues(2, 3)), T0 + 2_100)
    assert told(step) == {"m2": (2, 3)}


def test_a_group_that_moved_here_is_held_until_every_queue_is_claimed() -> None:
    coordinator = new_coordinator()
    step = coordinator.join(hello("m2", generation=7, owned=queues(2, 3)), T0)
    assert told(step) == {"m2": (2, 3)}
    step = coordinator.join(hello("m1", generation=7, owned=queues(0, 1)), T0 + 1)
    assert told(step) == {"m1": (0, 1), "m2": (2, 3)}
    assert {each.members for each in step.assignments} == {("m1", "m2")}
    assert step.assignments[0].generation > 7
    assert coordinator.next_ms() == T0 + TIMEOUT_MS  # sessions only


def test_a_group_that_moved_here_is_shared_as_soon_as_the_members_it_names_are_back() -> None:
    # Nobody holds queue 3: its broker was away when the last assignment was made.
    coordinator, names = new_coordinator(), ("m1", "m2")
    one = hello("m1", generation=7, owned=queues(0, 1), members=names)
    assert told(coordinator.join(one, T0)) == {"m1": (0, 1)}
    other = hello("m2", generation=7, owned=queues(2), members=names)
    assert told(coordinator.join(other, T0 + 1)) == {"m2": (2, 3)}


def test_the_newest_list_of_members_counts_for_a_group_that_moved_here() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1", generation=7, owned=queues(0), members=("m1", "m2")), T0)
    newer = hello("m2", generation=8, owned=queues(1), members=("m1", "m2", "m3"))
    # m3 may have queue 2 or 3
    assert told(coordinator.join(newer, T0 + 1)) == {"m1": (0,), "m2": (1,)}
    last = hello("m3", generation=8, owned=queues(2), members=("m1", "m2", "m3"))
    # Shared by the rule: m1 0 and 1, m2 2, m3 3; what moves is released first.
    assert told(coordinator.join(last, T0 + 2)) == {"m2": (), "m3": (3,)}


def test_who_left_is_not_awaited_although_the_others_have_not_heard_of_it() -> None:
    coordinator = new_coordinator()
    both = {"generation": FIRST, "members": ("m1", "m2")}
    coordinator.join(hello("m1", owned=queues(0, 1), **both), T0)
    assert told(coordinator.leave("g", "m1", T0 + 1)) == {}
    step = coordinator.join(hello("m2", owned=queues(2, 3), **both), T0 + 2)
    assert told(step) == {"m2": (0, 1, 2, 3)}
    assert only(step).members == ("m2",)


def test_a_newcomer_does_not_rob_a_group_that_moved_here() -> None:
    coordinator = new_coordinator()
    assert told(coordinator.join(hello("m0"), T0, known_generation=7)) == {"m0": ()}
    step = coordinator.join(hello("m1", generation=7, owned=queues(0, 1, 2, 3)), T0 + 1)
    assert told(step) == {"m0": (), "m1": (2, 3)}
    assert coordinator.next_ms() == T0 + TIMEOUT_MS


def test_a_newcomer_waits_from_when_the_brokers_changed_and_is_told_how_long() -> None:
    coordinator = new_coordinator()
    step = coordinator.join(hello("m0"), T0 + 4_000, known_generation=7)
    assert told(step) == {"m0": ()}
    assert only(step).waits_ms == TIMEOUT_MS - 4_000
    assert coordinator.next_ms() == T0 + TIMEOUT_MS
    step = coordinator.tick(T0 + TIMEOUT_MS)
    assert told(step) == {"m0": (0, 1, 2, 3)}
    assert only(step).waits_ms == 0


def test_a_newcomer_does_not_wait_where_all_have_long_heard_that_the_group_moved() -> None:
    coordinator = new_coordinator()
    coordinator.routes_changed({"orders": queues(0, 1)}, ["b1"], T0 + 5_000)  # the same brokers
    step = coordinator.join(hello("m0"), T0 + TIMEOUT_MS, known_generation=7)
    assert told(step) == {"m0": (0, 1)}


def test_a_member_that_comes_from_elsewhere_has_just_heard() -> None:
    coordinator = new_coordinator()
    later_ms = T0 + 5 * TIMEOUT_MS
    step = coordinator.join(hello("m1", generation=7, owned=queues(0)), later_ms)
    assert told(step) == {"m1": (0,)}
    assert coordinator.next_ms() == later_ms + TIMEOUT_MS


def test_a_claim_on_what_another_one_holds_is_void() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1", generation=7, owned=queues(0, 1)), T0)
    step = coordinator.join(hello("m2", generation=6, owned=queues(1, 2)), T0)
    assert told(step) == {"m2": (2,)}


def test_a_member_that_was_over_cannot_claim_what_was_given_away() -> None:
    coordinator = new_coordinator()
    first = only(coordinator.join(hello("m1"), T0))
    coordinator.tick(T0 + TIMEOUT_MS)
    coordinator.join(hello("m2"), T0 + TIMEOUT_MS)
    back = hello("m1", generation=first.generation, owned=first.queues)
    step = coordinator.join(back, T0 + TIMEOUT_MS + 1)
    assert told(step) == {"m1": (), "m2": (2, 3)}


def test_a_snapshot_is_wanted_after_what_it_holds_has_changed() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    assert coordinator.table.changed
    coordinator.table.snapshot()
    assert not coordinator.table.changed
    coordinator.heartbeat("g", "m1", T0 + 1)
    coordinator.join(hello("m1", owned=queues(0, 1, 2, 3), generation=T0), T0 + 2)
    assert not coordinator.table.changed
    coordinator.join(hello("m2"), T0 + 3)
    assert coordinator.table.changed


def test_a_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        Coordinator("b1").table.restore(b'{"version": 2, "groups": {}}', T0)


def test_empty_groups_are_forgotten_after_a_week() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.leave("g", "m1", T0)
    assert coordinator.next_ms() == T0 + EMPTY_GROUP_KEPT_MS
    assert [group.name for group in coordinator.groups()] == ["g"]
    coordinator.tick(T0 + EMPTY_GROUP_KEPT_MS)
    with pytest.raises(GroupNotFound):
        coordinator.group("g")


# --- whose group ------------------------------------------------------------------------------


def test_another_brokers_group_is_sent_there() -> None:
    coordinator = Coordinator("b1")
    coordinator.routes_changed({}, ["b1", "b2"], T0)
    theirs = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", ["b1", "b2"]) == "b2")
    with pytest.raises(NotCoordinator) as refused:
        coordinator.join(Hello(theirs, "m1", {"orders": TopicFilter()}), T0)
    assert refused.value.limit == "b2"


def test_a_broker_that_knows_no_cluster_is_not_ready() -> None:
    with pytest.raises(NotReady):
        Coordinator("b1").join(hello("m1"), T0)


def test_a_group_moves_when_the_brokers_change() -> None:
    coordinator = new_coordinator()
    theirs = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", ["b1", "b2"]) == "b2")
    coordinator.join(Hello(theirs, "m1", {"orders": TopicFilter()}), T0)
    step = coordinator.routes_changed({"orders": queues(0)}, ["b1", "b2"], T0)
    assert [(each.member_id, each.coordinator) for each in step.moved] == [("m1", "b2")]
    with pytest.raises(GroupNotFound):
        coordinator.group(theirs)


# --- limits -----------------------------------------------------------------------------------


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
        (hello("m", members=tuple(f"m{n}" for n in range(2_001))), "members"),
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
    again = Coordinator("b1")
    again.table.restore(coordinator.table.snapshot(), T0 + 3)
    assert json.loads(again.table.snapshot())["groups"] == kept


def test_a_group_that_may_not_be_made_by_joining_is_refused() -> None:
    def check_known(group: str) -> None:
        raise GroupNotFound(f"no group {group}")

    coordinator = Coordinator("b1", check_known=check_known)
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


# --- the same subscriptions -------------------------------------------------------------------

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


# --- static members ---------------------------------------------------------------------------


def static(member_id: str, incarnation: int, **rest) -> Hello:
    return hello(member_id, incarnation=incarnation, **rest)


def static_pair() -> tuple[Coordinator, int]:
    """Two places, with two queues each."""
    coordinator = new_coordinator()
    coordinator.join(static("s1", 10), T0)
    generation = coordinator.join(static("s2", 10), T0).assignments[0].generation
    coordinator.released("g", "s1", generation, queues(2, 3), T0)
    return coordinator, generation


def test_a_new_process_of_a_static_member_gets_its_queues_under_a_new_generation() -> None:
    coordinator, generation = static_pair()
    assignment = only(coordinator.join(static("s1", 11), T0 + 5_000))
    assert assignment.queues == queues(0, 1)
    assert assignment.generation > generation
    # Of the place, nobody else hears of it.
    assert coordinator.heartbeat("g", "s2", T0 + 5_000) == assignment.generation


def test_an_older_process_of_a_static_member_is_fenced_for_good() -> None:
    coordinator, generation = static_pair()
    coordinator.join(static("s1", 11), T0)
    for older in (static("s1", 10, generation=generation), hello("s1")):
        with pytest.raises(FencedMember) as fenced:
            coordinator.join(older, T0 + 1)
        assert (fenced.value.field, fenced.value.limit) == ("incarnation", "11")
    coordinator.leave("g", "s1", T0 + 1)
    with pytest.raises(FencedMember):
        coordinator.join(static("s1", 10), T0 + 2)
    with pytest.raises(FencedMember):
        restarted(coordinator, T0 + 3).join(static("s1", 10), T0 + 4)


def test_a_static_members_process_that_comes_back_keeps_its_generation() -> None:
    coordinator, generation = static_pair()
    back = static("s1", 10, generation=generation, owned=queues(0, 1))
    assert only(coordinator.join(back, T0 + 1)).generation == generation


def test_a_static_member_that_stays_away_loses_its_queues() -> None:
    coordinator, _ = static_pair()
    coordinator.heartbeat("g", "s2", T0 + 5_000)
    coordinator.next_ms()
    assert told(coordinator.tick(T0 + TIMEOUT_MS)) == {"s2": (0, 1, 2, 3)}
    assert told(coordinator.join(static("s1", 11), T0 + TIMEOUT_MS)) == {"s1": (), "s2": (2, 3)}


def test_a_queue_that_a_replaced_process_was_giving_up_is_free() -> None:
    coordinator = new_coordinator(queue_count=2)
    coordinator.join(static("s1", 10), T0)
    coordinator.join(hello("t"), T0)
    step = coordinator.join(static("s1", 11), T0 + 1)
    assert told(step) == {"s1": (0,), "t": (1,)}


def test_a_static_member_that_restarts_with_its_coordinator_keeps_its_queues() -> None:
    before, generation = static_pair()
    coordinator = restarted(before, T0 + 1_000)
    assert told(coordinator.join(static("s1", 11), T0 + 1_100)) == {"s1": ()}
    back = static("s2", 10, generation=generation, owned=queues(2, 3))
    assert told(coordinator.join(back, T0 + 1_200)) == {"s1": (0, 1), "s2": (2, 3)}


def test_incarnations_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duemq_server.broker.groups.arrival.INCARNATIONS_MAX", 2)
    coordinator = new_coordinator()
    for number, member_id in enumerate(("s1", "s2", "s3")):
        coordinator.join(static(member_id, 10 + number), T0)
        coordinator.leave("g", member_id, T0)
    assert coordinator.group("g").incarnations == {"s2": 11, "s3": 12}


def test_a_snapshot_without_incarnations_is_read() -> None:
    coordinator = Coordinator("b1")
    kept = b'{"g": {"generation": 5, "strategy": "average", "members": {"m1": 1000}}}'
    coordinator.table.restore(b'{"version": 1, "groups": ' + kept + b"}", T0)
    assert coordinator.group("g").incarnations == {}


# --- strategies that look at who has what -----------------------------------------------------


def test_a_queue_on_its_way_is_not_sent_elsewhere_by_a_release() -> None:
    coordinator = new_coordinator(queue_count=5)
    coordinator.join(hello("m1", strategy="sticky"), T0)
    coordinator.join(hello("m2", strategy="sticky"), T0)
    generation = coordinator.join(hello("m3", strategy="sticky"), T0).assignments[0].generation
    going = [q for q, m in coordinator.group("g").target.items() if m != "m1"]
    for queue in going:
        step = coordinator.released("g", "m1", generation, [queue], T0)
        assert only(step).generation == generation
    assert coordinator.group("g").generation == generation


def test_sticky_gives_a_queue_back_to_who_was_fenced_out_of_it() -> None:
    coordinator = new_coordinator(queue_count=5)
    coordinator.join(hello("m1", strategy="sticky"), T0)
    generation = coordinator.join(hello("m2", strategy="sticky"), T0).assignments[0].generation
    target = dict(coordinator.group("g").target)
    for member_id in ("m1", "m2"):
        mine = [q for q, m in target.items() if m == member_id]
        coordinator.released("g", "m1", generation, set(target) - set(mine), T0)
        # An offset was reset: the fence is one above, the queue is not claimed.
        fence = coordinator.group("g").generation + 1
        back = hello(member_id, strategy="sticky", generation=fence, owned=tuple(mine[1:]))
        step = coordinator.join(back, T0)
        assert set(only(step).queues) == set(mine)
        assert only(step).generation > fence
    assert coordinator.group("g").target == target


def test_what_a_member_says_before_it_hears_that_its_group_has_moved_ends_no_session() -> None:
    coordinator = new_coordinator()
    theirs = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", ["b1", "b2"]) == "b2")
    coordinator.join(Hello(theirs, "m1", {"orders": TopicFilter()}), T0)
    coordinator.routes_changed({"orders": queues(0)}, ["b1", "b2"], T0)
    for say in (
        lambda: coordinator.heartbeat(theirs, "m1", T0),
        lambda: coordinator.released(theirs, "m1", T0, (), T0),
        lambda: coordinator.leave(theirs, "m1", T0),
    ):
        with pytest.raises(NotCoordinator) as moved:
            say()
        assert moved.value.limit == "b2"


# --- two that take themselves for the coordinator -----------------------------------------------


def test_two_coordinators_of_one_group_never_make_the_same_generation() -> None:
    one, other = (Coordinator(name, session_timeout_ms=TIMEOUT_MS) for name in ("b1", "b2"))
    made: dict[str, set[int]] = {"b1": set(), "b2": set()}
    for name, coordinator in (("b1", one), ("b2", other)):
        coordinator.routes_changed({"orders": queues(*range(4))}, [name], T0)
        for number in range(20):
            step = coordinator.join(hello(f"{name}-{number}"), T0 + number)
            made[name] |= {each.generation for each in step.assignments}
    assert made["b1"]
    assert made["b2"]
    assert not made["b1"] & made["b2"]


def test_a_made_up_generation_is_counted_on_from_no_further_than_can_be_believed() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("evil", generation=1 << 62), T0)
    coordinator.leave("g", "evil", T0)
    coordinator.join(hello("m1"), T0)
    coordinator.heartbeat("g", "m1", T0 + 1)
    assignment = only(coordinator.tick(T0 + TIMEOUT_MS))
    assert len(assignment.queues) == 4
    newest = newest_generation(T0)
    assert newest < assignment.generation <= newest + 2 * GENERATION_MARKS
    # Brokers believe it in a moment, and what comes after it too.
    assert assignment.generation < newest_generation(CLOCK_MS_MIN + 2)


def test_a_true_generation_of_a_clock_that_was_years_ahead_is_counted_on_from() -> None:
    ahead = (T0 + 5 * 365 * 24 * 3_600_000) * GENERATION_MARKS
    coordinator = new_coordinator()
    coordinator.join(hello("m1", generation=ahead), T0)
    coordinator.heartbeat("g", "m1", T0 + 1)
    assert only(coordinator.tick(T0 + TIMEOUT_MS)).generation > ahead


# --- in pieces --------------------------------------------------------------------------------


def pieces_of(work: Pieces[Any]) -> int:
    return sum(1 for _ in work)


def large(strategy: str) -> Coordinator:
    made = Coordinator("b1", session_timeout_ms=TIMEOUT_MS)
    topics = {topic: queues(*range(4 * PIECE), topic=topic) for topic in ("orders", "bills")}
    made.set_routes(topics, ["b1"], T0)
    made.enter(hello("m1", topics=("orders", "bills"), strategy=strategy), T0)
    return made


@pytest.mark.parametrize("strategy", ["average", "average-by-circle", "consistent-hash", "sticky"])
def test_a_large_group_is_rebalanced_and_saved_in_many_pieces(strategy: str) -> None:
    coordinator = large(strategy)
    assert coordinator.touched() == "g"
    # The grants alone look at each of eight pieces.
    assert pieces_of(coordinator.rebalancing("g", T0)) >= 8
    assert coordinator.touched() is None
    saved = pieces_of(coordinator.table.snapshotting())
    assert saved >= (16 if strategy == "sticky" else 1)


def test_one_rebalance_answers_all_events_before_it() -> None:
    coordinator = new_coordinator()
    for number in range(4):
        coordinator.enter(hello(f"m{number}"), T0)
    assert coordinator.touched() == "g"
    assignments = finish(coordinator.rebalancing("g", T0))
    assert coordinator.touched() is None
    assert {each.member_id: each.queues for each in assignments} == {
        f"m{number}": queues(number) for number in range(4)
    }
    assert len({each.generation for each in assignments}) == 1


def test_what_came_free_is_given_on_without_a_look_at_the_others() -> None:
    coordinator = new_coordinator(queue_count=8 * PIECE)
    coordinator.join(hello("m1"), T0)
    step = coordinator.join(hello("m2"), T0)
    generation = step.assignments[0].generation
    going = 8 * PIECE - 1
    coordinator.let_go("g", "m1", generation, queues(going), T0)
    name = coordinator.touched()
    assert name == "g"
    work = coordinator.rebalancing(name, T0)
    assert pieces_of(work) < 8
    # Only m2 is told.
    coordinator.let_go("g", "m1", generation, queues(going - 1), T0)
    [told_m2] = finish(coordinator.rebalancing("g", T0))
    assert told_m2 == Assignment("g", "m2", generation, queues(going - 1, going), ("m1", "m2"))
    assert coordinator.group("g").freed == []


def test_a_snapshot_in_pieces_is_of_one_moment() -> None:
    coordinator = large("sticky")
    coordinator.touched()
    finish(coordinator.rebalancing("g", T0))
    before = coordinator.group("g").generation
    work = coordinator.table.snapshotting()
    next(work)
    coordinator.join(hello("m2", topics=("orders", "bills"), strategy="sticky"), T0 + 1)
    kept = json.loads(finish(work))["groups"]["g"]
    assert kept["generation"] == before
    assert kept["members"] == {"m1": TIMEOUT_MS}
    assert len(kept["shares"]["m1"]) == 8 * PIECE
    # What has changed since is saved the next time.
    assert coordinator.table.changed
    again = json.loads(coordinator.table.snapshot())["groups"]["g"]
    assert again["generation"] == coordinator.group("g").generation > before
    assert {member: len(share) for member, share in again["shares"].items()} == {
        "m1": 4 * PIECE,
        "m2": 4 * PIECE,
    }


def test_routes_that_say_the_same_again_change_nothing() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    made_of = coordinator.group("g").made_of
    step = coordinator.routes_changed({"orders": queues(0, 1, 2, 3)}, ["b1"], T0 + 1)
    assert step.assignments == []
    assert coordinator.group("g").made_of is made_of


def test_a_group_that_is_dropped_and_made_anew_in_one_millisecond_repeats_no_generation() -> None:
    coordinator = new_coordinator()
    names = (f"b{number}" for number in range(2, 100))
    elsewhere = next(name for name in names if coordinator_of("g", ["b1", name]) == name)
    before = set()
    for number in range(5):  # each is a generation, and so a millisecond ahead of the clock
        step = coordinator.join(hello(f"m{number}"), T0)
        before |= {each.generation for each in step.assignments}
    owned = {"orders": queues(0, 1, 2, 3)}
    assert coordinator.routes_changed(owned, ["b1", elsewhere], T0).moved
    coordinator.routes_changed(owned, ["b1"], T0)
    step = coordinator.join(hello("m9"), T0)
    assert only(step).generation > max(before)
