"""A group's offsets at the brokers: taking queues over, committing.

One attempt each; callers repeat.
"""

from collections.abc import Iterable
from typing import NamedTuple

from duemq.balance import MessageQueue
from duemq.client import Client
from duemq.errors import DuemqError
from duemq.rpc import status
from duemq.v1 import broker_pb2, broker_pb2_grpc

REQUEST_TIMEOUT_S = 5.0
START_FROM = {"earliest": broker_pb2.EARLIEST, "latest": broker_pb2.LATEST}


class Commit(NamedTuple):
    """How far a queue is, under which generation."""

    queue: MessageQueue
    offset: int
    generation: int


class QueueRange(NamedTuple):
    """What a queue holds: offsets from `min_offset`, below `max_offset`."""

    committed: int | None
    min_offset: int
    max_offset: int


class OffsetClient:
    """What one member says about offsets."""

    def __init__(self, client: Client, group: str, member_id: str = "") -> None:
        self._client = client
        self._group = group
        self._member_id = member_id

    async def acquire(
        self, broker: str, queues: Iterable[MessageQueue], generation: int, start_from: str
    ) -> dict[MessageQueue, int | DuemqError]:
        """Takes queues of one broker over; answers where each begins, or why not."""
        request = broker_pb2.AcquireQueuesRequest(
            group=self._group,
            member_id=self._member_id,
            generation=generation,
            start_from=START_FROM[start_from],
        )
        for queue in queues:
            request.queues.add(topic=queue.topic, broker=broker, queue_id=queue.queue_id)
        stub, address = self._stub(broker)
        answer = await status.answer(
            stub.AcquireQueues(request, timeout=REQUEST_TIMEOUT_S), address
        )
        return {
            MessageQueue(result.topic, broker, result.queue_id): (
                status.from_proto(result.error) if result.HasField("error") else result.offset
            )
            for result in answer.queues
        }

    async def commit(
        self, broker: str, commits: Iterable[Commit], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[MessageQueue, DuemqError]:
        """Stores offsets at one broker; answers those that it refused."""
        request = broker_pb2.CommitOffsetsRequest(group=self._group, member_id=self._member_id)
        for queue, offset, generation in commits:
            request.commits.add(
                topic=queue.topic, queue_id=queue.queue_id, offset=offset, generation=generation
            )
        stub, address = self._stub(broker)
        answer = await status.answer(stub.CommitOffsets(request, timeout=timeout_s), address)
        return {
            MessageQueue(result.topic, broker, result.queue_id): status.from_proto(result.error)
            for result in answer.queues
            if result.HasField("error")
        }

    async def ranges(self, broker: str, topic: str) -> dict[MessageQueue, QueueRange]:
        """What one broker has of a topic, and the group's offsets in it."""
        request = broker_pb2.GetOffsetsRequest(group=self._group, topic=topic)
        stub, address = self._stub(broker)
        answer = await status.answer(stub.GetOffsets(request, timeout=REQUEST_TIMEOUT_S), address)
        return {
            MessageQueue(result.topic, broker, result.queue_id): QueueRange(
                result.offset if result.offset >= 0 else None, result.min_offset, result.max_offset
            )
            for result in answer.queues
        }

    def _stub(self, broker: str) -> tuple[broker_pb2_grpc.BrokerStub, str]:
        address = self._client.broker(broker).address
        return broker_pb2_grpc.BrokerStub(self._client.channel(address)), address
