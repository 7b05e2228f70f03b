"""Offsets of groups on this broker: acquire, commit, read.  Answers when durable."""

from collections.abc import Iterable

from broker import names
from broker.commits import Commits
from broker.offsets import GroupQueue, Progress, check_generation
from broker.queues import Queue
from broker.store import Store
from duemq.errors import DuemqError, InvalidArgument
from duemq.rpc import status
from duemq.v1 import broker_pb2, message_pb2

QUEUES_MAX = 4_096
NO_OFFSET = -1

Results = list[broker_pb2.OffsetResult]


class OffsetService:
    """Takes requests to the store's offsets."""

    def __init__(self, store: Store, commits: Commits, broker: str) -> None:
        self._store = store
        self._commits = commits
        self._broker = broker

    async def acquire(self, request: broker_pb2.AcquireQueuesRequest) -> Results:
        """Fences older generations out of the queues and answers where to start."""
        _check(request.group, len(request.queues))
        check_generation(request.generation)
        if not request.generation:
            raise InvalidArgument(
                f"generation: {request.generation} is not that of an assignment",
                field="generation",
                value=request.generation,
                limit="above 0",
            )
        changes: list[tuple[GroupQueue, Progress]] = []
        results = [self._acquire(request, ref, changes) for ref in request.queues]
        await self._commits.wait(self._store.put_offsets(request.group, changes))
        return results

    def _acquire(
        self,
        request: broker_pb2.AcquireQueuesRequest,
        ref: message_pb2.QueueRef,
        changes: list[tuple[GroupQueue, Progress]],
    ) -> broker_pb2.OffsetResult:
        key = GroupQueue(request.group, ref.topic, ref.queue_id)
        try:
            queue = self._store.queue(ref.topic, ref.queue_id)
            low, high = queue.min_offset, queue.max_offset
            start = low if request.start_from == broker_pb2.EARLIEST else high
            progress = self._store.offsets.acquire(key, request.generation, start, low, high)
        except DuemqError as error:
            return _failed(key, error)
        changes.append((key, progress))
        return _result(queue, progress.offset)

    async def commit(self, group: str, commits: Iterable[broker_pb2.OffsetCommit]) -> Results:
        """Stores how far a group is."""
        wanted = list(commits)
        _check(group, len(wanted))
        changes: list[tuple[GroupQueue, Progress]] = []
        results = [self._commit(group, commit, changes) for commit in wanted]
        await self._commits.wait(self._store.put_offsets(group, changes))
        return results

    def _commit(
        self,
        group: str,
        commit: broker_pb2.OffsetCommit,
        changes: list[tuple[GroupQueue, Progress]],
    ) -> broker_pb2.OffsetResult:
        key = GroupQueue(group, commit.topic, commit.queue_id)
        try:
            queue = self._store.queue(commit.topic, commit.queue_id)
            progress = self._store.offsets.commit(
                key, commit.generation, commit.offset, queue.max_offset
            )
        except DuemqError as error:
            return _failed(key, error)
        changes.append((key, progress))
        return _result(queue, progress.offset)

    def committed(self, group: str, topic: str) -> Results:
        """Where a group is, on this broker; without `topic` in all topics it ever read."""
        _check(group, 1)
        if not topic:
            return [
                _result(self._store.queue(name, queue_id), progress.offset)
                for name, queue_id, progress in self._store.offsets.of_group(group)
            ]
        results = []
        for queue in self._store.queues_of(topic):
            progress = self._store.offsets.find(GroupQueue(group, topic, queue.queue_id))
            results.append(_result(queue, progress.offset if progress else NO_OFFSET))
        return results


def _check(group: str, queues: int) -> None:
    names.check_group(group)
    if not 0 < queues <= QUEUES_MAX:
        raise InvalidArgument(
            f"queues: {queues} in a request, 1 to {QUEUES_MAX} are allowed",
            field="queues",
            value=queues,
            limit=QUEUES_MAX,
        )


def _result(queue: Queue, offset: int) -> broker_pb2.OffsetResult:
    return broker_pb2.OffsetResult(
        topic=queue.topic,
        queue_id=queue.queue_id,
        offset=offset,
        min_offset=queue.min_offset,
        max_offset=queue.max_offset,
    )


def _failed(key: GroupQueue, error: DuemqError) -> broker_pb2.OffsetResult:
    return broker_pb2.OffsetResult(
        topic=key.topic, queue_id=key.queue_id, offset=NO_OFFSET, error=status.to_proto(error)
    )
