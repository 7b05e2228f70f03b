"""Due timers that wait until they are sent: by target, in due order, and how fast they go.

Owned by: Dispatcher.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

Targets have turns.  One to which nothing can go for now, however many answers come, is asleep: a
tick does not look at it.  Rows of cancelled timers stay until they are taken: see near.py.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from duemq_server.timer_service.timers.rows import Rows, runs
from duemq_server.timer_service.timers.wheel import Ids

# What waits for a target whose lanes are full is looked at for so long before its pace is known …
PACE_MS = 1_000
# … and goes on waiting in memory if it is gone after so long.
GONE_WITHIN_MS = 10_000
_NONE = np.empty(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class Full:
    """A target whose lanes are full."""

    since_ms: int
    taken: int = 0  # timers since then

    def is_slow(self, waiting: int, now_ms: int) -> bool:
        """Whether what waits will wait for long."""
        passed_ms = now_ms - self.since_ms
        slow = passed_ms >= PACE_MS and waiting * passed_ms > self.taken * GONE_WITHIN_MS
        if passed_ms >= 2 * PACE_MS:  # the pace of late
            self.since_ms += passed_ms // 2
            self.taken //= 2
        return slow


class DueTimers:
    """See the module."""

    def __init__(self) -> None:
        self.waiting = 0  # rows, cancelled ones included
        self._ready: dict[int, deque[Ids]] = {}  # by target, the one served last at the end
        self._awake: dict[int, None] = {}  # those of them that a tick looks at, in this order
        self._latest_ms: dict[int, int] = {}  # by target: due time
        self._full: dict[int, Full] = {}  # by target

    def sort_in(self, ids: Ids, table: Rows) -> None:
        """Timers of any targets are due; `table`: their columns, by number."""
        if not len(ids):
            return
        targets = table.target[ids]
        order = np.argsort(targets, kind="stable")
        ids, targets, due_ms = ids[order], targets[order], table.due_ms[ids[order]]
        parts = runs(targets)
        starts = [start for start, _ in parts]
        first_ms = np.minimum.reduceat(due_ms, starts).tolist()
        latest_ms = np.maximum.reduceat(due_ms, starts).tolist()
        for at, target in enumerate(targets[starts].tolist()):
            part = ids[slice(*parts[at])]
            if self.latest_ms(target) > first_ms[at]:  # what comes late goes in front of later ones
                part = np.concatenate([self.ids_of(target), part])
                part = part.take(np.argsort(table.due_ms[part], kind="stable"))
                self.replace(target, part, latest_ms[at])
            else:
                self.add(target, part, latest_ms[at])

    def add(self, target: int, ids: Ids, latest_ms: int = 0) -> None:
        """Timers of a target are due, the last of them at `latest_ms`."""
        self._latest_ms[target] = max(self.latest_ms(target), latest_ms)
        self._ready_of(target).append(ids)
        self.waiting += len(ids)

    def _ready_of(self, target: int) -> deque[Ids]:
        if target not in self._ready:
            self._ready[target] = deque()
            self._awake[target] = None
        return self._ready[target]

    def replace(self, target: int, ids: Ids, latest_ms: int) -> None:
        """As `add`, of all that wait, in another order; the target keeps its turn."""
        self.waiting -= self.waiting_for(target)
        self._ready_of(target).clear()
        self.add(target, ids, latest_ms)

    def latest_ms(self, target: int) -> int:
        """When the last of those that wait for a target was due, or one that went; 0: none wait."""
        return self._latest_ms.get(target, 0) if target in self._ready else 0

    def forget(self, target: int) -> None:
        """Nothing waits for it, and its number may be another target's one day."""
        self._latest_ms.pop(target, None)

    def turns(self) -> list[int]:
        """Every target with something ready, the one served last at the end."""
        return list(self._ready)

    def awake(self) -> list[int]:
        """As `turns`, without those that are asleep."""
        return list(self._awake)

    def is_asleep(self, target: int) -> bool:
        """Whether something waits for a target, and nothing can go there."""
        return target in self._ready and target not in self._awake

    def sleep(self, target: int) -> None:
        """Nothing can go to the target before `wake` is called."""
        self._awake.pop(target, None)

    def wake(self) -> None:
        """More can go than answers say: all have turns again, behind those that were awake."""
        self._awake |= dict.fromkeys(self._ready)

    def waiting_for(self, target: int) -> int:
        """How many timers of a target wait, cancelled ones included."""
        return sum(len(ids) for ids in self._ready.get(target, ()))

    def ids_of(self, target: int) -> Ids:
        """All timers that wait for a target, cancelled ones included; they stay."""
        return np.concatenate([_NONE, *self._ready.get(target, ())])

    def take(self, target: int, count: int) -> Ids:
        """Up to `count` timers of a target, first due first."""
        ready, taken, left = self._ready.pop(target), [], count
        self.sleep(target)
        while ready and left:
            ids = ready[0]
            if len(ids) <= left:
                taken.append(ready.popleft())
            else:
                taken.append(ids[:left])
                ready[0] = ids[left:]
            left -= len(taken[-1])
        self.waiting -= count - left
        if ready:
            self._ready[target] = ready
            self._awake[target] = None
            if target in self._full:
                self._full[target].taken += count - left
        else:
            self.flows(target)
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def take_all(self, target: int) -> Ids:
        """All timers that wait for a target, first due first."""
        return self.take(target, self.waiting)

    def put_back(self, target: int, ids: Ids) -> None:
        """Returns timers that were taken; they are first of their target again."""
        if len(ids):
            self._ready_of(target).appendleft(ids)
            self.waiting += len(ids)
            if target in self._full:
                self._full[target].taken -= len(ids)

    # -- pace -------------------------------------------------------------

    def flows(self, target: int) -> None:
        """The target's lanes are not full."""
        self._full.pop(target, None)

    def is_slow(self, target: int, now_ms: int) -> bool:
        """The target's lanes are full: whether what waits for it will wait for long."""
        full = self._full.setdefault(target, Full(now_ms))
        return full.is_slow(self.waiting_for(target), now_ms)

    def clock_set(self, by_ms: int) -> None:
        """The machine's clock was set: waits neither end nor grow by that."""
        for full in self._full.values():
            full.since_ms += by_ms
