import pytest

from duemq.errors import FencedMember, OffsetOutOfRange, Overloaded
from duemq_server.broker.store.offsets import (
    DELETED_MAX,
    SETTLED_QUEUE_MAX,
    SETTLED_ROW,
    GroupOffset,
    GroupQueue,
    Offsets,
)

KEY = GroupQueue("billing", "orders", 0)


def offsets(offset: int, generation: int) -> Offsets:
    made = Offsets()
    made.put(KEY, GroupOffset(offset, generation))
    return made


def test_a_new_group_starts_where_it_asked_to() -> None:
    assert Offsets().acquire(KEY, 5, 42, 0, 100) == GroupOffset(42, 5)


def test_a_new_generation_continues_and_fences_the_old_one() -> None:
    made = offsets(10, 5)
    progress = made.acquire(KEY, 6, 0, 0, 100)
    assert progress == GroupOffset(10, 6)
    made.put(KEY, progress)
    with pytest.raises(FencedMember) as caught:
        made.commit(KEY, 5, 11, 100)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("generation", "5", "6")
    with pytest.raises(FencedMember):
        made.acquire(KEY, 5, 0, 0, 100)
    with pytest.raises(FencedMember):
        made.check_fence(KEY, 5)


def test_the_same_generation_may_acquire_again() -> None:
    assert offsets(10, 5).acquire(KEY, 5, 0, 0, 100) == GroupOffset(10, 5)


def test_what_retention_removed_is_skipped() -> None:
    assert offsets(10, 5).acquire(KEY, 6, 0, 50, 100).offset == 50


def test_no_membership_is_never_fenced_and_lowers_no_fence() -> None:
    assert offsets(10, 5).commit(KEY, 0, 3, 100) == GroupOffset(3, 5)


def test_a_generation_that_acquired_nothing_commits_nothing() -> None:
    """The group was deleted meanwhile."""
    with pytest.raises(FencedMember) as caught:
        Offsets().commit(KEY, 5, 11, 100)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("generation", "5", "0")
    assert Offsets().commit(KEY, 0, 11, 100) == GroupOffset(11, 0)


def test_a_late_member_of_a_deleted_group_acquires_nothing() -> None:
    """Another group may have the name by then; it is told what to be at least, as after a reset."""
    made = offsets(10, 6)
    made.forget_group("billing")
    for name in ("other", "billing"):
        made.put(GroupQueue(name, "orders", 1), GroupOffset(0, 7))  # of another queue
        for generation in (5, 6):
            with pytest.raises(FencedMember) as caught:
                made.acquire(KEY, generation, 42, 0, 100)
            assert caught.value.limit == "7"
    assert made.acquire(KEY, 7, 42, 0, 100) == GroupOffset(42, 7)


def test_deleted_groups_that_are_remembered_are_bounded() -> None:
    made = Offsets()
    for number in range(DELETED_MAX + 1):
        key = GroupQueue(f"g{number}", "orders", 0)
        made.put(key, GroupOffset(0, 5))
        made.forget_group(key.group)
    assert made.acquire(GroupQueue("g0", "orders", 0), 5, 42, 0, 100) == GroupOffset(42, 5)
    with pytest.raises(FencedMember):
        made.acquire(GroupQueue("g1", "orders", 0), 5, 42, 0, 100)


def test_a_commit_that_comes_late_moves_nothing_back() -> None:
    """Its member timed out, said more since, and was heard: then the old one arrives."""
    assert offsets(10, 5).commit(KEY, 5, 7, 100) == GroupOffset(10, 5)
    assert offsets(10, 5).commit(KEY, 5, 11, 100) == GroupOffset(11, 5)
    # The first word of a generation is not late, whatever was there before.
    assert offsets(10, 5).commit(KEY, 6, 7, 100) == GroupOffset(7, 6)


@pytest.mark.parametrize(
    ("was", "offset", "stands"),
    [(10, 3, 3), (7, 3, 10), (-1, 3, 10), (None, 3, 3), (7, 12, 12), (-1, 12, 12)],
)
def test_who_is_no_member_goes_back_from_where_the_group_is(
    was: int | None, offset: int, stands: int
) -> None:
    assert offsets(10, 5).commit(KEY, 0, offset, 100, was) == GroupOffset(stands, 5)


@pytest.mark.parametrize("offset", [-1, 101])
def test_an_offset_beyond_the_queue_is_refused(offset: int) -> None:
    with pytest.raises(OffsetOutOfRange) as caught:
        offsets(10, 5).commit(KEY, 5, offset, 100)
    assert (caught.value.value, caught.value.limit) == (str(offset), "0 to 100")


def test_the_newest_generation_of_a_group() -> None:
    made = offsets(10, 5)
    made.put(KEY._replace(queue_id=1), GroupOffset(0, 9))
    assert made.generation_of("billing") == 9
    assert made.generation_of("nobody") == 0


def test_offsets_of_a_group_by_topic() -> None:
    made = offsets(10, 5)
    made.put(KEY._replace(topic="a"), GroupOffset(1, 1))
    assert [row[0] for row in made.of_group("billing")] == ["a", "orders"]
    assert [row[0] for row in made.of_group("billing", "a")] == ["a"]


def test_the_checkpoint_round_trips() -> None:
    made = offsets(10, 5)
    again = Offsets()
    again.load(*made.freeze()())
    assert again.find(KEY) == GroupOffset(10, 5)


def test_deleting_a_topic_forgets_its_offsets() -> None:
    made = offsets(10, 5)
    made.forget_topic("orders")
    assert made.find(KEY) is None
    assert made.groups() == []


def test_the_number_of_entries_is_bounded() -> None:
    made = Offsets(entries_max=1)
    made.put(KEY, GroupOffset(1, 1))
    made.check_room([KEY])
    with pytest.raises(Overloaded):
        made.check_room([KEY, KEY._replace(queue_id=1)])


def test_a_reset_raises_the_fence_of_who_was_there() -> None:
    made = offsets(10, 5)
    assert made.reset(KEY, 3) == GroupOffset(3, 6)
    assert made.reset(KEY._replace(queue_id=1), 3) == GroupOffset(3, 0)


def test_settled_offsets_are_kept_in_order_once_and_from_the_committed_one_on() -> None:
    made = offsets(10, 5)
    made.settle(KEY, [30, 12, 9, 20, 12])
    made.settle(KEY, [40, 11, 20])
    assert list(made.settled(KEY)) == [11, 12, 20, 30, 40]
    assert [made.is_done(KEY, at) for at in (9, 10, 11, 12, 13, 40, 41)] == [
        True,
        False,
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_commit_drops_the_settled_offsets_it_passes() -> None:
    made = offsets(10, 5)
    made.settle(KEY, [11, 12, 20])
    made.put(KEY, GroupOffset(12, 5))
    assert list(made.settled(KEY)) == [12, 20]
    made.put(KEY, GroupOffset(3, 5))  # back: what was settled is so still
    assert list(made.settled(KEY)) == [12, 20]
    made.put(KEY, GroupOffset(21, 5))
    assert not made.settled(KEY)
    made.check_settled_room(KEY, SETTLED_QUEUE_MAX)


def test_a_group_that_never_committed_may_settle() -> None:
    made = Offsets()
    made.settle(KEY, [7])
    assert "billing" in made
    assert made.groups() == ["billing"]
    assert made.find(KEY) is None
    assert made.acquire(KEY, 5, 0, 0, 100) == GroupOffset(0, 5)
    assert made.is_done(KEY, 7)
    assert not made.is_done(KEY, 6)


def test_deleting_forgets_what_was_settled() -> None:
    for made in (offsets(10, 5), Offsets()):
        made.settle(KEY, [20])
        other = KEY._replace(topic="bills")
        made.settle(other, [1])
        made.forget_topic("orders")
        assert not made.settled(KEY)
        assert list(made.settled(other)) == [1]
        assert "billing" in made
        made.forget_group("billing")
        assert not made.settled(other)
        assert made.groups() == []
        made.put(KEY, GroupOffset(1, 1))
        made.check_room([KEY])


def test_the_number_of_settled_offsets_is_bounded() -> None:
    made = offsets(10, 5)
    made.settle(KEY, range(20, 20 + SETTLED_QUEUE_MAX))
    made.settle(KEY, range(20, 20 + SETTLED_QUEUE_MAX))
    made.check_settled_room(KEY, 0)
    with pytest.raises(Overloaded) as caught:
        made.check_settled_room(KEY, 1)
    assert (caught.value.field, caught.value.limit) == ("offset", str(SETTLED_QUEUE_MAX))
    made.check_settled_room(KEY._replace(queue_id=1), SETTLED_QUEUE_MAX)


def test_the_checkpoint_has_the_settled_offsets() -> None:
    made = offsets(10, 5)
    made.settle(KEY, [11, 30])
    again = Offsets()
    again.settle(KEY, [99])
    again.load(*made.freeze()())
    assert list(again.settled(KEY)) == [11, 30]


def test_many_settled_offsets_of_a_queue_are_several_rows() -> None:
    """So that no piece of a checkpoint takes long."""
    made, again = offsets(10, 5), Offsets()
    made.settle(KEY, range(20, 20 + 2 * SETTLED_ROW + 1))
    rows, settled = made.freeze()()
    assert [len(row[3]) for row in settled] == [SETTLED_ROW, SETTLED_ROW, 1]
    again.load(rows, settled)
    assert again.settled(KEY) == made.settled(KEY)
