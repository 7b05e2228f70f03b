"""Which requests to timer shards may go when."""

from functools import partial

import pytest

from duemq.producing.keyed.lanes import AGE_S_MAX, IN_FLIGHT, LOOK_AHEAD, Lanes, ShardCall
from duemq.protocol.timer_keys import SCHEDULE_RECORDS_MAX


class Asked(ShardCall):
    def request(self, request_id):
        return request_id

    def answered(self, shard_name, answer):
        pass

    def failed(self, error, *, asked):
        pass


@pytest.fixture
def lanes():
    return Lanes()


def ask(lanes, timer, way="way", shard=0, now=0.0):
    begin = partial(Asked, shard, now, now + 30)
    call, _ = lanes.gather((way, shard), timer, now, begin)
    return call


def test_what_has_one_way_gathers_until_it_is_taken(lanes):
    first = ask(lanes, "a")
    assert ask(lanes, "b") is first
    other = ask(lanes, "c", way="other")
    assert lanes.take() == [first, other]
    assert first.timers == {"a", "b"}
    assert ask(lanes, "d") is not first


def test_a_shard_gets_so_many_at_a_time(lanes):
    calls = [ask(lanes, n, way=n) for n in range(IN_FLIGHT + 2)]
    elsewhere = ask(lanes, "x", shard=1)
    assert lanes.take() == [*calls[:IN_FLIGHT], elsewhere]
    assert lanes.take() == []
    lanes.ended(calls[1])
    assert lanes.take() == [calls[IN_FLIGHT]]


def test_requests_about_one_timer_go_in_order(lanes):
    first = ask(lanes, "k")
    second = ask(lanes, "k")
    third = ask(lanes, "k", way="other")
    assert len({first, second, third}) == 3
    assert lanes.take() == [first]
    assert lanes.take() == []
    lanes.ended(first)
    assert lanes.take() == [second]
    lanes.ended(second)
    assert lanes.take() == [third]


def test_what_comes_later_never_joins_a_request_in_front_of_one_about_the_same(lanes):
    first = ask(lanes, "j")
    second = ask(lanes, "k", way="other")
    third = ask(lanes, "k")
    assert third is not first
    assert ask(lanes, "l") is third
    assert lanes.take() == [first, second]
    lanes.ended(second)
    assert lanes.take() == [third]


def test_what_is_not_about_them_passes_those_that_wait(lanes):
    first = ask(lanes, "k")
    lanes.take()
    waiting = [ask(lanes, "k") for _ in range(3)]
    passing = ask(lanes, "x", way="other")
    assert lanes.take() == [passing]
    lanes.ended(first)
    assert lanes.take() == [waiting[0]]


def test_no_more_are_looked_at_than_that(lanes):
    first = ask(lanes, "k")
    lanes.take()
    for _ in range(LOOK_AHEAD):
        ask(lanes, "k")
    behind = ask(lanes, "x", way="other")
    assert lanes.take() == []
    lanes.ended(first)
    assert behind not in lanes.take()


def test_a_full_or_old_one_takes_no_more(lanes):
    calls = {ask(lanes, n) for n in range(SCHEDULE_RECORDS_MAX + 1)}
    assert sorted(len(call.timers) for call in calls) == [1, SCHEDULE_RECORDS_MAX]
    last = ask(lanes, "x")
    assert ask(lanes, "y", now=AGE_S_MAX) is last
    assert ask(lanes, "z", now=AGE_S_MAX + 0.1) is not last


def test_open_ones_and_giving_up(lanes):
    first, second = ask(lanes, "k"), ask(lanes, "k")
    lanes.take()
    assert lanes.open() == [first, second]
    assert lanes.give_up() == [second]
    assert lanes.open() == [first]
    lanes.ended(first)
    assert lanes.take() == []
    assert ask(lanes, "k") is not second
