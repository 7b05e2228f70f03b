from duemq_server.broker.group_counts import OTHERS, GroupCounts


def test_groups_beyond_the_bound_are_counted_together() -> None:
    counts = GroupCounts(groups_max=2)
    for group in ("a", "b", "a", "c", "d"):
        counts.add(group, 2)
    assert dict(counts) == {"a": 4, "b": 2, OTHERS: 4}
    assert (counts.of("a"), counts.of("c")) == (4, 0)


def test_a_deleted_group_makes_room_for_another() -> None:
    counts = GroupCounts(groups_max=1)
    for group in ("a", "b"):
        counts.add(group, 2)
        counts.forget(group)
    counts.add("a", 1)
    assert dict(counts) == {"a": 1}
