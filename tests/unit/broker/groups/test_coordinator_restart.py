import pytest

from duemq.errors import GroupNotFound
from duemq_server.broker.groups.coordinator import EMPTY_GROUP_KEPT_MS
from duemq_server.broker.store.offsets import GENERATION_MARKS
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


def test_who_lost_its_queues_before_the_group_moved_here_does_not_get_them_as_the_first() -> None:
    """Its list of members is of then; who took a queue of this broker since knows a newer one."""
    coordinator, newer = new_coordinator(), FIRST + 5_000 * GENERATION_MARKS
    alone = hello("m1", generation=FIRST, owned=queues(0), members=("m1",))
    assert told(coordinator.join(alone, T0 + 6_000, newer)) == {"m1": (0,)}
    back = hello("m2", generation=newer, owned=queues(0, 1, 2, 3), members=("m2",))
    step = coordinator.join(back, T0 + 6_001, newer)
    assert told(step) == {"m1": (), "m2": (2, 3)}


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


def test_a_newcomer_does_not_rob_a_group_whose_topics_have_no_queue_here_but_that_sent_back() -> (
    None
):
    coordinator, retry = new_coordinator(), "%RETRY%g"
    there = {"orders": queues(0, 1, broker="b2"), retry: queues(0, topic=retry, broker="b2")}
    coordinator.routes_changed(there, ["b1"], T0)
    step = coordinator.join(hello("m0"), T0 + 4_000)
    assert told(step) == {"m0": ()}
    assert only(step).waits_ms == TIMEOUT_MS - 4_000


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


def test_a_group_that_comes_back_to_a_coordinator_that_knows_it_without_members_is_held() -> None:
    """It was restarted, or cut off, while another one had the group."""
    coordinator, names = new_coordinator(), ("m1", "m2")
    old = only(coordinator.join(hello("m0"), T0)).generation
    coordinator.leave("g", "m0", T0)
    coordinator = restarted(coordinator, T0 + 1_000)
    newer = old + 5_000 * GENERATION_MARKS
    back = {"generation": newer, "members": names}
    step = coordinator.join(hello("m1", owned=queues(0, 1), **back), T0 + 6_000)
    assert told(step) == {"m1": (0, 1)}
    step = coordinator.join(hello("m2", owned=queues(2, 3), **back), T0 + 7_000)
    assert told(step) == {"m2": (2, 3)}
    assert only(step).generation > newer


def test_a_group_that_comes_back_to_a_coordinator_that_slept_is_held() -> None:
    """Whom it takes for its members have lost queues to others meanwhile."""
    coordinator, generation = two_members()
    newer = generation + 5_000 * GENERATION_MARKS
    back = {"generation": newer, "members": ("m1", "m2", "m3")}
    step = coordinator.join(hello("m1", owned=queues(0), **back), T0 + 6_000)
    assert told(step) == {"m1": (0,), "m2": (2, 3)}  # nobody has 1 now
    step = coordinator.join(hello("m3", owned=queues(1, 2), **back), T0 + 6_001)
    assert told(step) == {"m2": (3,), "m3": (1, 2)}
    step = coordinator.join(hello("m2", owned=queues(3), **back), T0 + 6_002)
    assert told(step) == {"m2": (), "m3": ()}  # by the rule m1 gets 1, m2 2, m3 3: all move first


def test_a_newcomer_does_not_rob_such_a_group_either_but_does_not_wait_for_one_that_was_reset() -> (
    None
):
    coordinator = new_coordinator()
    old = only(coordinator.join(hello("m0"), T0)).generation
    coordinator.leave("g", "m0", T0)
    elsewhere = old + 500 * GENERATION_MARKS
    step = restarted(coordinator, T0 + 1_000).join(hello("m1"), T0 + 1_000, elsewhere)
    assert told(step) == {"m1": ()}
    step = restarted(coordinator, T0 + 1_000).join(hello("m1"), T0 + 1_000, old + 1)
    assert told(step) == {"m1": (0, 1, 2, 3)}


def test_in_such_a_group_former_members_decide_what_it_reads() -> None:
    coordinator = new_coordinator()
    old = only(coordinator.join(hello("m0"), T0)).generation
    coordinator.leave("g", "m0", T0)
    elsewhere = old + 500 * GENERATION_MARKS
    coordinator = restarted(coordinator, T0 + 1_000)
    coordinator.join(hello("m1", topics=("mail",)), T0 + 1_000, elsewhere)
    step = coordinator.join(hello("m2", generation=elsewhere), T0 + 2_000)
    assert [each.member_id for each in step.turned_out] == ["m1"]


@pytest.mark.parametrize("members", [("m1",), ()], ids=["names itself", "names nobody"])
def test_who_was_alone_and_silent_for_too_long_has_all_queues_at_once(
    members: tuple[str, ...],
) -> None:
    coordinator = new_coordinator()
    first = only(coordinator.join(hello("m1"), T0))
    coordinator.tick(T0 + TIMEOUT_MS)
    back = hello("m1", generation=first.generation, members=members)
    assert told(coordinator.join(back, T0 + TIMEOUT_MS + 1)) == {"m1": (0, 1, 2, 3)}


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
        SteppingCoordinator("b1").table.restore(b'{"version": 2, "groups": {}}', T0)


def test_empty_groups_are_forgotten_after_a_week() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.leave("g", "m1", T0)
    assert coordinator.next_ms() == T0 + EMPTY_GROUP_KEPT_MS
    assert [group.name for group in coordinator.groups()] == ["g"]
    coordinator.tick(T0 + EMPTY_GROUP_KEPT_MS)
    with pytest.raises(GroupNotFound):
        coordinator.group("g")


def test_since_when_a_group_reads_its_topics_survives_its_members_and_a_restart() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0)
    coordinator.leave("g", "m1", T0 + 1_000)
    coordinator = restarted(coordinator, T0 + 2_000)
    coordinator.join(hello("m2", topics=("orders", "mail")), T0 + 3_000)
    assert coordinator.group("g").reads_since_ms == {"orders": T0, "mail": T0 + 3_000}
    coordinator = restarted(coordinator, T0 + 4_000)
    assert coordinator.group("g").reads_since_ms == {"orders": T0, "mail": T0 + 3_000}
    coordinator.leave("g", "m2", T0 + 5_000)
    coordinator.join(hello("m3", topics=("mail",)), T0 + 6_000)
    coordinator.leave("g", "m3", T0 + 7_000)
    coordinator.join(hello("m4"), T0 + 8_000)  # anew: it had stopped reading them
    assert coordinator.group("g").reads_since_ms == {"orders": T0 + 8_000}


def test_a_group_reads_nothing_since_a_time_to_come_where_a_clock_was_ahead() -> None:
    coordinator = new_coordinator()
    coordinator.join(hello("m1"), T0 + EMPTY_GROUP_KEPT_MS)
    coordinator = restarted(coordinator, T0)
    coordinator.join(hello("m2"), T0 + 1_000)
    assert coordinator.group("g").reads_since_ms == {"orders": T0}
