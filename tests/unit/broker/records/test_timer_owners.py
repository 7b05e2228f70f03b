"""Who owns a queue of %TIMER%: claims, releases, and what is refused."""

from dataclasses import replace

import pytest

from duemq.errors import FencedTimer, InvalidArgument, Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM, SHARDS_MAX
from duemq_server.broker.records import timer_owners
from duemq_server.broker.records.timer_claims import NOT_KNOWN, Decision, Service
from duemq_server.broker.records.timer_owners import ALIVE_MS, TimerOwners

T1 = Service(SERVICE_IDS_FROM + 1, "t1", 0, 1)
T2 = Service(SERVICE_IDS_FROM + 2, "t2", 0, 1)
NOW_MS = 1_000_000


def claimed(service: Service = T1, queues: tuple[int, ...] = (0, 1)) -> TimerOwners:
    owners = TimerOwners()
    assert owners.check_claim(service, queues, NOW_MS).changes
    owners.put(service, queues, NOW_MS)
    return owners


def test_the_first_claim_holds_and_the_second_is_told_who_has_it() -> None:
    owners = claimed()
    owners.check(1, T1.id, NOW_MS + 5_000)
    with pytest.raises(FencedTimer, match=r"queue 0 .* t1 \(shard 0 of 1, .* last seen 2 s ago"):
        owners.check_claim(T2, [0], NOW_MS + 7_000)
    assert owners.refused_of(0) == (T2, NOW_MS + 7_000)
    with pytest.raises(FencedTimer, match="t1"):
        owners.check(0, T2.id, NOW_MS)
    with pytest.raises(FencedTimer, match="nobody"):
        owners.check(2, T1.id, NOW_MS)
    with pytest.raises(FencedTimer):
        owners.check(0, 0, NOW_MS)


def test_a_claim_again_changes_nothing_and_a_further_queue_is_added() -> None:
    owners = claimed()
    assert not owners.check_claim(T1, [1], NOW_MS).changes
    assert owners.check_claim(T1, [2], NOW_MS).changes
    owners.put(T1, [2], NOW_MS + 1)
    claim = owners.claim_of(2)
    assert claim is not None
    assert claim.queues == (0, 1, 2)
    assert claim.since_ms == NOW_MS


@pytest.mark.parametrize(
    "service",
    [
        Service(T2.id, "t2", 1, 2),  # of an older release, that knows no difference
        Service(T2.id, "t2", 1, 2, 2),
        Service(T1.id, "t1", 0, 2),
    ],
)
def test_keys_are_divided_over_as_many_shards_as_there_were_first(service: Service) -> None:
    with pytest.raises(FencedTimer, match=r"key_shards: .* 2 .* over 1 here"):
        claimed().check_claim(service, [], NOW_MS)


def test_who_does_not_know_how_keys_are_divided_is_told() -> None:
    owners = TimerOwners()
    first = owners.check_claim(Service(T1.id, "t1", 0, 2, NOT_KNOWN), [0], NOW_MS).service
    assert first == Service(T1.id, "t1", 0, 2)  # as releases before this one say it
    owners = claimed()
    assert owners.key_shards == 1
    later = owners.check_claim(Service(T2.id, "t2", 1, 2, NOT_KNOWN), [], NOW_MS).service
    assert later == Service(T2.id, "t2", 1, 2, 1)


def leads(owners: TimerOwners, shards: int, epoch: int, *, logs_epochs: bool = True) -> Decision:
    """A replica of the first shard claims."""
    service = Service(T1.id, "t1", 0, shards, 1)
    queues = [queue for queue in range(4) if service.has(queue)]
    found = owners.check_claim(service, queues, NOW_MS, epoch)
    owners.put(found.service, found.granted, NOW_MS, epoch if logs_epochs else None)
    return found


def test_a_replica_that_was_deposed_claims_and_hands_over_nothing() -> None:
    """The other one does not know that there are two shards; it goes on to take over."""
    owners = TimerOwners()
    leads(owners, 1, epoch=1)
    leads(owners, 1, epoch=2)
    with pytest.raises(Unavailable, match=r"epoch: another replica of t1 .* leads, since epoch 2"):
        leads(owners, 2, epoch=1)
    assert leads(owners, 1, epoch=2).leaves == ()
    assert leads(owners, 2, epoch=3).leaves == (1, 3)


def test_claimants_whose_claims_were_never_written_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timer_owners, "SEEN_MAX", 3)
    owners = TimerOwners()
    leads(owners, 1, epoch=5)
    for number in range(10):  # the disk is full: `put` does not follow
        owners.check_claim(Service(T2.id + number, "t", 0, 1), [], NOW_MS, epoch=7)
    assert len(owners._claimants) <= 3
    assert owners.last_seen_ms(T1.id) == NOW_MS
    with pytest.raises(Unavailable, match="since epoch 5"):
        leads(owners, 1, epoch=4)


def test_a_replica_that_was_deposed_hands_nothing_over_after_a_start_of_the_broker() -> None:
    owners = TimerOwners()
    leads(owners, 1, epoch=1)
    leads(owners, 1, epoch=2)
    again = restarted(owners)
    with pytest.raises(Unavailable, match="since epoch 2"):
        leads(again, 2, epoch=1)
    assert leads(again, 2, epoch=2).leaves == ()
    with pytest.raises(Unavailable, match="since epoch 2"):
        leads(again, 2, epoch=1)
    assert leads(again, 2, epoch=2).leaves == (1, 3)


def test_only_a_new_epoch_is_written_again() -> None:
    owners = TimerOwners()
    leads(owners, 1, epoch=1)
    for epoch, anew in ((1, False), (2, True), (2, False), (0, True), (0, False)):
        found = leads(owners, 1, epoch=epoch)
        assert (found.changes, found.leads_anew) == (False, anew)
    assert leads(restarted(owners), 1, epoch=1).leads_anew  # it was without replicas meanwhile


def test_the_first_claim_after_a_start_hands_nothing_over_where_there_are_replicas() -> None:
    """It may be of one that was deposed; whoever leads claims before the next of that comes."""
    owners = TimerOwners()
    leads(owners, 1, epoch=1, logs_epochs=False)  # as the release before wrote it
    again = restarted(owners)
    assert leads(again, 2, epoch=1).leaves == ()
    assert leads(again, 2, epoch=1).leaves == (1, 3)
    alone = restarted(owners)
    assert leads(alone, 2, epoch=0).leaves == (1, 3)


def test_a_new_shard_does_not_decide_what_keys_are_divided_over() -> None:
    """At a broker that is new as well: the cluster may have had one shard so far."""
    owners, new = TimerOwners(), Service(T2.id, "t2", 1, 2, NOT_KNOWN)
    with pytest.raises(Unavailable, match="shard 0 is to claim first"):
        owners.check_claim(new, [1], NOW_MS)
    found = owners.check_claim(Service(T1.id, "t1", 0, 2, 1), [0], NOW_MS)
    owners.put(found.service, found.granted, NOW_MS)
    assert owners.check_claim(new, [1], NOW_MS).service == Service(T2.id, "t2", 1, 2, 1)


NEW_T1 = Service(T1.id, "t1", 0, 2, 1)
SECOND = Service(T2.id, "t2", 1, 2, 1, empty=True)


def test_another_shard_waits_until_its_queues_are_handed_over() -> None:
    owners = claimed(queues=(0, 1, 2, 3))
    found = owners.check_claim(SECOND, [1, 3], NOW_MS)
    assert found.granted == ()
    assert found.waits == {1: T1, 3: T1}
    owners.put(found.service, found.granted, NOW_MS)
    assert not owners.check_claim(SECOND, [1, 3], NOW_MS).changes
    assert owners.refused_of(3) == (SECOND, NOW_MS)
    with pytest.raises(FencedTimer, match="t1"):
        owners.check(1, SECOND.id, NOW_MS)

    found = owners.check_claim(NEW_T1, [0, 2], NOW_MS)
    assert found.leaves == (1, 3)
    assert found.changes
    owners.hand_over(T1.id, [(1, 70), (3, 0)])
    owners.put(found.service, found.granted, NOW_MS)
    with pytest.raises(FencedTimer, match="nobody"):
        owners.check(1, T1.id, NOW_MS)
    assert not owners.check_claim(NEW_T1, [0, 2], NOW_MS).changes

    found = owners.check_claim(SECOND, [1, 3], NOW_MS)
    assert (found.granted, dict(found.waits), found.changes) == ((1, 3), {}, True)
    assert owners.put(found.service, found.granted, NOW_MS) == []  # nobody is fenced
    owners.check(1, SECOND.id, NOW_MS)
    assert [owners.begin_of(queue) for queue in (0, 1, 3)] == [0, 70, 0]


TWIN = Service(SERVICE_IDS_FROM + 3, "twin", 1, 2, 1, empty=True)


def waited_for(service: Service = SECOND) -> TimerOwners:
    owners = claimed(queues=(0, 1, 2, 3))
    owners.put(owners.check_claim(service, [1, 3], NOW_MS).service, [], NOW_MS)
    return owners


def test_who_waits_comes_before_another_service_of_the_same_shard() -> None:
    owners = waited_for()
    for at_ms in (NOW_MS, NOW_MS + ALIVE_MS - 1):
        with pytest.raises(FencedTimer, match=r"t2 \(shard 1 of 2, .* s ago, .* waits"):
            owners.check_claim(TWIN, [1, 3], at_ms)
    assert owners.refused_of(3) == (TWIN, NOW_MS + ALIVE_MS - 1)
    owners.hand_over(T1.id, [(1, 70), (3, 0)])
    with pytest.raises(FencedTimer, match="waits"):
        owners.check_claim(TWIN, [1, 3], NOW_MS + ALIVE_MS - 1)
    assert owners.check_claim(SECOND, [1, 3], NOW_MS + ALIVE_MS).granted == (1, 3)


def test_who_waited_and_is_gone_keeps_nobody_out() -> None:
    owners, later_ms = waited_for(), NOW_MS + ALIVE_MS
    found = owners.check_claim(TWIN, [1, 3], later_ms)
    assert set(found.waits) == {1, 3}
    owners.put(found.service, found.granted, later_ms)
    with pytest.raises(FencedTimer, match="twin"):
        owners.check_claim(SECOND, [1, 3], later_ms + 1)
    assert owners.check_claim(TWIN, [1, 3], later_ms + 1).waits


@pytest.mark.parametrize(
    "other", [Service(TWIN.id, "twin", 1, 3, 1), Service(TWIN.id, "twin", 2, 3, 1)]
)
def test_who_waits_keeps_no_other_shard_out(other: Service) -> None:
    owners = waited_for()
    assert owners.check_claim(other, [queue for queue in (1, 2) if other.has(queue)], NOW_MS).waits


def test_a_service_that_wants_nothing_keeps_nobody_out_and_is_let_in() -> None:
    owners = claimed(queues=(0, 1))
    owners.put(owners.check_claim(SECOND, [], NOW_MS).service, [], NOW_MS)
    owners.put(owners.check_claim(TWIN, [1], NOW_MS).service, [], NOW_MS)
    assert not owners.check_claim(SECOND, [], NOW_MS).changes
    with pytest.raises(FencedTimer, match="twin"):
        owners.check_claim(SECOND, [1], NOW_MS)


def restarted(owners: TimerOwners) -> TimerOwners:
    again = TimerOwners()
    again.load(owners.encode())
    return again


def test_who_waits_does_so_after_a_restart_of_the_broker() -> None:
    """That it waited is forgotten: it has a minute, from the other's first claim on, to say it."""
    owners = restarted(waited_for())
    for after_ms in (0, ALIVE_MS - 1):
        with pytest.raises(FencedTimer, match=r"t2 .* not seen yet, .* waits"):
            owners.check_claim(TWIN, [1, 3], NOW_MS + after_ms)
    assert set(owners.check_claim(SECOND, [1, 3], NOW_MS + ALIVE_MS - 1).waits) == {1, 3}
    with pytest.raises(FencedTimer, match="t2"):
        owners.check_claim(TWIN, [1, 3], NOW_MS + ALIVE_MS)
    owners = restarted(owners)
    with pytest.raises(FencedTimer, match="t2"):
        owners.check_claim(TWIN, [1, 3], NOW_MS)
    assert owners.check_claim(TWIN, [1, 3], NOW_MS + ALIVE_MS).waits


def test_an_owner_is_not_kept_out_by_one_that_waited_before_it() -> None:
    owners, later_ms = waited_for(), NOW_MS + ALIVE_MS
    owners.put(owners.check_claim(TWIN, [1, 3], later_ms).service, [], later_ms)
    owners.hand_over(T1.id, [(1, 70), (3, 0)])
    owners.put(owners.check_claim(TWIN, [1, 3], later_ms).service, [1, 3], later_ms)
    assert restarted(owners).check_claim(TWIN, [1, 3], later_ms).granted == (1, 3)


def test_a_shard_that_leaves_hands_all_over_and_is_still_known() -> None:
    owners = claimed(SECOND, queues=(1, 3))
    leaving = Service(T2.id, "t2", 1, 1)
    found = owners.check_claim(leaving, [], NOW_MS)
    assert found.leaves == (1, 3)
    owners.hand_over(T2.id, [(1, 5), (3, 6)])
    owners.put(found.service, [], NOW_MS)
    assert owners.knows(T2.id)  # what it holds may be sent
    owners.check_not_fenced(T2.id)
    assert owners.check_claim(T1, [0, 1, 2, 3], NOW_MS).granted == (0, 1, 2, 3)


def left(*, keys: int = 1) -> TimerOwners:
    """T2 was shard 1 of 2, and has handed all over; it holds what it took over."""
    second = replace(SECOND, key_shards=keys, empty=False)
    owners = claimed(second, queues=(1, 3))
    owners.hand_over(T2.id, [(1, 5), (3, 6)])
    owners.put(owners.check_claim(replace(second, shards=1), [], NOW_MS).service, [], NOW_MS)
    return owners


def ids(services: list[Service]) -> list[int]:
    return [each.id for each in services]


def test_who_has_handed_all_over_holds_timers_until_it_says_that_it_is_empty() -> None:
    owners = left()
    assert ids(owners.holders()) == ids(restarted(owners).holders()) == [T2.id]
    assert owners.holders(T2.id) == []
    leaving = replace(SECOND, shards=1)  # empty
    found = owners.check_claim(leaving, [], NOW_MS)
    assert found.changes
    owners.put(found.service, [], NOW_MS)
    assert owners.holders() == restarted(owners).holders() == []
    assert not owners.check_claim(leaving, [], NOW_MS).changes
    assert owners.check_claim(replace(leaving, empty=False), [], NOW_MS).changes


def test_who_has_queues_or_keeps_keys_is_never_empty() -> None:
    for service, queues in ((SECOND, (1, 3)), (replace(SECOND, shards=1, key_shards=2), ())):
        owners = TimerOwners()
        found = owners.check_claim(service, queues, NOW_MS)
        owners.put(found.service, found.granted, NOW_MS)
        assert ids(owners.holders()) == [T2.id]
        assert not owners.check_claim(service, queues, NOW_MS).changes


def test_an_owner_that_claims_nothing_more_is_not_empty() -> None:
    """As after a start, before it has heard how many queues there are."""
    owners = claimed(replace(SECOND, empty=False), queues=(1, 3))
    found = owners.check_claim(SECOND, [], NOW_MS)
    assert not found.changes
    assert not found.service.empty


def test_who_was_released_with_queues_keeps_them_until_they_are_claimed() -> None:
    owners = claimed(queues=(0, 1))
    owners.release(T1.id)
    assert owners.put(T2, [], NOW_MS) == []
    assert owners.check_claim(T1, [0, 1], NOW_MS).granted == (0, 1)


def test_a_shard_whose_timers_another_data_directory_holds_goes_to_no_other() -> None:
    owners = left(keys=2)
    for now_ms in (NOW_MS, NOW_MS + 100 * ALIVE_MS):  # away or not: only it has them
        with pytest.raises(FencedTimer, match=r"t2 \(shard 1 of 1, .*holds what it took over"):
            owners.check_claim(replace(TWIN, key_shards=2), [1, 3], now_ms)
    assert owners.refused_of(1) is not None
    owners.check_release(T2.id, NOW_MS)  # it has no queues
    owners.release(T2.id)
    assert owners.holders() == []
    with pytest.raises(FencedTimer, match="last seen 60 s ago"):
        owners.check_claim(replace(TWIN, key_shards=2), [1, 3], NOW_MS + ALIVE_MS - 1)
    found = owners.check_claim(replace(TWIN, key_shards=2), [1, 3], NOW_MS + ALIVE_MS)
    assert found.granted == (1, 3)
    assert owners.put(found.service, found.granted, NOW_MS) == [T2.id]
    with pytest.raises(FencedTimer, match="replaced"):
        owners.check_claim(SECOND, [], NOW_MS)


def test_who_was_released_without_queues_gives_way_to_one_that_is_known() -> None:
    owners = left()
    owners.put(TWIN, [], NOW_MS)
    owners.release(T2.id)
    assert restarted(owners).encode() == owners.encode()
    found = owners.check_claim(TWIN, [], NOW_MS)
    assert found.changes
    assert owners.put(found.service, [], NOW_MS) == [T2.id]


def test_who_was_released_and_comes_back_holds_what_it_has() -> None:
    owners = left()
    owners.release(T2.id)
    leaving = replace(SECOND, shards=1, empty=False)
    owners.put(owners.check_claim(leaving, [], NOW_MS).service, [], NOW_MS)
    assert ids(owners.holders()) == [T2.id]


def test_a_begin_never_goes_back() -> None:
    owners = claimed()
    for offset in (9, 4):
        owners.begin([(1, offset)])
    assert owners.begin_of(1) == 9


@pytest.mark.parametrize(
    ("formers", "begin"),
    [((), {0, 1, 2, 3}), ((T1.id,), {1, 3})],  # an own copy of what it takes goes on
)
def test_what_was_given_up_begins_where_it_was_left(
    formers: tuple[int, ...], begin: set[int]
) -> None:
    owners = claimed(queues=(0, 1, 2, 3))
    owners.release(T1.id)
    found = owners.check_claim(Service(T2.id, "t2", 0, 2, 1), [0, 2], NOW_MS)
    assert owners.given_up(found, formers) == begin


@pytest.mark.parametrize(
    ("service", "queues"),
    [
        (Service(5, "t", 0, 1), [0]),
        (Service(T1.id, "", 0, 1), [0]),
        (Service(T1.id, "t" * 256, 0, 1), [0]),
        (Service(T1.id, "t", 1, 1), [0]),
        (Service(T1.id, "t", SHARDS_MAX, 1), []),
        (Service(T1.id, "t", 0, 1, SHARDS_MAX + 1), [0]),
        (Service(T1.id, "t", -1, 1), [0]),
        (Service(T1.id, "t", 0, 2), [1]),
    ],
)
def test_bad_claims(service: Service, queues: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        TimerOwners().check_claim(service, queues, NOW_MS)


def test_only_a_service_that_is_away_is_released() -> None:
    owners = claimed()
    with pytest.raises(InvalidArgument, match="stop it first"):
        owners.check_release(T1.id, NOW_MS + ALIVE_MS - 1)
    with pytest.raises(InvalidArgument, match="no timer service"):
        owners.check_release(T2.id, NOW_MS)
    owners.check_release(T1.id, NOW_MS + ALIVE_MS)


def test_a_released_service_may_come_back_until_another_one_came() -> None:
    owners = claimed()
    owners.release(T1.id)
    assert owners.check_claim(T1, [0, 1], NOW_MS).changes
    owners.put(T1, [0, 1], NOW_MS)
    with pytest.raises(FencedTimer):
        owners.check_claim(T2, [0], NOW_MS)
    owners.release(T1.id)
    assert owners.check_claim(T2, [0, 1], NOW_MS).changes
    assert owners.put(T2, [0, 1], NOW_MS) == [T1.id]
    assert owners.ids() == [T2.id]
    for refused in (
        lambda: owners.check_claim(T1, [0], NOW_MS),
        lambda: owners.check(0, T1.id, NOW_MS),
        lambda: owners.check_not_fenced(T1.id),
    ):
        with pytest.raises(FencedTimer, match="replaced"):
            refused()


def test_the_checkpoint_round_trips() -> None:
    owners = claimed()
    owners.release(T1.id)
    owners.put(T2, [0, 1], NOW_MS)
    owners.release(T2.id)
    assert "begins" not in owners.encode()  # releases before this one read it
    owners.put(SECOND, [], NOW_MS)
    owners.hand_over(T2.id, [(1, 7)])
    again = TimerOwners()
    again.load(owners.encode())
    assert again.encode() == owners.encode()
    assert not again.knows(T1.id)
    assert again.begin_of(1) == 7
    assert again.key_shards == 1
    again.load({})
