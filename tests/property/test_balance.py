"""What strategies promise, against all the ways in which queues could be shared."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.balance import (
    AVERAGE,
    AVERAGE_BY_CIRCLE,
    CONSISTENT_HASH,
    STICKY,
    MessageQueue,
    allocate,
    average_block,
    consistent_hash,
    sticky,
    strategy_named,
)

QUEUES = [MessageQueue("t", f"b{n % 2}", n // 2) for n in range(7)]
MEMBERS = ["m0", "m1", "m2", "m3"]

# Queue → who has it: a member, one that is gone, or nobody.
owners = st.lists(st.sampled_from([*MEMBERS, "gone", None]), min_size=7, max_size=7)


def moved(current: dict[MessageQueue, str], shares: dict[str, list[MessageQueue]]) -> int:
    """How many queues another member has than before."""
    now = {queue: member for member, share in shares.items() for queue in share}
    return sum(current.get(queue) != member for queue, member in now.items())


def fewest_moves(queues: list[MessageQueue], members: list[str], current) -> int:
    """Of all ways to share that differ by one queue at most."""
    size = len(queues) // len(members)
    return min(
        sum(current.get(queue) != member for queue, member in zip(queues, choice, strict=True))
        for choice in product(members, repeat=len(queues))
        if all(choice.count(member) - size in (0, 1) for member in members)
    )


@given(owners, st.integers(0, 5), st.integers(1, 4))
def test_sticky_is_even_and_moves_as_few_queues_as_possible(had, queue_count, member_count) -> None:
    queues, members = sorted(QUEUES[:queue_count]), MEMBERS[:member_count]
    current = {queue: owner for queue, owner in zip(QUEUES, had, strict=True) if owner}
    shares = sticky(queues, members, current)
    assert sorted(queue for share in shares.values() for queue in share) == queues
    assert {len(share) - queue_count // member_count for share in shares.values()} <= {0, 1}
    assert moved(current, shares) == fewest_moves(queues, members, current)


@given(owners, st.data())
def test_sticky_takes_first_what_its_member_is_giving_up_already(had, data) -> None:
    current = dict(zip(QUEUES, ["m0"] * 7, strict=True))
    leaving = data.draw(st.sets(st.sampled_from(QUEUES), max_size=3))
    ordered = {q: m for q, m in current.items() if q not in leaving} | dict.fromkeys(leaving, "m0")
    shares = sticky(sorted(QUEUES), ["m0", "m1"], ordered)
    assert leaving <= set(shares["m1"])


@given(st.sets(st.integers(0, 99), min_size=1, max_size=8), st.integers(100, 120))
def test_consistent_hash_moves_queues_from_or_to_the_one_that_goes_or_comes(ids, newcomer) -> None:
    queues = [MessageQueue("t", "b", n) for n in range(32)]
    members = sorted(f"m{n}" for n in ids)
    before = consistent_hash(queues, members, {})
    after = consistent_hash(queues, sorted([*members, f"m{newcomer}"]), {})
    for member in members:
        assert set(after[member]) <= set(before[member])


@pytest.mark.parametrize("strategy", [AVERAGE, AVERAGE_BY_CIRCLE, CONSISTENT_HASH, STICKY])
@given(owners, st.integers(0, 7), st.integers(1, 4))
def test_every_queue_has_one_member(strategy, had, queue_count, member_count) -> None:
    current = {queue: owner for queue, owner in zip(QUEUES, had, strict=True) if owner}
    subscriptions = {member: ["t"] for member in MEMBERS[:member_count]}
    target = allocate(strategy_named(strategy), QUEUES[:queue_count], subscriptions, current)
    assert target.keys() == set(QUEUES[:queue_count])
    assert set(target.values()) <= subscriptions.keys()
    # Of what it answered itself, it moves nothing.
    again = allocate(strategy_named(strategy), QUEUES[:queue_count], subscriptions, target)
    assert again == target


@given(st.integers(0, 40), st.integers(1, 12))
def test_blocks_of_average_meet_and_cover_everything(queues, members) -> None:
    ends = 0
    for index in range(members):
        start, count = average_block(index, queues, members)
        assert not count or start == ends
        ends += count
    assert ends == queues
