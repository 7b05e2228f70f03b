"""Due timers that cannot go lie on disk while memory is short.

Owned by: Scheduler.  It only knows to which parked ones nothing can go.  No clock, no I/O.

A target whose broker is away, or whose topic is held, is stuck.  Its timers are parked when memory
is short: written to blocks of the target's own, and loaded when they could be sent.  When to do
which says housekeeping.py.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator

from duemq_server.timer_service.far.far_segments import Flush
from duemq_server.timer_service.far.numbering import Numbering
from duemq_server.timer_service.scheduling.dispatch import Dispatcher
from duemq_server.timer_service.scheduling.holding.holds import Holds, room_number
from duemq_server.timer_service.scheduling.tiers import Tiers
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import TargetId
from duemq_server.timer_service.timers.near import Near
from duemq_server.timer_service.timers.wheel import Ids

# Targets found stuck at once, with timers in memory or parked ones: what is due waits meanwhile.
LOOKS_MAX = 2_000
# Moved to disk at once: due timers whose targets are away, and such targets.
PARK_ROWS_MAX = 16_384
PARK_TARGETS_MAX = 512


class Parking:
    """Says which due timers cannot go, and how many can; takes the former out of memory."""

    def __init__(
        self,
        limits: Limits,
        dispatcher: Dispatcher,
        holds: Holds,
        numbers: Numbering,
        near: Near,
        tiers: Tiers,
    ) -> None:
        self._limits = limits
        self._dispatcher = dispatcher
        self._due = dispatcher.due
        self._holds = holds
        self._numbers = numbers
        self._near = near
        self._tiers = tiers
        self.looks_on = False
        self._shut: set[TargetId] = set()  # parked ones to which nothing can go …
        self._wakes = 0  # … since the dispatcher woke up so often

    def stuck(self, now_ms: int) -> list[int]:
        """Targets that do not go: of `LOOKS_MAX` those with the most due timers, most first."""
        stuck = (
            target
            for target in self._due.turns()
            if self._dispatcher.is_stuck(target, self._numbers.targets[target], now_ms)
        )
        looked_at = itertools.islice(stuck, LOOKS_MAX)
        waiting = {target: self._due.waiting_for(target) for target in looked_at}
        return heapq.nlargest(PARK_TARGETS_MAX, waiting, key=lambda target: waiting[target])

    def backlog(self, due_ms: int, now_ms: int) -> int:
        """Timers due by `due_ms` that wait and go, one batch after the other."""
        return sum(
            self._waiting_by(target, due_ms)
            for target in self._due.awake()
            if not self._dispatcher.is_stuck(target, self._numbers.targets[target], now_ms)
        )

    def _waiting_by(self, target: int, due_ms: int) -> int:
        if self._due.latest_ms(target) <= due_ms:
            return self._due.waiting_for(target)
        due = self._near.table.due_ms[self._due.ids_of(target)]
        return int((due <= due_ms).sum())

    def begin(self, targets: Iterable[int], now_ms: int) -> Flush | None:
        """Takes due timers of targets out of memory, into a job; None: all were cancelled."""
        self._tiers.check_idle()  # nothing is taken yet
        taken: list[tuple[Ids, TargetId]] = []
        left = PARK_ROWS_MAX
        for target in targets:
            if left > 0:
                ids = self._due.take(target, left)
                left -= len(ids)
                taken.append((self._near.live(ids), self._numbers.targets[target]))
        return self._tiers.begin_park(taken, now_ms)

    def unparkable(self, parked: Collection[TargetId], now_ms: int) -> Iterator[TargetId]:
        """Those of them whose timers could be sent now; of many that cannot not all are looked at.

        `looks_on` says then that there is more to look at.
        """
        if self._wakes != self._dispatcher.wakes:
            self._wakes, self._shut = self._dispatcher.wakes, set()
        self.looks_on, before = False, len(self._shut)
        for target in parked if before < len(parked) else ():
            if target in self._shut:
                continue
            if self._can_unpark(target, now_ms):
                yield target
            elif self._is_shut(target):
                self._shut.add(target)
                if len(self._shut) - before >= LOOKS_MAX:
                    self.looks_on = True
                    return

    def _is_shut(self, target: TargetId) -> bool:
        if room_number(target) is not None:
            return self._holds.holds_room(target)
        return self._dispatcher.is_shut(target)

    def _can_unpark(self, target: TargetId, now_ms: int) -> bool:
        waiting = self._due.waiting_for(self._numbers.number_target(target))
        if waiting >= self._limits.tick_rows_max:
            return False
        if room_number(target) is not None:
            return not self._holds.holds_room(target)
        return self._dispatcher.choose(target, now_ms) is not None
