"""What is stored ahead of its time, and so is on disk when it comes.  Pure.

Owned by: Store.  Mutated by: the event loop.

A fire comes a little before it is due.  Written and synced meanwhile, it need not wait for the disk
any more when its time has come; until then consumers do not see it, nor what is stored behind it in
its queue, whose order holds.  Of a frame they see each record when its time comes; `store_ms` is
when they may see the last one.

Not kept on disk: a start, or another replica's, takes longer than anything is hidden.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from duemq_server.broker.store.queues import Queue


class Hidden:
    """The queues whose ends nobody may see yet."""

    def __init__(self) -> None:
        # (offset, its time) of what is ahead of its time; both rise.
        self._queues: dict[Queue, deque[tuple[int, int]]] = {}
        self._next: list[tuple[int, int, Queue]] = []  # a heap: when each queue shows more
        self._count = 0  # tells those of one time apart

    def __len__(self) -> int:
        return len(self._queues)

    def until_ms(self, queue: Queue) -> int:
        """When all of a queue may be seen; 0: now."""
        waiting = self._queues.get(queue)
        return waiting[-1][1] if waiting else 0

    def hide(self, queue: Queue, first: int, seen_later: Sequence[tuple[int, int]]) -> None:
        """Hides the queue's newest frame: from which of its records on until when.

        `first`: the offset of its first record.
        """
        waiting = self._queues.setdefault(queue, deque())
        is_new = not waiting
        for index, until_ms in seen_later:
            if not waiting or until_ms > waiting[-1][1]:
                waiting.append((first + index, until_ms))
        if is_new:
            self._wait(queue, waiting)

    def _wait(self, queue: Queue, waiting: deque[tuple[int, int]]) -> None:
        offset, until_ms = waiting[0]
        queue.hide(offset)
        self._count += 1
        heappush(self._next, (until_ms, self._count, queue))

    def show(self, now_ms: int) -> list[Queue]:
        """Shows what was hidden until now.  Answers the queues in which there was any."""
        shown = []
        while self._next and self._next[0][0] <= now_ms:
            *_, queue = heappop(self._next)
            waiting = self._queues[queue]
            while waiting and waiting[0][1] <= now_ms:
                waiting.popleft()
            if waiting:
                self._wait(queue, waiting)
            else:
                del self._queues[queue]
                queue.hide(None)
            shown.append(queue)
        return shown

    def shift(self, by_ms: int) -> None:
        """The clock was set by so much: all that is hidden waits as long as before."""
        for waiting in self._queues.values():
            for at, (offset, until_ms) in enumerate(waiting):
                waiting[at] = offset, until_ms + by_ms
        # By the same for all of them, so the heap stays one.
        self._next = [(until_ms + by_ms, count, queue) for until_ms, count, queue in self._next]

    @property
    def next_ms(self) -> int | None:
        """When `show` has something to do; None: nothing is hidden."""
        return self._next[0][0] if self._next else None
