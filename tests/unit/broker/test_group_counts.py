from duemq_server.broker.group_counts import OTHERS, GroupCounts


def test_groups_beyond_the_bound_are_counted_together() -> None:
    counts = GroupCounts(groups_max=2)
    for group in ("a", "b", "a", "c", "d"):
        counts.add(group, 2)
    assert dict(counts) == {"a": 4, "b": 2, OTHERS: 4}
    assert (counts.of("a"), counts.of("c")) == (4, 0)
