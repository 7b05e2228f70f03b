"""A replica's latest changes of role, for operators.

A replica that cannot follow tries again and again, and fails for one or two reasons in turn: each
is told once, so that they do not push out who led when.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

CHANGES_MAX = 64
TOLD_MAX = 16
"""Reasons that are known to have been told."""


class RoleChange(NamedTuple):
    """A change of role."""

    at_ms: int
    role: str
    epoch: int
    reason: str


class History:
    """Owned by Campaign."""

    def __init__(self) -> None:
        self.changes: deque[RoleChange] = deque(maxlen=CHANGES_MAX)
        self._told: set[tuple[str, str]] = set()

    def note(self, change: RoleChange) -> bool:
        """Whether that is news."""
        if change.role not in ("joining", "learner") or len(self._told) >= TOLD_MAX:
            self._told.clear()
        told = (change.role, change.reason)
        if told in self._told:
            return False
        self._told.add(told)
        self.changes.append(change)
        return True
