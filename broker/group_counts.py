"""Counts by group, for metrics.  Pure."""

from collections.abc import Iterable, Iterator
from itertools import islice

# Groups that are counted one by one.  A label of a metric costs memory in every collector.
GROUPS_MAX = 1_000
OTHERS = "%OTHER%"


class GroupCounts:
    """How often something happened to each group since the process started, or it was deleted."""

    def __init__(self, groups_max: int = GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._counts: dict[str, int] = {}

    def add(self, group: str, count: int) -> None:
        """Counts for a group, or for all others once there are too many."""
        if group not in self._counts and len(self._counts) >= self._groups_max:
            group = OTHERS
        self._counts[group] = self._counts.get(group, 0) + count

    def of(self, group: str) -> int:
        """The count of one group."""
        return self._counts.get(group, 0)

    def forget(self, group: str) -> None:
        """The group was deleted: another one is counted in its place."""
        self._counts.pop(group, None)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(group, count).  Any thread."""
        return iter(list(self._counts.items()))

    def with_zeros(self, groups: Iterable[str]) -> Iterator[tuple[str, int]]:
        """As iterating, and 0 for those of `groups` that would be counted by name.  Any thread.

        Prometheus sees no increase of a count that is there only from the first one on.
        """
        counts = dict(self)
        yield from counts.items()
        room = max(self._groups_max - len(counts), 0)
        others = (group for group in groups if group not in counts)
        yield from ((group, 0) for group in islice(others, room))
