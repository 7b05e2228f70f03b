"""Requests of the last minutes and their answers: one that comes again does nothing more.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

By slots of ten seconds, that of their decision.  Only the newest takes any in, so that a checkpoint
can encode the others in another thread.  Some 200 bytes a request in memory, beside its answer.

Ages are of time that passes while the shard runs: of what the clock shows to have passed since the
last look (housekeeping's come every second) a slot's length counts at most, and slots are moved by
the rest.  So a clock that was set, either way, forgets nothing early and keeps nothing for hours.

Kept for KEEP_MS, and where more come than there is room for, for KEEP_MIN_MS at least: what does
not fit then is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duemq.errors import Overloaded
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, RequestKey

KEEP_MS = 600_000
KEEP_MIN_MS = 120_000
"""Clients repeat no request for longer (protos/duemq/v1/timer.proto)."""
SLOT_MS = 10_000


class SavedRequests(NamedTuple):
    """Of a slot, as they lie in a checkpoint."""

    slot: int  # since 1970
    answers: dict[bytes, bytes]  # by RequestKey.name


class RequestMemory:
    """See the module."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.requests = 0
        self.bytes = 0  # of answers
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._slots: dict[int, dict[bytes, bytes]] = {}  # ascending
        self._now_ms = 0  # as of the last look
        self._jumped_ms = 0  # what is left of jumps, less than a slot

    def find(self, request: RequestKey) -> bytes | None:
        """The answer of a request that was decided."""
        name = request.name()
        for answers in reversed(self._slots.values()):
            answer = answers.get(name)
            if answer is not None:
                return answer
        return None

    def make_room(self, answer: bytes, now_ms: int) -> None:
        """Raises Overloaded if one more cannot be remembered."""
        self._follow(now_ms)
        while not self._has_room(answer) and self._forget_before(now_ms - KEEP_MIN_MS):
            pass
        for what, has, limit in (
            ("requests", self.requests + 1, self._requests_max),
            ("bytes of answers", self.bytes + len(answer), self._bytes_max),
        ):
            if has > limit:
                raise Overloaded(
                    f"{limit} {what} of the last {KEEP_MIN_MS // 60_000} minutes are remembered,"
                    " no more can be",
                    field="request_id",
                    limit=limit,
                )

    def add(self, request: RequestKey, answer: bytes, at_ms: int) -> None:
        """A request was decided."""
        if request.id == NO_REQUEST:
            return
        self._follow(at_ms)
        slot = at_ms // SLOT_MS
        if self._slots:
            slot = max(slot, next(reversed(self._slots)))
        self._slots.setdefault(slot, {})[request.name()] = answer
        self.requests += 1
        self.bytes += len(answer)

    def expire(self, now_ms: int) -> None:
        """Forgets what is past its time."""
        self._follow(now_ms)
        while self._forget_before(now_ms - KEEP_MS):
            pass

    def _follow(self, now_ms: int) -> None:
        """Slots move with a clock that jumped."""
        passed_ms = now_ms - self._now_ms
        self._now_ms = now_ms
        jump_ms = passed_ms - min(max(passed_ms, 0), SLOT_MS)
        if jump_ms and self._slots:
            by, self._jumped_ms = divmod(self._jumped_ms + jump_ms, SLOT_MS)
            self._slots = {slot + by: answers for slot, answers in self._slots.items()}

    def _has_room(self, answer: bytes) -> bool:
        return self.requests < self._requests_max and self.bytes + len(answer) <= self._bytes_max

    def _forget_before(self, time_ms: int) -> bool:
        """Lets the oldest slot go if all of it is older than that; False: there is none."""
        slot = next(iter(self._slots), None)
        if slot is None or (slot + 1) * SLOT_MS >= time_ms:
            return False
        answers = self._slots.pop(slot)
        self.requests -= len(answers)
        self.bytes -= sum(map(len, answers.values()))
        return True

    def saved(self) -> list[SavedRequests]:
        """A copy, for a checkpoint: cheap, as only the newest slot changes."""
        saved = [SavedRequests(slot, answers) for slot, answers in self._slots.items()]
        if saved:
            saved[-1] = SavedRequests(saved[-1].slot, dict(saved[-1].answers))
        return saved

    def restore(self, saved: Iterable[SavedRequests]) -> None:
        """Takes over what a checkpoint has."""
        for slot, answers in saved:
            self._slots[slot] = answers
            self._now_ms = (slot + 1) * SLOT_MS
            self.requests += len(answers)
            self.bytes += sum(map(len, answers.values()))
