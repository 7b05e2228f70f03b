"""Whom a member asks, and what an error means to it."""

import pytest

from duemq.consumer.group.standing import INCARNATION_MAX, REPLACED, After, Standing
from duemq.errors import FencedMember, NotCoordinator, Rejected, Timeout, Unavailable
from duemq.protocol.balance import coordinator

NOW_NS = 1_700_000_000_000_000_000
BROKERS = ("a", "b", "c")
CHOSEN = coordinator("g", BROKERS)
OTHER = next(each for each in BROKERS if each != CHOSEN)


@pytest.fixture
def standing():
    return Standing("g", session_timeout_ms=10_000)


def test_it_asks_the_coordinator_that_everyone_computes(standing):
    assert standing.ask(BROKERS) == CHOSEN
    with pytest.raises(Unavailable):
        standing.ask(())


def test_it_asks_who_was_named_and_only_once(standing):
    assert standing.failed(NotCoordinator("m", limit=OTHER), NOW_NS) is After.JOIN_AGAIN
    assert [standing.ask(BROKERS), standing.ask(BROKERS)] == [OTHER, CHOSEN]


def test_it_disagrees_where_it_sees_another_coordinator(standing):
    assert standing.disagrees(OTHER, BROKERS)
    assert not standing.disagrees(CHOSEN, BROKERS)
    assert not standing.disagrees(CHOSEN, ())  # it sees none


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (Unavailable("gone"), After.JOIN_AGAIN),
        (Timeout("silent"), After.JOIN_AGAIN),
        (FencedMember("the session is over"), After.LET_GO),
        (FencedMember("a newer process", field=REPLACED), After.GIVE_UP),
        (Rejected("another strategy"), After.GIVE_UP),
    ],
)
def test_what_an_error_means(standing, error, after):
    assert standing.failed(error, NOW_NS) is after


def fenced(newest):
    return FencedMember("a newer process", field=REPLACED, limit=newest)


def test_a_new_process_takes_the_place_of_one_that_began_in_the_future(standing):
    """Its machine was lost, say, and the clock of this one is behind."""
    standing.incarnation = NOW_NS - 1
    assert standing.failed(fenced(NOW_NS + 3_600_000_000_000), NOW_NS) is After.JOIN_AGAIN
    assert standing.incarnation == NOW_NS + 3_600_000_000_001


def test_of_two_such_processes_one_is_newer(standing):
    """Else each would take the other for itself, over another stream, for ever."""
    another = Standing("g", 10_000)
    for each, now_ns in (standing, NOW_NS + 7), (another, NOW_NS + 999_999):
        each.incarnation = now_ns
        assert each.failed(fenced(INCARNATION_MAX - 1), now_ns) is After.JOIN_AGAIN
    assert standing.incarnation < another.incarnation < 1 << 64


@pytest.mark.parametrize("newest", [NOW_NS - 1, NOW_NS, INCARNATION_MAX, ""])
def test_one_that_began_before_now_or_never_is_not_replaced(standing, newest):
    standing.incarnation = before = NOW_NS - 2
    assert standing.failed(fenced(newest), NOW_NS) is After.GIVE_UP
    assert standing.incarnation == before


def test_who_was_a_member_gives_up_its_place_whatever_the_clocks_say(standing):
    standing.assigned(5, "a", ["m1"])
    assert standing.failed(fenced(NOW_NS + 1), NOW_NS) is After.GIVE_UP


def test_a_hello_names_the_newest_generation_known(standing):
    assert standing.hello_generation == 0
    standing.assigned(5, "a", ["m1", "m2"])
    standing.seen(3)
    assert standing.hello_generation == 5
    standing.seen(8)
    assert (standing.hello_generation, standing.generation) == (8, 5)
    assert (standing.coordinator, standing.members) == ("a", ["m1", "m2"])


def test_a_coordinator_that_is_silent_for_a_heartbeat_is_given_up(standing):
    standing.begin()
    standing.beat()
    standing.heard(0)
    standing.beat()
    with pytest.raises(Timeout, match=r"within 2\.5 s"):
        standing.beat()
    standing.begin()  # a new session starts anew
    standing.beat()


def test_who_leaves_owes_a_goodbye_until_it_is_heard(standing):
    standing.leave(silently=False)
    assert standing.left
    assert standing.leaving
    assert standing.owes_goodbye
    assert standing.stream_ended()
    assert not standing.stream_ended()


def test_a_static_member_and_a_silent_one_say_no_goodbye(standing):
    static = Standing("g", 10_000, incarnation=1)
    static.leave(silently=False)
    standing.leave(silently=True)
    for each in (static, standing):
        assert each.left
        assert not each.leaving  # in a heartbeat that is on its way just then
        assert not each.owes_goodbye
        assert not each.stream_ended()


def test_a_goodbye_is_said_only_while_the_group_still_has_the_member(standing):
    assert not standing.may_say_goodbye(0)  # never heard
    standing.heard(1_000)
    assert standing.may_say_goodbye(11_000)
    assert not standing.may_say_goodbye(11_001)
