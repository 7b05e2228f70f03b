from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq_server.replication.protocol.epochs import Epochs, common_end


@pytest.mark.parametrize(
    ("mine", "my_end", "theirs", "their_end", "common"),
    [
        ([(1, 0), (3, 400)], 700, [(1, 0), (2, 500)], 900, 400),  # the drawing
        ([(1, 0), (2, 500)], 900, [(1, 0), (3, 400)], 700, 400),
        ([(1, 0)], 700, [(1, 0)], 900, 700),
        ([(1, 0)], 900, [(1, 0)], 700, 700),
        ([(1, 0), (2, 500)], 900, [(1, 0), (2, 600)], 900, 500),  # one epoch, two places
        ([], 0, [(1, 0)], 900, 0),
        ([(1, 0)], 900, [], 0, 0),
        ([(1, 0)], 100, [(2, 0)], 100, 0),
        ([(5, 900)], 1_000, [(1, 0), (5, 900)], 950, 950),  # mine begins with a snapshot
        ([], 700, [(0, 0), (1, 900)], 1_000, 700),  # mine ends before there were replicas
        ([], 700, [(0, 0), (1, 300)], 1_000, 300),
        ([], 700, [(1, 0)], 1_000, 0),
    ],
)
def test_what_two_logs_have_in_common(
    mine: list[tuple[int, int]],
    my_end: int,
    theirs: list[tuple[int, int]],
    their_end: int,
    common: int,
) -> None:
    assert common_end(mine, my_end, theirs, their_end) == common


@given(st.lists(st.integers(0, 4), max_size=30), st.data())
def test_logs_of_one_history_have_all_in_common_that_both_have(
    steps: list[int], data: st.DataObject
) -> None:
    """A history grows by entries, and by epochs (0); two logs hold some of its beginning."""
    begins, end = [], 0
    for epoch, step in enumerate(steps, 1):
        if step == 0:
            begins.append((epoch, end))
        end += 8 * (step or 1)
    first, second = (data.draw(st.integers(0, end)) for _ in range(2))
    mine = [each for each in begins if each[1] < first]
    theirs = [each for each in begins if each[1] < second]
    common = common_end(mine, first, theirs, second)
    assert common <= min(first, second)
    if mine and theirs:
        assert common == min(first, second)


def test_epochs_are_cut_with_their_log() -> None:
    epochs = Epochs([(1, 0), (4, 800)])
    epochs.truncate(801)
    assert epochs.begins == ((1, 0), (4, 800))
    epochs.truncate(800)
    assert (epochs.begins, epochs.last) == (((1, 0),), 1)
    epochs.truncate(0)
    assert (epochs.begins, epochs.last) == ((), 0)


def test_what_lies_before_the_first_epoch_is_of_epoch_0() -> None:
    epochs = Epochs()
    epochs.note(7, 320)
    assert epochs.begins == ((0, 0), (7, 320))
    assert Epochs([(7, 320)]).begins == ((7, 320),)  # older ones were dropped
    founded = Epochs()
    founded.note(1, 0)
    assert founded.begins == ((1, 0),)


@pytest.mark.parametrize(
    ("position", "left"), [(0, 3), (400, 3), (401, 2), (900, 2), (901, 1), (5_000, 1)]
)
def test_the_epoch_that_a_log_begins_behind_stays(position: int, left: int) -> None:
    begins = [(1, 0), (3, 400), (4, 900)]
    epochs = Epochs(begins)
    epochs.drop_before(position)
    assert epochs.begins == tuple(begins[-left:])


@pytest.mark.parametrize("begin", [(4, 900), (3, 900), (5, 800), (5, 0)])
def test_epochs_grow(begin: tuple[int, int]) -> None:
    epochs = Epochs([(1, 0), (4, 800)])
    with pytest.raises(ValueError, match="does not follow"):
        epochs.note(*begin)


@pytest.mark.parametrize(
    ("position", "left"),
    [(0, [0, 100, 200]), (99, [0, 100, 200]), (100, [0, 100, 200]), (101, [100, 200])],
)
def test_the_epoch_before_the_logs_first_entry_is_kept(position: int, left: list[int]) -> None:
    epochs = Epochs([(1, 0), (2, 100), (4, 200)])
    epochs.drop_before(position)
    assert [start for _, start in epochs.begins] == left
    empty = Epochs([(1, 0), (2, 100), (4, 200)])
    empty.truncate(position)  # as after a snapshot: the log is empty and begins there
    assert common_end(empty.begins, position, epochs.begins, 300) == position
