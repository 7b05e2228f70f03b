"""DueMQ in memory, for tests: no process, no network, no waiting.

    from duemq.testing import MemoryCluster

    cluster = MemoryCluster()
    producer = cluster.producer()
    with cluster.push_consumer("billing", "orders", handle):
        producer.send("orders", b"...", delay="1h")
        cluster.advance("1h")

`duemq.testing.aio` has the asyncio ones.  Callbacks are called by `deliver` and `advance`, in the
thread of the caller.  What the twin leaves out stands in sdk/README.md, "Testing your code".
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from duemq.consumer.blocking import PushConsumer
from duemq.consumer.delivery.calling import check_ran
from duemq.errors import DuemqError
from duemq.producing.blocking import Producer
from duemq.producing.receipt import PendingReceipt
from duemq.settings import ProducerSettings
from duemq.testing.broker import Pending
from duemq.testing.cluster import ClusterCore
from duemq.testing.consumers import ConsumerOptions, MemoryPushConsumer
from duemq.testing.producers import MemoryProducer

__all__ = ["ConsumerOptions", "MemoryCluster", "Pending"]


class MemoryCluster(ClusterCore[PushConsumer]):
    """A cluster in memory, with a clock that the test moves."""

    def producer(
        self,
        *,
        on_error: Callable[[PendingReceipt, DuemqError], object] | None = None,
        settings: ProducerSettings | None = None,
    ) -> Producer:
        """A `duemq.Producer` whose sends are stored when they return."""
        return MemoryProducer(self._broker, self._lock, on_error, settings)

    def _new_consumer(self, *args: Any, **options: Any) -> PushConsumer:
        return MemoryPushConsumer(self._groups, self.deliver, *args, **options)

    def deliver(self) -> int:
        """Has everything processed that is there now; answers how many messages were delivered.

        What fails in here comes again only when `advance` has brought its time.
        """
        delivered = 0
        with self._round():
            while (delivery := self._next(delivered)) is not None:
                with self._calling(delivery):
                    check_ran(delivery.call())
                delivered += len(delivery.messages)
        return delivered

    def advance(self, by: float | timedelta | str) -> int:
        """Moves the clock on: seconds, a timedelta, or text as "250ms", "10s", "1h30m".

        What falls due on the way is delivered at its time, in order.  Answers how many messages
        were delivered.  Raises InvalidArgument.
        """
        until_ms, delivered = self._end_of(by), self.deliver()
        while self._step(until_ms):
            delivered += self.deliver()
        return delivered
