"""The twin's push consumers: arguments, checks and types are the real ones'; cluster.py calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import duemq
from duemq.consumer import push
from duemq.consumer.delivery.workers import is_async
from duemq.consumer.settings import PushOptions
from duemq.errors import InvalidArgument
from duemq.protocol.balance import MessageQueue
from duemq.testing.groups import MemoryMember, TwinGroups
from duemq.testing.logs import NAME


class ConsumerOptions(PushOptions, total=False):
    """The keyword arguments of `duemq.PushConsumer`, but for `nameserver`."""

    batch: bool


class MemoryPushConsumer(duemq.PushConsumer):
    """`duemq.PushConsumer`, called by the cluster's `deliver` and `advance`."""

    def __init__(
        self,
        groups: TwinGroups,
        deliver: Callable[[], int],
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(*args, nameserver=NAME, **options)
        if is_async(self._consumer._callback):
            raise InvalidArgument(
                "callback: a coroutine function needs duemq.testing.aio", field="callback"
            )
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
        groups: TwinGroups,
        deliver: Callable[[], Awaitable[int]],
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(*args, nameserver=NAME, **options)
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


def _member_of(consumer: push.PushConsumer) -> MemoryMember:
    """With what the real consumer made of its arguments."""
    return MemoryMember(
        consumer.group,
        consumer._filters,
        consumer._callback,
        consumer.settings,
        consumer._batch,
        consumer._order,
        consumer._broadcast,
        consumer._member_name or "",
    )
