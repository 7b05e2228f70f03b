"""Where epochs begin in a log, and how much of two logs is the same.  Pure.

Owned by: a replica's role.  It is in the log (EPOCH entries), in memory, and in checkpoints.

Positions say nothing by themselves: two leaders may have written different entries at one.  Within
an epoch one leader wrote, so two logs are the same up to the smaller of the ends that they have of
the last epoch that begins at the same place in both.

    mine    1@0  3@400       end 700          the last that both have: 1@0
    theirs  1@0  2@500       end 900          mine ends it at 400, theirs at 500: 400 are the same
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Begin(NamedTuple):
    """An epoch and the position of its EPOCH entry."""

    epoch: int
    start: int


class Epochs:
    """The epochs of one log, oldest first."""

    def __init__(self, begins: Iterable[tuple[int, int]] = ()) -> None:
        self._begins: list[Begin] = []
        for epoch, start in begins:
            self._add(epoch, start)

    def note(self, epoch: int, start: int) -> None:
        """An EPOCH entry lies at `start`.  Raises ValueError unless both grow.

        What was written before there were replicas is of epoch 0.
        """
        if start and not self._begins:
            self._add(0, 0)
        self._add(epoch, start)

    def _add(self, epoch: int, start: int) -> None:
        if self._begins and not (epoch > self.last and start > self._begins[-1].start):
            raise ValueError(f"epoch {epoch} at {start} does not follow {self._begins[-1]}")
        self._begins.append(Begin(epoch, start))

    def truncate(self, end: int) -> None:
        """The log ends there now."""
        del self._begins[bisect.bisect_left(self._begins, end, key=lambda each: each.start) :]

    def drop_before(self, position: int) -> None:
        """The log begins there now; the epoch that the entry before that was of stays.

        An empty log that begins there, after a snapshot, has nothing else in common with this one.
        """
        covering = bisect.bisect_left(self._begins, position, key=lambda each: each.start) - 1
        if covering > 0:
            del self._begins[:covering]

    @property
    def last(self) -> int:
        """The log's last epoch; 0 if it has none."""
        return self._begins[-1].epoch if self._begins else 0

    @property
    def begins(self) -> tuple[Begin, ...]:
        """All of them."""
        return tuple(self._begins)


def common_end(
    mine: Sequence[tuple[int, int]],
    my_end: int,
    theirs: Sequence[tuple[int, int]],
    their_end: int,
) -> int:
    """How much of `mine` is in `theirs` too; 0 if they share no epoch.

    A log that knows of no epoch is all of epoch 0, from before there were replicas.
    """
    their_ends = {tuple(begin): end for begin, end in _with_ends(theirs, their_end)}
    for begin, end in reversed(_with_ends(mine, my_end)):
        if begin in their_ends:
            return min(end, their_ends[begin])
    return 0


def _with_ends(
    begins: Sequence[tuple[int, int]], log_end: int
) -> list[tuple[tuple[int, int], int]]:
    begins = begins or [(0, 0)]
    ends = [*(start for _, start in begins), log_end][1:]
    return [((epoch, start), end) for (epoch, start), end in zip(begins, ends, strict=True)]
