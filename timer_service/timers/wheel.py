"""The timing wheel: a ring of millisecond slots for timers that are due soon.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

The ring has `SPAN_MS` slots, one per millisecond; a timer due at `d` lies in slot `d % SPAN_MS`.
Because no timer further away than the span is accepted, a slot only ever holds one millisecond
and nothing has to be moved from wheel to wheel (the far timers wait on disk, see far_segments.py).

A timer is a small integer, its row in the near table.  The timers of a slot form a list linked
through the array `_next`, first in first out, so that a timer costs 4 bytes and no Python object:

    slot      head      tail               _next
    1234  ->    7        3          7 -> 12 -> 3 -> END

`_occupied` has a byte a slot; the next due millisecond is a `bytearray.find`, which passes over
10 GB of empty slots a second.  Adding k timers is O(k); cancelling is a mark in the near table
and costs the wheel nothing.  Prior art: Varghese & Lauck's scheme 6 (hashed wheel) and the
`pending_map` of Linux' timer wheel.  Rejected: a heap (cache misses, 0.1 M pops a second at ten
million) and hierarchical wheels (each cascade touches every timer again).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from duemq.errors import InvariantError

Ids = npt.NDArray[np.int32]
Times = npt.NDArray[np.int64]

SPAN_MS = 65_536  # a power of two, so that a slot is a mask away
_MASK = SPAN_MS - 1
_END = -1
_SCALAR_MAX = 12  # up to this many timers a plain loop beats NumPy's fixed cost
_NONE = np.empty(0, dtype=np.int32)


class Wheel:
    """Timers due within `SPAN_MS` of `now_ms`; ids in, ids out in due order."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms  # every slot up to and including this one has been taken
        self._head = np.full(SPAN_MS, _END, dtype=np.int32)
        self._tail = np.full(SPAN_MS, _END, dtype=np.int32)
        self._occupied = bytearray(SPAN_MS)
        self._next = np.full(1024, _END, dtype=np.int32)
        self._late: list[tuple[Times, Ids]] = []  # in due order each; due at or before now_ms
        self._count = 0
        self.on_sooner: Callable[[int], None] = lambda due_ms: None
        """Called with the first due time of what is added.  Nothing else makes
        `next_due_ms` sooner."""

    def __len__(self) -> int:
        return self._count

    @property
    def horizon_ms(self) -> int:
        """Due times below this one are accepted."""
        return self.now_ms + SPAN_MS

    def add(self, ids: Ids, due_ms: Times) -> None:
        """Adds timers; those already due are handed out by the next `advance`.

        Raises InvariantError for a due time at or past the horizon.
        """
        count = len(ids)
        if not count:
            return
        if int(due_ms.max()) >= self.horizon_ms:
            raise InvariantError(f"due {int(due_ms.max())} is past the horizon {self.horizon_ms}")
        self._reserve(int(ids.max()) + 1)
        self._count += count
        first_ms = int(due_ms.min())
        if first_ms <= self.now_ms:
            late = due_ms <= self.now_ms
            self._late.append(_in_due_order(ids[late], due_ms[late]))
            ids, due_ms = ids[~late], due_ms[~late]
        if len(ids) <= _SCALAR_MAX:
            for timer, due in zip(ids.tolist(), due_ms.tolist(), strict=True):
                self._link(timer, due & _MASK)
        else:
            self._link_many(ids, due_ms)
        self.on_sooner(first_ms)

    def catch_up(self, now_ms: int) -> None:
        """Moves on to `now_ms` if nothing is due before: an idle wheel is not advanced."""
        if now_ms > self.now_ms and not self._late and (not self._count or self._after(now_ms)):
            self.now_ms = now_ms

    def replace(self, ids: Ids, due_ms: Times) -> None:
        """Forgets every timer and holds these instead."""
        self._head.fill(_END)
        self._tail.fill(_END)
        self._occupied = bytearray(SPAN_MS)
        self._late = []
        self._count = 0
        self.add(ids, due_ms)

    def next_due_ms(self) -> int | None:
        """When to call `advance` again; None when the wheel is empty."""
        if self._late:
            return min(int(due[0]) for due, _ in self._late)
        if not self._count:
            return None
        start = (self.now_ms + 1) & _MASK
        slot = self._occupied.find(1, start)
        if slot < 0:
            slot = self._occupied.find(1, 0, start)
        return self.now_ms + 1 + ((slot - start) & _MASK)

    def advance(self, now_ms: int, limit: int) -> Ids:
        """Takes out what is due at `now_ms`, in due order, at most about `limit` timers.

        A slot that does not fit is split; what is left comes with the next call, which
        `next_due_ms` asks for at once.  A clock that went back takes nothing out that is not due.
        """
        if self._late:
            return self._take_late(now_ms, limit)
        out: list[int] = []
        while len(out) < limit and self._count > len(out):
            due = self.next_due_ms()
            if due is None or due > now_ms:
                break
            if not self._take_slot(due & _MASK, out, limit):
                self.now_ms = due - 1
                break
            self.now_ms = due
        self._count -= len(out)
        self.catch_up(now_ms)
        return np.array(out, dtype=np.int32) if out else _NONE

    def _after(self, now_ms: int) -> bool:
        due = self.next_due_ms()
        return due is None or due > now_ms

    def _take_late(self, now_ms: int, limit: int) -> Ids:
        due_ms, ids = _joined(self._late)
        count = min(limit, int(np.searchsorted(due_ms, now_ms, side="right")))
        self._late = [(due_ms[count:], ids[count:])] if count < len(ids) else []
        self._count -= count
        return ids[:count]

    def _take_slot(self, slot: int, out: list[int], limit: int) -> bool:
        """Moves a slot's timers to `out`; False if some had to stay."""
        link = self._next.data
        timer = int(self._head[slot])
        room = limit - len(out)
        while timer != _END and room:
            out.append(timer)
            timer = link[timer]
            room -= 1
        self._head[slot] = timer
        if timer != _END:
            return False
        self._tail[slot] = _END
        self._occupied[slot] = 0
        return True

    def _link(self, timer: int, slot: int) -> None:
        self._next[timer] = _END
        if self._occupied[slot]:
            self._next[self._tail[slot]] = timer
        else:
            self._head[slot] = timer
            self._occupied[slot] = 1
        self._tail[slot] = timer

    def _link_many(self, ids: Ids, due_ms: Times) -> None:
        """Links a run of timers per slot at once: sort by due, chain each run, append it."""
        order = np.argsort(due_ms, kind="stable")
        ids, due_ms = ids.take(order), due_ms.take(order)
        breaks = np.flatnonzero(due_ms[1:] != due_ms[:-1])
        firsts = np.concatenate(([0], breaks + 1))
        lasts = np.concatenate((breaks, [len(ids) - 1]))
        self._next[ids[:-1]] = ids[1:]
        self._next[ids[lasts]] = _END
        slots = due_ms[firsts] & _MASK
        occupied = np.frombuffer(self._occupied, dtype=np.uint8)
        taken = occupied[slots] != 0
        self._next[self._tail[slots[taken]]] = ids[firsts[taken]]
        free = slots[~taken]
        self._head[free] = ids[firsts[~taken]]
        occupied[free] = 1
        self._tail[slots] = ids[lasts]

    def _reserve(self, size: int) -> None:
        if size > len(self._next):
            grown = np.full(max(size, 2 * len(self._next)), _END, dtype=np.int32)
            grown[: len(self._next)] = self._next
            self._next = grown


def _in_due_order(ids: Ids, due_ms: Times) -> tuple[Times, Ids]:
    order = np.argsort(due_ms, kind="stable")
    return due_ms.take(order), ids.take(order)


def _joined(late: list[tuple[Times, Ids]]) -> tuple[Times, Ids]:
    if len(late) == 1:
        return late[0]
    due_ms = np.concatenate([due for due, _ in late])
    return _in_due_order(np.concatenate([ids for _, ids in late]), due_ms)
