import pytest

from duemq.errors import FencedMember
from duemq_server.broker.groups.members import Hello
from tests.unit.broker.groups.coordinating import (
    T0,
    TIMEOUT_MS,
    hello,
    new_coordinator,
    only,
    queues,
    restarted,
    told,
)
from tests.unit.broker.groups.stepping import SteppingCoordinator


def static(member_id: str, incarnation: int, **rest) -> Hello:
    return hello(member_id, incarnation=incarnation, **rest)


def static_pair() -> tuple[SteppingCoordinator, int]:
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


def test_queues_of_a_process_that_is_still_connected_wait_until_it_has_heard() -> None:
    coordinator, generation = static_pair()
    assignment = only(coordinator.join(static("s1", 11), T0 + 1_000, replaces_connected=True))
    assert assignment.queues == ()
    assert assignment.generation > generation
    assert assignment.waits_ms == TIMEOUT_MS - 1_000
    assert coordinator.replaced_is_gone("g", "s1", 9, T0 + 2_000).assignments == []
    given = only(coordinator.replaced_is_gone("g", "s1", 10, T0 + 2_000))
    assert (given.queues, given.generation) == (queues(0, 1), assignment.generation)
    assert coordinator.replaced_is_gone("g", "s1", 10, T0 + 2_000).assignments == []


def test_queues_of_a_process_that_does_not_hear_wait_for_the_end_of_its_session() -> None:
    coordinator, _ = static_pair()
    coordinator.join(static("s1", 11), T0 + 1_000, replaces_connected=True)
    coordinator.heartbeat("g", "s1", T0 + TIMEOUT_MS - 1)
    coordinator.heartbeat("g", "s2", T0 + TIMEOUT_MS - 1)
    assert coordinator.next_ms() == T0 + TIMEOUT_MS
    assert only(coordinator.tick(T0 + TIMEOUT_MS)).queues == queues(0, 1)


def test_queues_of_a_replaced_process_outlive_the_one_that_replaced_it() -> None:
    coordinator, _ = static_pair()
    coordinator.join(static("s1", 11), T0 + 1_000, replaces_connected=True)
    left = only(coordinator.leave("g", "s1", T0 + 2_000))
    assert (left.member_id, left.queues) == ("s2", queues(2, 3))
    coordinator.heartbeat("g", "s2", T0 + TIMEOUT_MS - 1)
    assert only(coordinator.tick(T0 + TIMEOUT_MS)).queues == queues(0, 1, 2, 3)


def test_nothing_waits_for_a_process_whose_session_is_over() -> None:
    coordinator, _ = static_pair()
    late = T0 + TIMEOUT_MS
    assert only(coordinator.join(static("s1", 11), late, replaces_connected=True)).queues


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
    coordinator = SteppingCoordinator("b1")
    kept = b'{"g": {"generation": 5, "strategy": "average", "members": {"m1": 1000}}}'
    coordinator.table.restore(b'{"version": 1, "groups": ' + kept + b"}", T0)
    assert coordinator.group("g").incarnations == {}
