from zlib import crc32

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.balance import (
    MessageQueue,
    allocate,
    average,
    average_block,
    average_by_circle,
    coordinator,
    queue_of_key,
    register_strategy,
    sticky,
    strategy_named,
)


def queues(count: int, topic: str = "orders", broker: str = "b1") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, queue_id) for queue_id in range(count)]


@pytest.mark.parametrize(
    ("queue_count", "member_count", "blocks"),
    [
        (0, 1, [(0, 0)]),
        (0, 3, [(0, 0), (0, 0), (0, 0)]),
        (1, 1, [(0, 1)]),
        (8, 1, [(0, 8)]),
        # fewer queues than members: one each, the last members nothing
        (1, 3, [(0, 1), (None, 0), (None, 0)]),
        (2, 3, [(0, 1), (1, 1), (None, 0)]),
        (3, 5, [(0, 1), (1, 1), (2, 1), (None, 0), (None, 0)]),
        # as many
        (4, 4, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        # no remainder
        (8, 2, [(0, 4), (4, 4)]),
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        # a remainder goes to the first members
        (8, 3, [(0, 3), (3, 3), (6, 2)]),
        (10, 4, [(0, 3), (3, 3), (6, 2), (8, 2)]),
        (5, 3, [(0, 2), (2, 2), (4, 1)]),
        (5, 4, [(0, 2), (2, 1), (3, 1), (4, 1)]),
        (7, 2, [(0, 4), (4, 3)]),
        (16, 5, [(0, 4), (4, 3), (7, 3), (10, 3), (13, 3)]),
    ],
)
def test_average_gives_contiguous_blocks_and_the_remainder_to_the_first(
    queue_count: int, member_count: int, blocks: list[tuple[int | None, int]]
) -> None:
    for index, (start, count) in enumerate(blocks):
        found_start, found_count = average_block(index, queue_count, member_count)
        assert found_count == count
        if count:
            assert found_start == start


@pytest.mark.parametrize("strategy", [average, average_by_circle, sticky])
@pytest.mark.parametrize("member_count", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("queue_count", [0, 1, 2, 7, 8, 12, 31])
def test_strategies_give_every_queue_to_one_member_and_differ_by_one_at_most(
    strategy, member_count: int, queue_count: int
) -> None:
    all_queues = queues(queue_count)
    shares = strategy(all_queues, [f"m{index:02}" for index in range(member_count)], {})
    assert sorted(queue for share in shares.values() for queue in share) == all_queues
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1


def test_by_circle_deals_like_cards() -> None:
    shares = average_by_circle(queues(5), ["a", "b"], {})
    assert [queue.queue_id for queue in shares["a"]] == [0, 2, 4]
    assert [queue.queue_id for queue in shares["b"]] == [1, 3]


def test_queues_are_sorted_by_broker_and_number_whatever_their_order() -> None:
    mixed = [*queues(4, broker="b2"), *reversed(queues(4, broker="b1"))]
    shares = allocate(average, mixed, {"m2": ["orders"], "m1": ["orders"]})
    assert {q for q, member in shares.items() if member == "m1"} == set(queues(4, broker="b1"))
    assert {q for q, member in shares.items() if member == "m2"} == set(queues(4, broker="b2"))


def test_each_topic_is_shared_among_its_own_subscribers() -> None:
    everything = [*queues(2, "orders"), *queues(2, "bills"), *queues(2, "nobody")]
    shares = allocate(average, everything, {"a": ["orders", "bills"], "b": ["bills"]})
    assert shares == {
        MessageQueue("orders", "b1", 0): "a",
        MessageQueue("orders", "b1", 1): "a",
        MessageQueue("bills", "b1", 0): "a",
        MessageQueue("bills", "b1", 1): "b",
    }


def test_strategies_plug_in_by_name() -> None:
    def everything_to_the_last(all_queues, members, current):
        return {members[-1]: all_queues}

    register_strategy("last-takes-all", everything_to_the_last)
    shares = allocate(
        strategy_named("last-takes-all"), queues(3), {"a": ["orders"], "b": ["orders"]}
    )
    assert set(shares.values()) == {"b"}


def test_an_unknown_strategy_is_refused_with_the_known_names() -> None:
    assert strategy_named("") is average
    with pytest.raises(InvalidArgument) as refused:
        strategy_named("averge")
    assert refused.value.field == "strategy"
    assert refused.value.value == "averge"
    assert "average" in refused.value.limit


def test_the_coordinator_is_the_same_for_everyone() -> None:
    # Pinned: a change of the hash would move every group of a running cluster.
    brokers = ["broker-0", "broker-1", "broker-2"]
    assert coordinator("gates", brokers) == coordinator("gates", reversed(brokers))
    assert {group: coordinator(group, brokers) for group in ("gates", "board", "billing")} == {
        "gates": "broker-1",
        "board": "broker-0",
        "billing": "broker-2",
    }
    assert coordinator("gates", []) is None


def test_a_broker_that_goes_moves_only_its_own_groups() -> None:
    brokers = ["broker-0", "broker-1", "broker-2", "broker-3"]
    groups = [f"group-{number}" for number in range(200)]
    before = {group: coordinator(group, brokers) for group in groups}
    after = {group: coordinator(group, brokers[:-1]) for group in groups}
    assert {before[group] for group in groups if before[group] != after[group]} == {"broker-3"}


def test_coordinators_spread_over_the_brokers() -> None:
    brokers = ["broker-0", "broker-1", "broker-2", "broker-3"]
    owners = [coordinator(f"group-{number}", brokers) for number in range(4_000)]
    assert all(900 < owners.count(broker) < 1_100 for broker in brokers)


def test_the_queue_of_a_key_does_not_change() -> None:
    # Pinned: a change would break the order of keyed messages over an upgrade.
    assert [queue_of_key(key, 8) for key in ("N1234", "N5678", "ü", "")] == [2, 6, 5, 0]


def described(shares: dict[MessageQueue, str]) -> int:
    """A digest of who has what."""
    lines = sorted(f"{q.topic}|{q.broker}|{q.queue_id}={member}" for q, member in shares.items())
    return crc32("\n".join(lines).encode())


def three_topics() -> list[MessageQueue]:
    return [
        queue
        for topic, count in (("orders", 97), ("bills", 16), ("späte", 1_300))
        for broker in ("b2", "b1")
        for queue in queues(count, topic, broker)
    ]


# Pinned: after an upgrade of a broker the queues are where they were.
@pytest.mark.parametrize(
    ("strategy", "alone", "seven", "after_a_change"),
    [
        ("average", 3_785_042_510, 3_674_490_579, 1_434_372_941),
        ("average-by-circle", 3_785_042_510, 2_274_847_432, 3_743_985_338),
        ("consistent-hash", 3_785_042_510, 3_193_101_518, 4_163_902_272),
        ("sticky", 3_785_042_510, 947_850_149, 1_050_714_833),
    ],
)
def test_a_strategy_answers_what_it_always_has(
    strategy: str, alone: int, seven: int, after_a_change: int
) -> None:
    share = strategy_named(strategy)
    topics = ["orders", "bills", "späte"]
    everything = three_topics()
    one = allocate(share, everything, {"m0": topics})
    members = {f"m{number}": topics[number % 2 :] for number in range(7)}
    many = allocate(share, everything, members, one)
    gone = {member: read for member, read in members.items() if member not in ("m1", "m4")}
    # The order in which a member has its queues says which of them it gives up.
    current = dict(sorted(many.items(), key=lambda each: crc32(repr(each).encode())))
    changed = allocate(share, everything[40:], gone | {"new": topics}, current)
    assert [described(each) for each in (one, many, changed)] == [alone, seven, after_a_change]
