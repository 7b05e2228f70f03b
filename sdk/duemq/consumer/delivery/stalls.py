"""How long callbacks have been busy with one message.  Pure.

Found by looking now and then at where each worker is, so that a callback that returns soon pays
nothing for it.  A stall is noticed up to one interval between looks late, never early.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Stalls(Generic[W]):
    """Of workers' tasks, called work here."""

    def __init__(self) -> None:
        self._seen: dict[W, tuple[int, float]] = {}  # work → position, since when

    def look(self, now_s: float, busy: Mapping[W, int]) -> dict[W, float]:
        """`busy`: all work that is being done → its position.  Answers seconds without progress."""
        seen: dict[W, tuple[int, float]] = {}
        for work, position in busy.items():
            last, since_s = self._seen.get(work, (None, now_s))
            seen[work] = position, since_s if last == position else now_s
        self._seen = seen
        return {work: now_s - since_s for work, (_, since_s) in seen.items()}
