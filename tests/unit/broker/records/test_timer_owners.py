"""Who owns a queue of %TIMER%: claims, releases, and what is refused."""

import pytest

from duemq.errors import FencedTimer, InvalidArgument
from duemq_server.broker.records.timer_owners import (
    ALIVE_MS,
    SERVICE_IDS_FROM,
    Service,
    TimerOwners,
)

T1 = Service(SERVICE_IDS_FROM + 1, "t1", 0, 1)
T2 = Service(SERVICE_IDS_FROM + 2, "t2", 0, 1)
NOW_MS = 1_000_000


def claimed(service: Service = T1, queues: tuple[int, ...] = (0, 1)) -> TimerOwners:
    owners = TimerOwners()
    assert owners.check_claim(service, queues, NOW_MS)
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
    assert not owners.check_claim(T1, [1], NOW_MS)
    assert owners.check_claim(T1, [2], NOW_MS)
    owners.put(T1, [2], NOW_MS + 1)
    claim = owners.claim_of(2)
    assert claim is not None
    assert claim.queues == (0, 1, 2)
    assert claim.since_ms == NOW_MS


@pytest.mark.parametrize(
    "service",
    [
        Service(T2.id, "t2", 1, 2),  # other shards than the cluster has
        Service(T1.id, "t1", 0, 2),
    ],
)
def test_the_number_of_shards_never_changes(service: Service) -> None:
    with pytest.raises(FencedTimer, match="number of shards"):
        claimed().check_claim(service, [], NOW_MS)


@pytest.mark.parametrize(
    ("service", "queues"),
    [
        (Service(5, "t", 0, 1), [0]),
        (Service(T1.id, "", 0, 1), [0]),
        (Service(T1.id, "t" * 256, 0, 1), [0]),
        (Service(T1.id, "t", 1, 1), [0]),
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
    assert owners.check_claim(T1, [0, 1], NOW_MS)
    owners.put(T1, [0, 1], NOW_MS)
    with pytest.raises(FencedTimer):
        owners.check_claim(T2, [0], NOW_MS)
    owners.release(T1.id)
    assert owners.check_claim(T2, [0, 1], NOW_MS)
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
    again = TimerOwners()
    again.load(owners.encode())
    assert again.encode() == owners.encode()
    assert not again.knows(T1.id)
    again.load({})
