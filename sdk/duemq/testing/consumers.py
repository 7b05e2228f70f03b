"""The twin's push consumers: arguments, checks and types are the real ones'; cluster.py calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict

import duemq
from duemq.consumer import push
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.subscription import Topics
from duemq.consumer.settings import ConsumerSettings, Order, StartFrom
from duemq.protocol.balance import MessageQueue
from duemq.testing.broker import NAME
from duemq.testing.groups import Groups, Member


class OtherOptions(TypedDict, total=False):
    """The keyword arguments of `duemq.PushConsumer`, but for `nameserver` and `batch`."""

    order: Order | None
    broadcast: bool
    member_name: str | None
    start_from: StartFrom | None
    threads: int | None
    settings: ConsumerSettings | None


class ConsumerOptions(OtherOptions, total=False):
    """The keyword arguments of `duemq.PushConsumer`, but for `nameserver`."""

    batch: bool


class MemoryPushConsumer(duemq.PushConsumer):
    """`duemq.PushConsumer`, called by the cluster's `deliver` and `advance`."""

    def __init__(
        self,
        groups: Groups,
        deliver: Callable[[], int],
        group: str,
        topics: Topics,
        callback: Callback,
        batch: bool,
        options: OtherOptions,
    ) -> None:
        super().__init__(group, topics, callback, batch=batch, nameserver=NAME, **options)
        self._groups = groups
        self._member = _member_of(self._consumer)
        self._deliver = deliver

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now."""
        return frozenset(self._groups.queues_of(self._member))

    def start(self) -> None:
        """Joins the group.  Raises InvalidArgument when it refuses."""
        self._groups.join(self._member)

    def run(self) -> None:
        """Starts, if need be, has the cluster deliver all that there is, and closes."""
        if not self._member.joined:
            self.start()
        try:
            self._deliver()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves the group.  Idempotent."""
        self._groups.leave(self._member)


class AioMemoryPushConsumer(push.PushConsumer):
    """`duemq.aio.PushConsumer`, called by the cluster's `deliver` and `advance`."""

    def __init__(
        self,
        groups: Groups,
        deliver: Callable[[], Awaitable[int]],
        group: str,
        topics: Topics,
        callback: Callback,
        batch: bool,
        options: OtherOptions,
    ) -> None:
        super().__init__(group, topics, callback, batch=batch, nameserver=NAME, **options)
        self._groups = groups
        self._taking_part = _member_of(self)
        self._deliver = deliver

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now."""
        return frozenset(self._groups.queues_of(self._taking_part))

    async def start(self) -> None:
        """Joins the group.  Raises InvalidArgument when it refuses."""
        self._groups.join(self._taking_part)

    async def run(self) -> None:
        """Starts, if need be, has the cluster deliver all that there is, and closes."""
        if not self._taking_part.joined:
            await self.start()
        try:
            await self._deliver()
        finally:
            await self.close()

    async def close(self) -> None:
        """Leaves the group.  Idempotent."""
        self._groups.leave(self._taking_part)


def _member_of(consumer: push.PushConsumer) -> Member:
    """With what the real consumer made of its arguments."""
    return Member(
        consumer.group,
        consumer._filters,
        consumer._callback,
        consumer.settings,
        consumer._batch,
        consumer._order,
        consumer._broadcast,
        consumer._member_name or "",
    )
