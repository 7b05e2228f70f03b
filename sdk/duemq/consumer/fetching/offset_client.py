"""What a group asks brokers beside messages: where queues begin, how far they are, its filters.

One attempt each; callers repeat.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from duemq.consumer.fetching.subscription import Filter
from duemq.consumer.settings import StartFrom, start_ms
from duemq.errors import DuemqError, InvariantError, QueueNotFound, Unavailable
from duemq.outcomes import Outcome
from duemq.protocol.balance import MessageQueue
from duemq.protocol.limits import OFFSET_QUEUES_MAX
from duemq.transport import status
from duemq.transport.cluster_client import Client
from duemq.v1 import broker_pb2, group_admin_pb2, stubs

Stub = stubs.BrokerStub
REQUEST_TIMEOUT_S = 5.0
NOWHERE = -1  # an offset that no queue has: nothing is read
START_FROM = {"earliest": broker_pb2.EARLIEST, "latest": broker_pb2.LATEST}


class Commit(NamedTuple):
    """How far a queue is, under which generation."""

    queue: MessageQueue
    offset: int
    generation: int
    topic_id: int
    """Of which topic of this name the offset is; 0: not known."""


class Start(NamedTuple):
    """Where a queue begins that was taken over."""

    offset: int
    settled: frozenset[int]
    """Past the offset, and not to be delivered: the group has sent them back."""
    topic_id: int
    """As in Commit."""


class Failure(NamedTuple):
    """A message to be sent back."""

    queue: MessageQueue
    offset: int
    generation: int
    outcome: Outcome
    deliveries: int
    """How often the group was given it by now."""
    topic_id: int = 0
    """As in Commit."""


class SentBack(NamedTuple):
    """What became of a failure."""

    error: DuemqError | None
    """None: it is settled."""
    dead_letter: bool = False
    due_ms: int = 0
    """When it comes again; 0: not, or it had been sent back before."""


class QueueOffsets(NamedTuple):
    """What a queue holds: offsets from `min_offset`, below `max_offset`."""

    committed: int | None
    min_offset: int
    max_offset: int
    topic_id: int
    """As in Commit."""


class OffsetClient:
    """What one member says about offsets."""

    def __init__(self, client: Client, group: str, member_id: str = "") -> None:
        self._client = client
        self._group = group
        self._member_id = member_id

    def address_of(self, broker: str) -> str:
        """Where a broker is asked; "": it is not known now."""
        return self._client.address_of(broker)

    async def acquire(
        self,
        broker: str,
        queues: Iterable[MessageQueue],
        generation: int,
        start_from: StartFrom,
        coordinator: str = "",
    ) -> dict[MessageQueue, Start | DuemqError]:
        """Takes queues of one broker over; answers where each begins, or why not.

        Raises NotCoordinator where the broker does not follow `coordinator`, whose assignment it
        is.
        """
        wanted = list(queues)
        taken: dict[MessageQueue, Start | DuemqError] = {}
        for first in range(0, len(wanted), OFFSET_QUEUES_MAX):
            some = wanted[first : first + OFFSET_QUEUES_MAX]
            taken |= await self._acquire(broker, some, generation, start_from, coordinator)
        return taken

    async def _acquire(
        self,
        broker: str,
        queues: Iterable[MessageQueue],
        generation: int,
        start_from: StartFrom,
        coordinator: str,
    ) -> dict[MessageQueue, Start | DuemqError]:
        request = broker_pb2.AcquireQueuesRequest(
            group=self._group,
            member_id=self._member_id,
            generation=generation,
            coordinator=coordinator,
        )
        if isinstance(start_from, str):
            request.start_from = START_FROM[start_from]
        else:
            request.start_from = broker_pb2.AT_TIME
            request.start_ms = start_ms(start_from)
        for queue in queues:
            request.queues.add(topic=queue.topic, broker=broker, queue_id=queue.queue_id)
        answer = await self._ask(broker, Stub.ask("AcquireQueues", request))
        return {
            MessageQueue(result.topic, broker, result.queue_id): (
                status.from_proto(result.error)
                if result.HasField("error")
                else Start(result.offset, frozenset(result.settled), result.topic_id)
            )
            for result in answer.queues
        }

    async def send_back(
        self, broker: str, failures: Sequence[Failure], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> list[SentBack]:
        """Gives messages of one broker back to it; an answer each, in their order."""
        request = broker_pb2.SendBackRequest(group=self._group, member_id=self._member_id)
        for queue, offset, generation, outcome, deliveries, topic_id in failures:
            message = request.messages.add(
                topic=queue.topic,
                queue_id=queue.queue_id,
                offset=offset,
                generation=generation,
                dead_letter=outcome.dead_letter,
                error=outcome.error,
                deliveries=deliveries,
                topic_id=topic_id,
            )
            if outcome.delay_ms is not None:
                message.delay_ms = outcome.delay_ms
        answer = await self._ask(broker, Stub.ask("SendBack", request), timeout_s)
        if len(answer.results) != len(failures):
            raise InvariantError(
                f"{broker} answered {len(answer.results)} of {len(failures)} messages sent back"
            )
        return [
            SentBack(
                status.from_proto(result.error) if result.HasField("error") else None,
                result.dead_letter,
                result.due_ms,
            )
            for result in answer.results
        ]

    async def commit(
        self, broker: str, commits: Iterable[Commit], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[MessageQueue, DuemqError]:
        """Stores offsets at one broker; answers those that it refused.

        Of more than a request takes, those before one that fails are stored.
        """
        wanted = list(commits)
        refused: dict[MessageQueue, DuemqError] = {}
        for first in range(0, len(wanted), OFFSET_QUEUES_MAX):
            some = wanted[first : first + OFFSET_QUEUES_MAX]
            refused |= await self._commit(broker, some, timeout_s)
        return refused

    async def _commit(
        self, broker: str, commits: Iterable[Commit], timeout_s: float
    ) -> dict[MessageQueue, DuemqError]:
        request = broker_pb2.CommitOffsetsRequest(group=self._group, member_id=self._member_id)
        for queue, offset, generation, topic_id in commits:
            request.commits.add(
                topic=queue.topic,
                queue_id=queue.queue_id,
                offset=offset,
                generation=generation,
                topic_id=topic_id,
            )
        answer = await self._ask(broker, Stub.ask("CommitOffsets", request), timeout_s)
        return {
            MessageQueue(result.topic, broker, result.queue_id): status.from_proto(result.error)
            for result in answer.queues
            if result.HasField("error")
        }

    async def ranges(self, broker: str, topic: str) -> dict[MessageQueue, QueueOffsets]:
        """What one broker has of a topic, and the group's offsets in it."""
        request = broker_pb2.GetOffsetsRequest(group=self._group, topic=topic)
        answer = await self._ask(broker, Stub.ask("GetOffsets", request))
        return {
            MessageQueue(result.topic, broker, result.queue_id): QueueOffsets(
                result.offset if result.offset >= 0 else None,
                result.min_offset,
                result.max_offset,
                result.topic_id,
            )
            for result in answer.queues
        }

    async def starts(
        self,
        queues: Iterable[MessageQueue],
        ranges: Mapping[MessageQueue, QueueOffsets],
        place: StartFrom,
    ) -> dict[MessageQueue, int | DuemqError]:
        """Ends of queues and times as offsets, or why there is none."""
        if place == "earliest":
            return {queue: ranges[queue].min_offset for queue in queues}
        if place == "latest":
            return {queue: ranges[queue].max_offset for queue in queues}
        assert not isinstance(place, str)
        wanted = list(queues)
        places = sorted({(queue.broker, queue.topic) for queue in wanted})
        answers = await asyncio.gather(
            *(self.at_time(broker, topic, start_ms(place)) for broker, topic in places)
        )
        found = {queue: start for answer in answers for queue, start in answer.items()}
        return {queue: found[queue] if queue in found else no_queue(queue) for queue in wanted}

    async def at_time(
        self, broker: str, topic: str, start_ms: int
    ) -> dict[MessageQueue, int | DuemqError]:
        """The offsets on one broker of the first messages stored at a time or later.

        What cannot be read of one queue is an error of that one.
        """
        request = group_admin_pb2.ResetOffsetsRequest(
            group=self._group, topic=topic, at_ms=start_ms, dry_run=True
        )
        answer = await self._ask(broker, stubs.GroupAdminStub.ask("ResetOffsets", request))
        found: dict[MessageQueue, int | DuemqError] = {}
        for change in answer.changes:
            queue = MessageQueue(change.topic, broker, change.queue_id)
            found[queue] = change.after
            if change.HasField("error"):
                found[queue] = error = status.from_proto(change.error)
                error.message = f"{topic}/{broker}/{queue.queue_id}: {error.message}"
        return found

    async def _ask(self, broker: str, method: Any, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        known = self._client.broker(broker)
        return await self._client.once(
            known.address, lambda *to: method(*to, metadata=known.meant), timeout_s
        )


def no_queue(queue: MessageQueue) -> QueueNotFound:
    """Its broker has none of that number."""
    return QueueNotFound(
        f"topic {queue.topic!r} has no queue {queue.queue_id} on {queue.broker}",
        field="queue_id",
        value=queue.queue_id,
    )


async def check_filters(client: Client, group: str, filters: Mapping[str, Filter]) -> None:
    """Has a broker read a group's name and filters before anything is pulled.

    A pull that is refused shows in the log only, long after `start` or `assign`.
    `filters`: by topic; topics need not exist.  Raises InvalidArgument, naming line and column, for
    what is no filter.  Says nothing where no broker answers.
    """
    queues = [
        broker_pb2.QueuePull(
            topic=topic,
            offset=NOWHERE,
            filter=each.text,
            filter_type=cast(broker_pb2.FilterType, each.filter_type),
        )
        for topic, each in filters.items()
    ]
    pull = Stub.ask("Pull", broker_pb2.PullRequest(group=group, queues=queues))
    for broker in client.routes.brokers:
        try:
            await client.once(broker.address, pull, REQUEST_TIMEOUT_S)
        except Unavailable:
            continue
        return
