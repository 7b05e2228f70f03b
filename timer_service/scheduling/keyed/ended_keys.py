"""What became of the last timer under a key: of keys under which nothing waits.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

Of the last `KEYS_MAX` that ended, by hash; some 100 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duemq_server.timer_service.timers.keyed import FIRED
from duemq_server.timer_service.timers.keyed_entry import CANCELLED

KEYS_MAX = 100_000
_EXPIRED_AT_ONCE = 10_000


class SavedKey(NamedTuple):
    """As it lies in a checkpoint."""

    hashed: int
    at_ms: int
    fired: bool  # else cancelled


class EndedKeys:
    """See the module."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, bool]] = {}  # by hash, the last one at the end

    def note(self, hashes: Iterable[int], at_ms: int, *, fired: bool) -> None:
        """Timers with keys of these hashes fired, or were cancelled; 0: one without a key."""
        for hashed in hashes:
            if hashed:
                self._ends.pop(hashed, None)
                self._ends[hashed] = at_ms, fired
        while len(self._ends) > KEYS_MAX:
            del self._ends[next(iter(self._ends))]

    def forget(self, hashes: Iterable[int]) -> None:
        """Something waits under these keys again."""
        if self._ends:
            for hashed in hashes:
                self._ends.pop(hashed, None)

    def outcome(self, hashed: int) -> str | None:
        """FIRED or CANCELLED; None: not known."""
        end = self._ends.get(hashed)
        return None if end is None else FIRED if end[1] else CANCELLED

    def expire(self, before_ms: int) -> None:
        """Forgets some of what ended before."""
        for _ in range(_EXPIRED_AT_ONCE):
            hashed = next(iter(self._ends), None)
            if hashed is None or self._ends[hashed][0] >= before_ms:
                return
            del self._ends[hashed]

    def saved(self) -> list[SavedKey]:
        """A copy, for a checkpoint."""
        return [SavedKey(hashed, at_ms, fired) for hashed, (at_ms, fired) in self._ends.items()]

    def restore(self, saved: Iterable[SavedKey]) -> None:
        """Takes over what a checkpoint has."""
        for hashed, at_ms, fired in saved:
            self._ends[hashed] = at_ms, fired
