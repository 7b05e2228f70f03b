"""Requests of the last minutes and their answers: one that comes again does nothing more.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

By the minute of their decision.  Only the newest minute takes any in, so that a checkpoint can
encode the others in another thread.  Some 200 bytes a request in memory, beside its answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duemq.errors import Overloaded
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, RequestKey

KEEP_MS = 600_000
MINUTE_MS = 60_000


class SavedRequests(NamedTuple):
    """Of a minute, as they lie in a checkpoint."""

    minute: int
    answers: dict[bytes, bytes]  # by RequestKey.name


class RequestMemory:
    """See the module."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.requests = 0
        self.bytes = 0  # of answers
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._minutes: dict[int, dict[bytes, bytes]] = {}  # ascending

    def find(self, request: RequestKey) -> bytes | None:
        """The answer of a request that was decided."""
        name = request.name()
        for answers in reversed(self._minutes.values()):
            answer = answers.get(name)
            if answer is not None:
                return answer
        return None

    def check_room(self, answer: bytes) -> None:
        """Raises Overloaded if one more cannot be remembered."""
        for what, has, limit in (
            ("requests", self.requests + 1, self._requests_max),
            ("bytes of answers", self.bytes + len(answer), self._bytes_max),
        ):
            if has > limit:
                raise Overloaded(
                    f"{limit} {what} of the last {KEEP_MS // MINUTE_MS} minutes are remembered, no"
                    " more can be",
                    field="request_id",
                    limit=limit,
                )

    def add(self, request: RequestKey, answer: bytes, at_ms: int) -> None:
        """A request was decided."""
        if request.id == NO_REQUEST:
            return
        minute = at_ms // MINUTE_MS
        if self._minutes:
            minute = max(minute, next(reversed(self._minutes)))
        self._minutes.setdefault(minute, {})[request.name()] = answer
        self.requests += 1
        self.bytes += len(answer)

    def expire(self, now_ms: int) -> None:
        """Forgets what is past its time."""
        while self._minutes:
            minute = next(iter(self._minutes))
            if (minute + 1) * MINUTE_MS + KEEP_MS >= now_ms:
                return
            answers = self._minutes.pop(minute)
            self.requests -= len(answers)
            self.bytes -= sum(map(len, answers.values()))

    def saved(self) -> list[SavedRequests]:
        """A copy, for a checkpoint: cheap, as only the newest minute changes."""
        saved = [SavedRequests(minute, answers) for minute, answers in self._minutes.items()]
        if saved:
            saved[-1] = SavedRequests(saved[-1].minute, dict(saved[-1].answers))
        return saved

    def restore(self, saved: Iterable[SavedRequests]) -> None:
        """Takes over what a checkpoint has."""
        for minute, answers in saved:
            self._minutes[minute] = answers
            self.requests += len(answers)
            self.bytes += sum(map(len, answers.values()))
