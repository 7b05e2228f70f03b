"""Timer shards by number, whose number changes, and messages that wait at one of them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from duemq.v1 import message_pb2
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    Shard,
    bodies_of,
    delivered,
    running_shard,
    send,
)

QUEUES = 8  # of %TIMER%


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=QUEUES) as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


class Shards:
    """Timer shards by number; each goes on with its data when it is started again."""

    def __init__(self, cluster: Cluster, directory: Path, stack: AsyncExitStack) -> None:
        self._cluster = cluster
        self._directory = directory
        self._stack = stack
        self._lives: dict[int, AsyncExitStack] = {}
        self.running: dict[int, Shard] = {}

    async def start(self, number: int, shards: int, **settings: Any) -> Shard:
        await self.stop(number)
        life = self._lives[number] = AsyncExitStack()
        self._stack.push_async_exit(life)
        self.running[number] = await life.enter_async_context(
            running_shard(
                self._cluster,
                self._directory,
                name=f"t{number}",
                shard=number,
                shards=shards,
                **settings,
            )
        )
        return self.running[number]

    async def stop(self, number: int) -> None:
        if number in self.running:
            del self.running[number]
            await self._lives.pop(number).aclose()

    async def change(self, shards: int) -> None:
        """As a rolling update does it: new ones first, then those that there are, one by one."""
        before = sorted(self.running)
        for number in range(shards):
            if number not in before:
                await self.start(number, shards)
        for number in reversed(before):
            await self.start(number, shards)
        await until(lambda: self.owners() == [queue % shards for queue in range(QUEUES)])

    def owners(self) -> list[int | None]:
        """Of each queue at b0, by number of shard."""
        owners = self._cluster.brokers["b0"].store.timer_owners
        claims = map(owners.claim_of, range(QUEUES))
        return [claim.service.shard if claim is not None else None for claim in claims]

    async def ledgers(self) -> tuple[int, int]:
        """Accepted and fired, of all together."""
        found = [await shard.stats() for shard in self.running.values()]
        return sum(each.accepted for each in found), sum(each.fired for each in found)

    async def pending(self) -> int:
        return sum([(await shard.stats()).pending for shard in self.running.values()])

    def pending_in(self, topic: str) -> int:
        schedulers = [shard.service.shard.scheduler for shard in self.running.values()]
        return sum(scheduler.topics.of(topic).pending for scheduler in schedulers)

    def source(self, number: int, handle: message_pb2.TimerHandle) -> Any:
        sources = self.running[number].service.shard.scheduler.numbers.sources
        wanted = (handle.store_id, handle.queue_id)
        return next((each for each in sources if each.id == wanted), None)


@pytest.fixture
async def shards(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Shards]:
    async with AsyncExitStack() as stack:
        yield Shards(cluster, tmp_path, stack)


async def send_to_all(
    cluster: Cluster, bodies: list[bytes], delay_ms: int
) -> list[message_pb2.TimerHandle]:
    """Each body in a queue of %TIMER% of its own: producers have one each."""
    handles: list[message_pb2.TimerHandle] = []
    for body in bodies:
        handles += await send(cluster, [body], [delay_ms], producer_id=0, queue_id=-1)
    return handles


async def send_to(
    cluster: Cluster, timer_queue: int, body: bytes, delay_ms: int
) -> message_pb2.TimerHandle:
    """A message that waits in this queue of %TIMER%, of the lower half: it has a queue to go to."""
    client = cluster.clients["b0"]
    [handle] = await send(cluster, [body], [delay_ms], queue_id=timer_queue % 2, producer_id=0)
    if handle.queue_id == timer_queue:
        return handle
    raise AssertionError((handle.queue_id, timer_queue, client))


async def comes(cluster: Cluster, body: bytes) -> bool:
    async def there() -> bool:
        return body in bodies_of(await delivered(cluster))

    await until(there)
    return True


async def shrunk(cluster: Cluster, shards: Shards) -> message_pb2.TimerHandle:
    """Of two shards the second has handed its queues over, and holds this timer."""
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    await shards.change(2)
    handle = await send_to(cluster, 1, b"theirs", HOUR_MS)
    await shards.running[1].until(lambda stats: stats.pending == 1)
    await shards.start(1, 1)
    await shards.start(0, 1)
    await until(lambda: shards.owners() == [0] * QUEUES)
    await send_to(cluster, 1, b"last", HOUR_MS)
    await shards.running[0].until(lambda stats: stats.pending == 1)
    return handle


async def stopped_long_ago(cluster: Cluster, shards: Shards, number: int) -> None:
    """Nameservers do not remember any more who was lost."""
    await shards.stop(number)
    [lost] = cluster.registry.lost_timers
    cluster.registry.lost_kept_ms = 0
    cluster.registry.expire(lost.lost_ms)
    assert not cluster.registry.lost_timers
