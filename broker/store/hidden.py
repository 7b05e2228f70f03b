"""What is stored ahead of its time, and so is on disk when it comes.  Pure.

Owned by: Store.  Mutated by: the event loop.

A fire comes a little before it is due.  Written and synced meanwhile, it need not wait for the disk
any more when its time has come; until then consumers do not see it, nor what is stored behind it in
its queue, whose order holds.  A record's `store_ms` is when they may see it at the earliest.

Not kept on disk: a start, or another replica's, takes longer than anything is hidden.
"""

from collections import deque

from duemq_server.broker.store.queues import Queue

AHEAD_MS_MAX = 5
"""Nothing is stored earlier than so long before its time."""


class Hidden:
    """The queues whose ends nobody may see yet."""

    def __init__(self) -> None:
        # (offset, its time) of what is ahead of its time; both rise.
        self._queues: dict[Queue, deque[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def until_ms(self, queue: Queue) -> int:
        """When all of a queue may be seen; 0: now."""
        waiting = self._queues.get(queue)
        return waiting[-1][1] if waiting else 0

    def hide(self, queue: Queue, offset: int, until_ms: int) -> None:
        """Hides what the queue has from an offset on, its newest."""
        waiting = self._queues.get(queue)
        if waiting is None:
            self._queues[queue] = deque(((offset, until_ms),))
            queue.hide(offset)
        elif until_ms > waiting[-1][1]:
            waiting.append((offset, until_ms))

    def show(self, now_ms: int) -> list[Queue]:
        """Shows what was hidden until now.  Answers the queues in which there was any."""
        shown = []
        for queue, waiting in list(self._queues.items()):
            if waiting[0][1] > now_ms:
                continue
            while waiting and waiting[0][1] <= now_ms:
                waiting.popleft()
            if not waiting:
                del self._queues[queue]
            queue.hide(waiting[0][0] if waiting else None)
            shown.append(queue)
        return shown

    @property
    def next_ms(self) -> int | None:
        """When `show` has something to do; None: nothing is hidden."""
        return min((waiting[0][1] for waiting in self._queues.values()), default=None)
