"""DueMQ in memory for tests of asyncio programs: as `duemq.testing`, to be awaited.

cluster = MemoryCluster()
async with cluster.producer() as producer, cluster.push_consumer("billing", "orders", handle):
    await producer.send("orders", b"...", delay="1h")
    await cluster.advance("1h")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from duemq import aio
from duemq.consumer.delivery.calling import check_ran
from duemq.consumer.delivery.workers import is_async
from duemq.errors import DuemqError
from duemq.producing.receipt import AwaitableReceipt
from duemq.settings import ProducerSettings
from duemq.testing.broker import Pending
from duemq.testing.cluster import ClusterCore
from duemq.testing.consumers import AioMemoryPushConsumer, ConsumerOptions
from duemq.testing.producers import AioMemoryProducer

__all__ = ["ConsumerOptions", "MemoryCluster", "Pending"]


class MemoryCluster(ClusterCore[aio.PushConsumer]):
    """A cluster in memory, with a clock that the test moves."""

    def producer(
        self,
        *,
        on_error: Callable[[AwaitableReceipt, DuemqError], object] | None = None,
        settings: ProducerSettings | None = None,
    ) -> aio.Producer:
        """A `duemq.aio.Producer`, to be started."""
        return AioMemoryProducer(self._broker, self._lock, on_error=on_error, settings=settings)

    def _new_consumer(self, *args: Any, **options: Any) -> aio.PushConsumer:
        return AioMemoryPushConsumer(self._groups, self.deliver, *args, **options)

    async def deliver(self) -> int:
        """As `duemq.testing.MemoryCluster.deliver`; coroutine functions are awaited."""
        delivered = 0
        with self._round():
            while (delivery := self._next(delivered)) is not None:
                with self._calling(delivery):
                    result = delivery.call()
                    if is_async(delivery.member.callback):  # whose cancellation is its own
                        result = await asyncio.create_task(_answer(result))
                    if isinstance(result, SystemExit):
                        raise result
                    check_ran(result)
                delivered += len(delivery.messages)
        return delivered

    async def advance(self, by: float | timedelta | str) -> int:
        """As `duemq.testing.MemoryCluster.advance`."""
        until_ms, delivered = self._end_of(by), await self.deliver()
        while self._step(until_ms):
            delivered += await self.deliver()
        return delivered


async def _answer(result: Any) -> Any:
    try:
        return await result
    except SystemExit as error:  # it would end the loop
        return error
