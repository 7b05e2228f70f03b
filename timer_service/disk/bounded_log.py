"""A log that takes no more while replicas do not follow."""

from __future__ import annotations

from collections.abc import Sequence

from duemq.errors import DuemqError
from duemq_server.storage.disk import Buffer
from duemq_server.storage.errors import LogFull
from duemq_server.storage.log import SegmentedLog


class BoundedLog:
    """What the core of a leading shard appends to; of the event loop.

    Frames wait at their brokers then, and what is due in the dispatcher, as while a disk is slow.
    """

    def __init__(self, log: SegmentedLog, uncommitted_max: int) -> None:
        """All of `log` is committed."""
        self._log = log
        self._max = uncommitted_max
        self._committed = log.end_position
        self._over: DuemqError | None = None

    @property
    def end_position(self) -> int:
        """The log's."""
        return self._log.end_position

    def append(self, kind: int, parts: Sequence[Buffer]) -> tuple[int, int]:
        """As SegmentedLog's.  Raises LogFull while too much is not committed, and see below."""
        if self._over is not None:
            raise self._over
        waits = self._log.end_position - self._committed
        if waits > self._max:
            raise LogFull(f"{waits} bytes wait for replicas, at most {self._max} may")
        return self._log.append(kind, parts)

    def advance(self, position: int) -> None:
        """So much is committed."""
        self._committed = position

    def close(self) -> None:
        """Takes nothing more: raises LogFull for all that comes."""
        self._max = -1

    def end(self, error: DuemqError) -> None:
        """Takes nothing more: raises `error` for all that comes."""
        self._over = error
