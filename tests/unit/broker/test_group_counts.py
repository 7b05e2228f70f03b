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


def test_groups_to_which_nothing_happened_have_zeros_as_far_as_they_would_be_counted() -> None:
    counts = GroupCounts(groups_max=2)
    assert list(counts.with_zeros(["a", "b", "c"])) == [("a", 0), ("b", 0)]
    counts.add("c", 2)
    assert dict(counts.with_zeros(["a", "b", "c"])) == {"c": 2, "a": 0}
    for group in ("a", "b"):
        counts.add(group, 1)
    assert dict(counts.with_zeros(["a", "b", "c"])) == {"c": 2, "a": 1, OTHERS: 1}
