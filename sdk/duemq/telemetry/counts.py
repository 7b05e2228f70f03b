"""What became of a process's spans: each sampled span is counted once, as exported or as dropped.

A span that the sampler refused never comes here and is no loss.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping

QUEUE_FULL = "queue_full"
EXPORT_FAILED = "export_failed"
SHUTDOWN = "shutdown"

REASONS = (QUEUE_FULL, EXPORT_FAILED, SHUTDOWN)
"""Why spans are dropped: too many waited; nobody took them, or nobody knows; the process ended."""


class SpanCounts:
    """Thread-safe.  `waiting`, then `under way`, then exported or dropped.

    A forked child begins at zero: what waits is its parent's.  Closed is closed there, too.
    """

    def __init__(self) -> None:
        self._closed = False
        self._begin()
        reference = weakref.WeakMethod(self._begin)

        def begin_in_child() -> None:
            if begin := reference():
                begin()

        os.register_at_fork(after_in_child=begin_in_child)

    def _begin(self) -> None:
        self._lock = threading.Lock()  # guards the rest
        self._waiting = 0
        self._under_way = 0
        self._exported = 0
        self._dropped = dict.fromkeys(REASONS, 0)

    @property
    def waiting(self) -> int:
        """In the queue."""
        return self._waiting

    @property
    def exported(self) -> int:
        """Handed over."""
        return self._exported

    @property
    def dropped(self) -> Mapping[str, int]:
        """By reason; all of REASONS."""
        with self._lock:
            return dict(self._dropped)

    def admit(self, waiting_max: int, count: int = 1) -> str | None:
        """Spans ended: None if they may wait, all of them, else the reason why they are dropped.

        They may while less than `waiting_max` wait.
        """
        with self._lock:
            if self._closed:
                reason = SHUTDOWN
            elif self._waiting >= waiting_max:
                reason = QUEUE_FULL
            else:
                self._waiting += count
                return None
            self._dropped[reason] += count
            return reason

    def take(self, count: int) -> None:
        """Their export begins."""
        with self._lock:
            if not self._closed:
                self._waiting -= count
                self._under_way += count

    def export(self, count: int) -> None:
        """They are where they should be."""
        with self._lock:
            if not self._closed:
                self._under_way = max(0, self._under_way - count)
                self._exported += count

    def drop(self, count: int, reason: str) -> None:
        """They are lost, or nobody knows."""
        with self._lock:
            if not self._closed:
                self._under_way = max(0, self._under_way - count)
                self._dropped[reason] += count

    def close(self) -> None:
        """The end: what waits or is under way is dropped, whatever comes of it later."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._dropped[SHUTDOWN] += self._waiting + self._under_way
                self._waiting = self._under_way = 0
