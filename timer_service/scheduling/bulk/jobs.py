"""Jobs that cancel, shift or move what is pending of a topic: what is wanted, and how far they are.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A job touches what was pending when it was accepted, and nothing else: the offsets that sources had
reached by then (`fences`) tell for good, for a timer that was shifted has an offset behind them.
So a job that goes on after a crash begins anew, and finds what is left; no place is noted.

One job at a time is open.  Those that are over are remembered, for whoever got no answer.

Jobs take their turns as they were accepted, but for a cancel that comes while a shift or a move
waits for space on the disk, which it makes: it goes first, and the other one stands behind it,
where that comes to the same (`Which.may_pass`).
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from duemq.protocol.due import DUE_MS_MAX
from duemq_server.timer_service.timers.log_entries import SourceId

REMEMBERED_MAX = 1_000
KEEP_MS = 24 * 3_600_000
PASSED_MS_MAX = KEEP_MS // 24
"""Between two looks no more has passed: the rest is a clock that was set, or a downtime."""


class Which(NamedTuple):
    """Timers that a job is about, and what becomes of them."""

    topic: str
    key_prefix: str  # of timer_key; empty: of any or none
    from_ms: int  # due then or later
    to_ms: int  # due before
    by_ms: int | None  # later, or sooner; None: they are cancelled, or moved
    to_topic: str = ""  # they are for this one from now on, but for those with keys

    @property
    def brings(self) -> bool:
        """Whether they come again, with new handles."""
        return self.by_ms is not None or bool(self.to_topic)

    def may_pass(self, first: Which) -> bool:
        """Whether it may be done before one that was accepted first, and brings timers anew.

        It must be a cancel that means a timer, or does not, whether the other one has been at it or
        not.  While it is at work the other one stands still: so it misses none.
        """
        if self.brings:
            return False
        if self.topic not in (first.topic, first.to_topic):
            return True
        if first.to_topic:
            return bool(self.key_prefix)  # those with keys stay where they are
        mine, its = self.key_prefix, first.key_prefix
        if not (mine.startswith(its) or its.startswith(mine)):
            return True
        return self.from_ms == 0 and self.to_ms > DUE_MS_MAX


@dataclasses.dataclass(slots=True)
class Job:
    """A job, and what it has done so far."""

    id: bytes
    which: Which
    fences: dict[SourceId, int]  # offsets before these, by source
    count: int = 0
    over_ms: int = 0  # when it ended; 0: it is open
    problem: str = ""
    """What could not be read, once it is over."""

    def to_json(self) -> dict[str, Any]:
        """For the log and checkpoints."""
        return {
            "id": base64.b64encode(self.id).decode(),
            "which": list(self.which),
            "fences": [(*source, offset) for source, offset in self.fences.items()],
            "count": self.count,
            "over_ms": self.over_ms,
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Job:
        """Reads `to_json`'s."""
        return cls(
            base64.b64decode(found["id"]),
            Which(*found["which"]),
            {SourceId(store, queue): offset for store, queue, offset in found["fences"]},
            found["count"],
            found["over_ms"],
            found["problem"],
        )


class BulkJobs:
    """See the module."""

    def __init__(self) -> None:
        self.open: Job | None = None
        self.behind: Job | None = None
        """It was open, and goes on when the one that is now is over."""
        self._over: dict[bytes, Job] = {}
        self._now_ms = 0  # as of the last look; 0: there was none

    def find(self, job_id: bytes) -> Job | None:
        """A job that is open or remembered."""
        for job in (self.open, self.behind):
            if job is not None and job.id == job_id:
                return job
        return self._over.get(job_id)

    @property
    def known(self) -> list[Job]:
        """All that are open or remembered."""
        return [*self._over.values(), *filter(None, (self.behind, self.open))]

    def begin(self, job: Job) -> None:
        """It is accepted, in front of one that is open; or it is that one, which goes on."""
        if self.behind is not None and self.behind.id == job.id:
            self.behind = None
        elif self.open is not None and self.open.id != job.id:
            self.behind = self.open
        self.open = job

    def finish(self, now_ms: int, problem: str) -> None:
        """The open job is over."""
        self._follow(now_ms)
        job, self.open = self.open, None
        assert job is not None
        job.over_ms, job.problem, job.fences = now_ms, problem, {}
        self._over[job.id] = job
        while len(self._over) > REMEMBERED_MAX:
            del self._over[next(iter(self._over))]

    def expire(self, now_ms: int) -> None:
        """Forgets what is past its time.

        Of a job that was forgotten too early a repeat would shift all a second time.
        """
        self._follow(now_ms)
        for old in [each.id for each in self._over.values() if each.over_ms + KEEP_MS < now_ms]:
            del self._over[old]

    def _follow(self, now_ms: int) -> None:
        """Ages are of what passes between looks: a clock may be set."""
        last_ms = self._now_ms or max((each.over_ms for each in self._over.values()), default=0)
        passed_ms, self._now_ms = now_ms - last_ms, now_ms
        jump_ms = passed_ms - min(max(passed_ms, 0), PASSED_MS_MAX)
        if jump_ms:
            for each in self._over.values():
                each.over_ms = max(1, each.over_ms + jump_ms)

    def saved(self) -> list[dict[str, Any]]:
        """For a checkpoint.  Older releases take the one behind for open, if it is alone."""
        return [
            each.to_json() | ({"behind": True} if each is self.behind else {})
            for each in self.known
        ]

    def restore(self, saved: Iterable[dict[str, Any]]) -> None:
        """Takes over what a checkpoint has."""
        for found in saved:
            each = Job.from_json(found)
            if each.over_ms:
                self._over[each.id] = each
            elif found.get("behind"):  # the log is to say so when it goes on
                self.behind = each
            else:
                self.begin(each)
