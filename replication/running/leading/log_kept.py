"""What of a leader's log those still need who catch up: a service that would cut it there waits.

A snapshot of a large shard is on its way for minutes, and the log that goes with it must be there
when it is installed: else the replica would need another one, and another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from duemq_server.replication.protocol.leader import Leader
from duemq_server.serving.clock import steady_ms

INSTALL_MS = 60_000
"""From the last part of a snapshot until whoever got it follows."""


class LogKept:
    """Owned by Leading; used from its event loop."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._numbers = itertools.count()
        self._sending: dict[int, tuple[int, str]] = {}  # position, to whom
        self._sent: list[tuple[int, int, str]] = []  # until when, position, to whom

    def receivers(self, now_ms: int) -> set[str]:
        """Names of those that get a snapshot, or got it just now.  `now_ms`: as `needed_from`."""
        self._forget(now_ms)
        sending = {name for _, name in self._sending.values()}
        return sending | {name for _, _, name in self._sent}

    @contextmanager
    def sending(self, log_start: int, name: str) -> Iterator[None]:
        """While `name` gets a snapshot, and a while after, the log from there on is needed."""
        number = next(self._numbers)
        self._sending[number] = log_start, name
        try:
            yield
            self._sent.append((steady_ms() + INSTALL_MS, log_start, name))
        finally:
            del self._sending[number]

    def needed_from(self, now_ms: int) -> int | None:
        """None: nobody needs any of it.  `now_ms`: of the steady clock."""
        self._forget(now_ms)
        follow = self._leader.followers.values()
        needed = [
            *(position for position, _ in self._sending.values()),
            *(position for _, position, _ in self._sent),
            *(max(each.began, each.durable or 0) for each in follow),
        ]
        return min(needed, default=None)

    def _forget(self, now_ms: int) -> None:
        self._sent = [each for each in self._sent if each[0] > now_ms]
