import json
from typing import Any

import pytest

from duemq.errors import (
    FencedMember,
    GroupNotFound,
    NotCoordinator,
    NotReady,
)
from duemq.protocol.balance import coordinator as coordinator_of
from duemq.protocol.pieces import PIECE, Pieces, finish
from duemq_server.broker.groups.coordinator import (
    STALL_MS_MAX,
    Assignment,
)
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from duemq_server.broker.store.offsets import (
    CLOCK_MS_MIN,
    GENERATION_MARKS,
    GroupOffset,
    GroupQueue,
    Offsets,
    newest_generation,
)
from tests.unit.broker.groups.coordinating import (
    FIRST,
    T0,
    TIMEOUT_MS,
    hello,
    new_coordinator,
    only,
    queues,
    restarted,
    told,
    two_members,
)
from tests.unit.broker.groups.stepping import SteppingCoordinator

# --- sharing -----------------------------------------------------------------------------------


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
    coordinator = SteppingCoordinator("b1")
    both = queues(0, broker="b1") + queues(0, broker="b0")
    coordinator.routes_changed({"orders": both}, ["b1"], T0)
    coordinator.join(hello("m1"), T0)
    step = coordinator.routes_changed({"orders": queues(0, broker="b1")}, ["b1"], T0)
    assert only(step).queues == queues(0, broker="b1")


def test_a_group_may_wait_for_a_topic_that_is_not_there_yet() -> None:
    coordinator = SteppingCoordinator("b1")
    coordinator.routes_changed({}, ["b1"], T0)
    assert only(coordinator.join(hello("m1"), T0)).queues == ()
    step = coordinator.routes_changed({"orders": queues(0)}, ["b1"], T0)
    assert only(step).queues == queues(0)


def test_the_topic_of_retries_is_shared_among_its_subscribers_only() -> None:
    coordinator = new_coordinator(queue_count=2)
    coordinator.join(hello("m1"), T0)
    retries = queues(0, topic="%RETRY%g")
    coordinator.routes_changed({"orders": queues(0, 1), "%RETRY%g": retries}, ["b1"], T0)
    step = coordinator.join(hello("m2", topics=("orders", "%RETRY%g")), T0)
    by_member = {each.member_id: each.queues for each in step.assignments}
    assert by_member == {"m1": queues(0), "m2": retries}


# --- coming back -------------------------------------------------------------------------------


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


# --- death -------------------------------------------------------------------------------------


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


def test_who_is_leaving_is_assigned_nothing_and_lets_go_of_each_queue_in_its_time() -> None:
    coordinator, _ = two_members()
    step = coordinator.leaving("g", "m2", T0)
    assert told(step) == {"m2": ()}  # m1 gets nothing that is still in other hands
    generation = only(step).generation
    assert told(coordinator.released("g", "m2", generation, queues(3), T0)) == {"m1": (0, 1, 3)}
    assert coordinator.leaving("g", "m2", T0).assignments == []
    assert told(coordinator.leave("g", "m2", T0)) == {"m1": (0, 1, 2, 3)}


def test_what_a_leaving_member_kept_is_given_on_under_a_newer_generation() -> None:
    coordinator, _ = two_members()
    left = only(coordinator.leaving("g", "m2", T0)).generation
    assert only(coordinator.leave("g", "m2", T0)).generation > left


def test_after_a_restart_a_leaving_member_that_lost_its_session_does_not_get_its_queue_back() -> (
    None
):
    coordinator, _ = two_members()
    left = only(coordinator.leaving("g", "m2", T0)).generation
    coordinator.heartbeat("g", "m1", T0 + 1)
    taken = only(coordinator.tick(T0 + TIMEOUT_MS))  # m2 was cut off, and is still at work
    assert taken.queues == queues(0, 1, 2, 3)
    after = restarted(coordinator, T0 + TIMEOUT_MS)
    claim = hello("m2", generation=left, owned=queues(2, 3), leaving=True)
    after.join(claim, T0 + TIMEOUT_MS)
    claim = hello("m1", generation=taken.generation, owned=taken.queues)
    step = after.join(claim, T0 + TIMEOUT_MS)
    assert told(step)["m1"] == (0, 1, 2, 3)


def test_one_that_comes_back_while_it_is_leaving_is_still_leaving() -> None:
    coordinator, generation = two_members()
    step = coordinator.join(hello("m2", generation=generation, owned=queues(2), leaving=True), T0)
    assert told(step) == {"m2": (), "m1": (0, 1, 3)}


# --- whose group -------------------------------------------------------------------------------


def test_another_brokers_group_is_sent_there() -> None:
    coordinator = SteppingCoordinator("b1")
    coordinator.routes_changed({}, ["b1", "b2"], T0)
    theirs = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", ["b1", "b2"]) == "b2")
    with pytest.raises(NotCoordinator) as refused:
        coordinator.join(Hello(theirs, "m1", {"orders": TopicFilter()}), T0)
    assert refused.value.limit == "b2"


def test_a_broker_that_knows_no_cluster_is_not_ready() -> None:
    with pytest.raises(NotReady):
        SteppingCoordinator("b1").join(hello("m1"), T0)


def test_a_group_moves_when_the_brokers_change() -> None:
    coordinator = new_coordinator()
    theirs = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", ["b1", "b2"]) == "b2")
    coordinator.join(Hello(theirs, "m1", {"orders": TopicFilter()}), T0)
    step = coordinator.routes_changed({"orders": queues(0)}, ["b1", "b2"], T0)
    assert [(each.member_id, each.coordinator) for each in step.moved] == [("m1", "b2")]
    with pytest.raises(GroupNotFound):
        coordinator.group(theirs)


# --- strategies that look at who has what ------------------------------------------------------


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


def test_a_group_that_lives_on_where_its_offsets_were_deleted_gets_its_queues_back() -> None:
    """It came between the coordinator's word that it has no members and another broker's turn."""
    coordinator, key = new_coordinator(queue_count=1), GroupQueue("g", "orders", 0)
    generation = only(coordinator.join(hello("m1"), T0)).generation
    offsets = Offsets()
    offsets.put(key, offsets.acquire(key, generation, 0, 0, 100))
    offsets.forget_group("g")
    with pytest.raises(FencedMember) as refused:
        offsets.acquire(key, generation, 0, 0, 100)
    back = hello("m1", generation=int(refused.value.limit))
    again = only(coordinator.join(back, T0 + 1))
    assert again.queues == queues(0)
    assert offsets.acquire(key, again.generation, 7, 0, 100) == GroupOffset(7, again.generation)


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


# --- two that take themselves for the coordinator ----------------------------------------------


def test_two_coordinators_of_one_group_never_make_the_same_generation() -> None:
    one, other = (SteppingCoordinator(name, session_timeout_ms=TIMEOUT_MS) for name in ("b1", "b2"))
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


# --- in pieces ---------------------------------------------------------------------------------


def pieces_of(work: Pieces[Any]) -> int:
    return sum(1 for _ in work)


def large(strategy: str) -> SteppingCoordinator:
    made = SteppingCoordinator("b1", session_timeout_ms=TIMEOUT_MS)
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
