"""Samples how far queues and groups are, for their rates (groups/rates.py)."""

import asyncio
from collections.abc import Callable

from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.groups.rates import SAMPLE_INTERVAL_MS, Rates
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store

# Queues that are looked at before others have a turn.
SAMPLED_AT_ONCE = 1_000


class Sampler:
    """Samples the ends of queues and the offsets of groups, for rates."""

    def __init__(self, store: Store, activity: Activity, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._activity = activity
        self._now_ms = now_ms
        self.stored: Rates[Queue] = Rates()
        self.consumed: Rates[GroupQueue] = Rates()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_MS / 1000)

    async def sample(self) -> None:
        """One round.  Lets others have a turn where there is much to look at."""
        ends: list[tuple[Queue, int]] = []
        for number, queue in enumerate(self._store.all_queues()):
            ends.append((queue, queue.max_offset))
            if number % SAMPLED_AT_ONCE == SAMPLED_AT_ONCE - 1:
                await asyncio.sleep(0)
        self.stored.sample(self._now_ms(), ends, began_at=0)
        offsets: list[tuple[GroupQueue, int]] = []
        for group in self._store.offsets.groups():
            offsets += [
                (GroupQueue(group, topic, queue_id), progress.offset)
                for topic, queue_id, progress in self._store.offsets.of_group(group)
            ]
            await asyncio.sleep(0)
        self.consumed.sample(self._now_ms(), offsets)
        self._activity.prune(lambda key: self._store.offsets.find(key) is not None)

    def in_per_s(self, queue: Queue) -> float:
        """Records that a queue got, a second over the last minute."""
        return self.stored.per_second(queue, queue.max_offset, self._now_ms())

    def consumed_per_s(self, key: GroupQueue, offset: int) -> float:
        """Offsets that a group passed in a queue, a second over the last minute."""
        return self.consumed.per_second(key, offset, self._now_ms())
