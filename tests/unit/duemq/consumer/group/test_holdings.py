"""Which queues a member takes over, consumes and gives up, by events alone."""

from types import SimpleNamespace

import pytest

from duemq.consumer.group.holdings import CLOCK_BEHIND_MS_MAX, Holdings, HoldingState, HoldingStep
from duemq.errors import FencedMember
from duemq.protocol.balance import MessageQueue

A0, A1, B0 = (
    MessageQueue("t", broker, queue_id) for broker, queue_id in (("a", 0), ("a", 1), ("b", 0))
)
NOW_MS = 1_000_000


@pytest.fixture
def holdings():
    return new()


def new(start_from="latest", older=(), topic_ids=None, *, in_order=False):
    """`topic_ids`: of each broker, as routes tell them."""

    def topic_id_of(topic, broker):
        return topic_ids.get(broker, 0) if topic_ids else 0

    return Holdings(start_from, older, NOW_MS, topic_id_of, in_order=in_order)


def source(offset=5):
    return SimpleNamespace(pending=SimpleNamespace(commit_point=offset))


def take_over(holdings, generation, *queues):
    """Assigns and acquires."""
    step = holdings.assigned(generation, frozenset(queues))
    for each in step.acquire.values():
        for holding in each:
            assert holdings.acquired(holding, source(), frozenset())
    return step


def queues_of(groups):
    return sorted(sorted(holding.queue for holding in each) for each in groups)


def one(holdings, queue):
    return next(each for each in holdings.all if each.queue == queue)


def test_what_is_assigned_is_acquired_broker_by_broker_and_then_consumed(holdings):
    step = holdings.assigned(1, frozenset([A0, A1, B0]))
    assert {broker: len(each) for broker, each in step.acquire.items()} == {"a": 2, "b": 1}
    assert holdings.active == frozenset()
    (holding,) = step.acquire["b"]
    assert holdings.acquired(holding, source(7), frozenset([9]))
    assert (holding.committed, holding.settled) == (7, {9})
    assert holdings.active == {B0}


def test_what_stays_assigned_is_not_touched(holdings):
    take_over(holdings, 1, A0, A1)
    step = holdings.assigned(2, frozenset([A0, A1]))
    assert (step.dropped, step.release, step.acquire, step.released) == ([], [], {}, None)


def test_what_is_no_longer_assigned_is_released_and_then_told(holdings):
    take_over(holdings, 1, A0, A1, B0)
    step = holdings.assigned(2, frozenset([A0]))
    assert queues_of(step.release) == [[A1], [B0]]  # a broker's together
    assert holdings.active == {A0}
    (gone,) = (each for each in step.release if each[0].queue == A1)
    assert holdings.released(gone).released == (2, {A1})
    assert not holdings.holds(gone[0])


def test_in_order_each_queue_is_released_by_itself():
    holdings = new(in_order=True)
    take_over(holdings, 1, A0, A1)
    assert queues_of(holdings.assigned(2, frozenset()).release) == [[A0], [A1]]


def test_what_was_not_acquired_yet_is_released_as_well(holdings):
    holdings.assigned(1, frozenset([A0]))
    step = holdings.assigned(2, frozenset())
    assert queues_of(step.release) == [[A0]]
    assert not holdings.acquired(step.release[0][0], source(), frozenset())


def test_what_is_assigned_again_while_it_is_released_is_acquired_anew_and_not_told(holdings):
    take_over(holdings, 1, A0)
    (going,) = holdings.assigned(2, frozenset()).release
    assert holdings.assigned(3, frozenset([A0])).acquire == {}  # not before it is gone
    step = holdings.released(going)
    assert step.released is None
    assert queues_of(step.acquire.values()) == [[A0]]


def test_a_claim_is_what_is_held_and_forgets_what_is_being_acquired(holdings):
    take_over(holdings, 1, A0, A1)
    acquiring = holdings.assigned(2, frozenset([A0, B0])).acquire["b"][0]
    assert set(holdings.claim()) == {A0, A1}  # one is being released
    assert not holdings.is_acquiring(acquiring)
    assert not holdings.acquired(acquiring, source(), frozenset())


def test_what_is_released_after_a_claim_is_told_with_the_next_assignment(holdings):
    take_over(holdings, 1, A0, A1)
    (going,) = holdings.assigned(2, frozenset([A0])).release
    holdings.claim()
    assert holdings.released(going).released is None
    assert holdings.assigned(3, frozenset([A0])).released == (3, {A1})
    assert holdings.assigned(4, frozenset([A0])).released is None  # once


def test_what_was_released_after_a_claim_and_comes_back_is_not_told(holdings):
    take_over(holdings, 1, A0)
    (going,) = holdings.assigned(2, frozenset()).release
    holdings.claim()
    holdings.released(going)
    step = holdings.assigned(3, frozenset([A0]))
    assert step.released is None
    assert queues_of(step.acquire.values()) == [[A0]]


@pytest.mark.parametrize(("limit", "seen"), [("17", 17), ("", 0)])
def test_a_lost_queue_is_dropped_and_the_coordinator_is_asked(holdings, limit, seen):
    take_over(holdings, 1, A0, A1)
    holding = one(holdings, A0)
    step = holdings.lost(holding, FencedMember("m", limit=limit))
    assert (step.dropped, step.rejoin) == ([holding], seen)
    assert holdings.active == {A1}
    assert holdings.claim() == (A1,)
    again = holdings.lost(holding, FencedMember("m"))  # it is gone: nothing to do
    assert (again.dropped, again.rejoin) == ([], None)


def test_what_is_being_released_is_not_released_again(holdings):
    take_over(holdings, 1, A0)
    holdings.assigned(2, frozenset())
    assert holdings.assigned(3, frozenset()).release == []


def test_a_lost_queue_is_not_acquired_before_it_is_assigned_again(holdings):
    take_over(holdings, 1, A0, A1)
    holdings.lost(one(holdings, A0), FencedMember("m"))
    again = holdings.begin_anew(one(holdings, A1))
    assert queues_of(again.acquire.values()) == [[A1]]
    (going,) = holdings.assigned(2, frozenset([A1, B0])).acquire.values()
    assert [each.queue for each in going] == [B0]


def test_a_queue_whose_offset_does_not_exist_is_acquired_anew(holdings):
    take_over(holdings, 1, A0)
    old = one(holdings, A0)
    step = holdings.begin_anew(old)
    assert step.dropped == [old]
    assert queues_of(step.acquire.values()) == [[A0]]
    assert one(holdings, A0) is not old
    assert holdings.begin_anew(old).dropped == []


def test_a_queue_that_is_being_given_up_goes_as_it_would_have_gone(holdings):
    """Its last commit may be refused, as its topic is another one now."""
    take_over(holdings, 1, A0)
    (going,) = holdings.assigned(2, frozenset()).release
    assert holdings.begin_anew(one(holdings, A0)) == HoldingStep()
    assert holdings.released(going).released == (2, {A0})


def test_a_session_that_is_over_leaves_nothing(holdings):
    take_over(holdings, 1, A0, A1)
    held = holdings.all
    step = holdings.fenced()
    assert (step.dropped, step.released) == (held, None)
    assert holdings.claim() == ()


def test_a_close_takes_no_assignment(holdings):
    take_over(holdings, 1, A0)
    acquiring = holdings.assigned(2, frozenset([A0, A1])).acquire["a"][0]
    assert {each.queue for each in holdings.close()} == {A0, A1}
    assert not holdings.acquired(acquiring, source(), frozenset())
    assert holdings.assigned(3, frozenset([B0])).acquire == {}


def test_while_it_closes_each_is_told_with_an_assignment_that_is_without_it(holdings):
    take_over(holdings, 1, A0, A1)
    a0, a1 = one(holdings, A0), one(holdings, A1)
    holdings.close()
    assert holdings.active == frozenset()
    assert holdings.released([a0]).released is None  # the group wants it here, still
    assert holdings.assigned(2, frozenset()).released == (2, frozenset([A0]))
    assert holdings.released([a1]).released == (2, frozenset([A1]))


def test_what_is_assigned_while_it_closes_is_given_back(holdings):
    take_over(holdings, 1, A0)
    holdings.close()
    assert holdings.assigned(2, frozenset([A0, A1])).released is None
    assert holdings.assigned(3, frozenset()).released == (3, frozenset([A1]))


def test_one_that_comes_back_while_it_closes_claims_what_still_has_work(holdings):
    take_over(holdings, 1, A0, A1)
    holdings.close()
    holdings.released([one(holdings, A0)])
    assert holdings.claim() == (A1,)
    assert holdings.assigned(2, frozenset()).released is None  # the hello was without A0


def test_latest_is_the_end_only_of_queues_that_were_there_before():
    holdings = new("latest", older=[A0])
    assert holdings.starts([A0, B0]) == {"latest": [A0], NOW_MS - CLOCK_BEHIND_MS_MAX: [B0]}
    take_over(holdings, 1, A0)
    assert "latest" not in holdings.starts([A0])  # its topic was made anew


def test_latest_is_not_the_end_of_a_topic_that_was_made_anew_though_another_member_had_the_queue():
    ids = {"a": 5, "b": 6}
    holdings = new("latest", [A0, B0], ids)
    ids["a"] = 7
    assert holdings.starts([A0, B0]) == {NOW_MS - CLOCK_BEHIND_MS_MAX: [A0], "latest": [B0]}


def test_latest_is_not_the_end_of_a_queue_that_could_not_be_taken_over_at_once():
    holdings = new("latest", [A0])
    assert holdings.starts([A0]) == {"latest": [A0]}
    assert holdings.starts([A0]) == {NOW_MS - CLOCK_BEHIND_MS_MAX: [A0]}
    holdings = new("earliest", [A0])
    assert [holdings.starts([A0]) for _ in range(2)] == [{"earliest": [A0]}] * 2


def test_nor_of_one_that_comes_back_after_it_could_not_be_taken_over():
    holdings = new("latest", [A0])
    holdings.assigned(1, frozenset([A0]))
    holdings.starts([A0])
    holdings.assigned(2, frozenset())
    holdings.assigned(3, frozenset([A0]))
    assert holdings.starts([A0]) == {NOW_MS - CLOCK_BEHIND_MS_MAX: [A0]}


def test_latest_is_the_groups_beginning_in_a_queue_that_came_while_nobody_was_there():
    holdings = new("latest", [A0, A1])
    holdings.reads({"t": NOW_MS - 500_000})
    begin = {NOW_MS - 500_000 - CLOCK_BEHIND_MS_MAX: [A0]}
    assert holdings.starts([A0]) == begin
    assert holdings.starts([A0]) == begin  # again: it could not be taken over at once
    assert new("earliest", [A0]).starts([A0]) == {"earliest": [A0]}


@pytest.mark.parametrize("since_ms", [NOW_MS + 500_000, NOW_MS, NOW_MS - CLOCK_BEHIND_MS_MAX])
def test_latest_is_the_end_for_a_group_that_began_with_its_member(since_ms):
    """As exactly as clocks can tell."""
    holdings = new("latest", [A0])
    holdings.reads({"t": since_ms, "other": 0})
    assert holdings.starts([A0]) == {"latest": [A0]}


@pytest.mark.parametrize(("then", "now"), [(5, 0), (0, 5)])
def test_latest_is_the_end_where_it_is_not_known_which_topic_it_is(then, now):
    ids = {"a": then}
    holdings = new("latest", [A0], ids)
    ids["a"] = now
    assert holdings.starts([A0]) == {"latest": [A0]}


@pytest.mark.parametrize(
    ("start_from", "begin"), [("earliest", "earliest"), ("-10s", NOW_MS - 10_000), (5, 5)]
)
def test_other_beginnings_are_those_of_all_queues(start_from, begin):
    assert new(start_from, older=[A0]).starts([A0, B0]) == {begin: [A0, B0]}


def test_states():
    holdings = new()
    take_over(holdings, 1, A0)
    holdings.assigned(2, frozenset([A1]))
    assert {each.queue: each.state for each in holdings.all} == {
        A0: HoldingState.RELEASING,
        A1: HoldingState.ACQUIRING,
    }
