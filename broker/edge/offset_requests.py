"""Offsets of groups on this broker: acquire, commit, read.  Answers when durable."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from duemq.errors import DuemqError, NotCoordinator, Overloaded, ReadOnly, Unavailable
from duemq.protocol import checks, names
from duemq.protocol.limits import OFFSET_QUEUES_MAX
from duemq.transport import status
from duemq.v1 import broker_pb2, message_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.reading import time_search
from duemq_server.broker.store.changes import (
    group_changes,
    offset_changes,
    timer_queue_changes,
)
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue, check_claim
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.serving.permissions.access import ACCESS
from duemq_server.serving.permissions.rights import Action, Need

QUEUES_AT_ONCE = 512
NO_OFFSET = -1

Results = list[broker_pb2.OffsetResult]


class OffsetRequests:
    """Takes requests to the store's offsets."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        activity: Activity,
        now_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        coordinator_of: Callable[[str], str | None],
        broker: str = "",
    ) -> None:
        """`coordinator_of` names the broker that coordinates a group, as far as is known here.

        `steady_ms`: a clock that nobody sets.  `broker`: this one's name.
        """
        self._store = store
        self._commits = commits
        self._activity = activity
        self._now_ms = now_ms
        self._steady_ms = steady_ms
        self._coordinator_of = coordinator_of
        self._broker = broker

    async def acquire(self, request: broker_pb2.AcquireQueuesRequest) -> Results:
        """Fences older generations out of the queues and answers where to start."""
        names.check_own_group(request.group)
        _check(request.group, len(request.queues))
        group_changes.check_known(self._store, request.group)
        check_claim(request.generation, self._now_ms())
        if not request.generation:
            raise checks.wrong("generation", request.generation, "that of an assignment, above 0")
        if request.start_from not in broker_pb2.StartFrom.values():  # a newer member's
            raise checks.wrong("start_from", request.start_from, "EARLIEST, LATEST or AT_TIME")
        self._check_coordinator(request)
        starts = await self._starts(request)
        changes: list[tuple[GroupQueue, GroupOffset]] = []
        results = [self._acquire(request, ref, starts, changes) for ref in request.queues]
        await self._commits.wait(offset_changes.put(self._store, request.group, changes))
        return results

    def _check_coordinator(self, request: broker_pb2.AcquireQueuesRequest) -> None:
        """Of coordinators that do not know of each other, each broker follows the one it knows.

        So their members do not take its queues from one another.
        """
        known = self._coordinator_of(request.group)
        if request.coordinator and known is not None and request.coordinator != known:
            raise NotCoordinator(
                f"coordinator: group {request.group!r} is coordinated by {known!r} as this broker"
                f" sees the cluster, not by {request.coordinator!r}",
                field="coordinator",
                value=request.coordinator,
                limit=known,
            )

    async def _starts(
        self, request: broker_pb2.AcquireQueuesRequest
    ) -> dict[Queue, int | DuemqError]:
        """Where a new group begins with AT_TIME; found in a thread, for it may read the disk."""
        if request.start_from != broker_pb2.AT_TIME:
            return {}
        checks.at_least("start_ms", request.start_ms, 0)
        new: list[Queue] = []
        for ref in request.queues:
            if not self._store.offsets.find(GroupQueue(request.group, ref.topic, ref.queue_id)):
                with suppress(DuemqError):  # said of the queue below
                    new.append(self._store.queue(ref.topic, ref.queue_id))

        def find() -> dict[Queue, int | DuemqError]:
            return {queue: time_search.found_or_corrupt(queue, request.start_ms) for queue in new}

        return await asyncio.to_thread(find) if new else {}

    def _acquire(
        self,
        request: broker_pb2.AcquireQueuesRequest,
        ref: message_pb2.QueueRef,
        starts: dict[Queue, int | DuemqError],
        changes: list[tuple[GroupQueue, GroupOffset]],
    ) -> broker_pb2.OffsetResult:
        key = GroupQueue(request.group, ref.topic, ref.queue_id)
        try:
            if (access := ACCESS.get()) is not None:
                access.check((Need(Action.RECEIVE, ref.topic),))
            if self._broker and ref.broker not in ("", self._broker):  # it was at this address
                raise Unavailable(
                    f"broker: this is {self._broker}", field="broker", value=ref.broker
                )
            queue = self._store.queue(ref.topic, ref.queue_id)
            low, high = queue.min_offset, queue.max_offset
            from_start = request.start_from == broker_pb2.EARLIEST or names.is_retry(ref.topic)
            # The topic may have been made anew while times were looked for: then all of it is new.
            anew = request.start_from == broker_pb2.AT_TIME and queue not in starts
            start = low if from_start or anew else starts.get(queue, high)
            if isinstance(start, DuemqError):
                raise start
            progress = self._store.offsets.acquire(key, request.generation, start, low, high)
        except DuemqError as error:
            return _failed(key, error)
        changes.append((key, progress))
        return self._with_settled(key, _result(queue, progress.offset))

    async def commit(
        self, group: str, commits: Sequence[broker_pb2.OffsetCommit], timer_id: int = 0
    ) -> Results:
        """Stores how far a group is; that of the timer service only for the queues' owner."""
        _check(group, len(commits), "commits")
        group_changes.check_known(self._store, group)
        results: Results = []
        settled = 0
        for start in range(0, len(commits), QUEUES_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # let others have a turn
            changes: dict[GroupQueue, GroupOffset] = {}
            part = commits[start : start + QUEUES_AT_ONCE]
            results += [self._commit(group, commit, changes, timer_id) for commit in part]
            settled = max(settled, offset_changes.put(self._store, group, [*changes.items()]))
        await self._commits.wait(settled)
        return results

    async def commit_beside(
        self, group: str, commits: Sequence[broker_pb2.OffsetCommit]
    ) -> Results:
        """As `commit`, of a pull, which is answered though the disk takes nothing."""
        try:
            return await self.commit(group, commits)
        except (ReadOnly, Overloaded) as error:
            return [
                _failed(GroupQueue(group, each.topic, each.queue_id), error) for each in commits
            ]

    def _commit(
        self,
        group: str,
        commit: broker_pb2.OffsetCommit,
        changes: dict[GroupQueue, GroupOffset],
        timer_id: int,
    ) -> broker_pb2.OffsetResult:
        key = GroupQueue(group, commit.topic, commit.queue_id)
        try:
            if (access := ACCESS.get()) is not None:
                access.check((Need(Action.RECEIVE, commit.topic),))
            check_claim(commit.generation, self._now_ms())
            if group == names.TIMER_GROUP:
                self._store.timer_owners.check(commit.queue_id, timer_id, self._steady_ms())
                timer_queue_changes.check_fetch(self._store, commit.queue_id, commit.offset)
            queue = self._store.queue(commit.topic, commit.queue_id, commit.topic_id)
            was = commit.known_offset if commit.HasField("known_offset") else None
            progress = self._store.offsets.commit(
                key, commit.generation, commit.offset, queue.max_offset, was, changes.get(key)
            )
        except DuemqError as error:
            return _failed(key, error)
        changes[key] = progress
        self._activity.committed(key, self._now_ms())
        return _result(queue, progress.offset)

    def committed(self, group: str, topic: str) -> Results:
        """Where a group is, on this broker; without `topic` wherever it has been.

        Also where it only sent back from, and where that comes again: who does not hear of these
        queues processes a message twice, or never again.
        """
        _check(group, 1)
        if not topic:
            offsets = self._store.offsets
            places = {(name, queue_id) for name, queue_id, _ in offsets.of_group(group)}
            places.update(offsets.sent_back_from(group))
            retries = names.retry_topic(group)
            if retries in self._store.topics:
                places.update(queue.key for queue in self._store.queues_of(retries))
            queues = [self._store.queue(*place) for place in sorted(places)]
        else:
            queues = self._store.queues_of(topic)
        results = []
        for queue in queues:
            key = GroupQueue(group, queue.topic, queue.queue_id)
            progress = self._store.offsets.find(key)
            result = _result(queue, progress.offset if progress else NO_OFFSET)
            results.append(self._with_settled(key, result))
        return results

    def _with_settled(
        self, key: GroupQueue, result: broker_pb2.OffsetResult
    ) -> broker_pb2.OffsetResult:
        """Retention may have moved the offset past some that were settled."""
        settled = self._store.offsets.settled(key)
        result.settled.extend(offset for offset in settled if offset >= result.offset)
        return result


def _check(group: str, queues: int, field: str = "queues") -> None:
    names.check_group(group)
    checks.count(field, queues, 1, OFFSET_QUEUES_MAX, "in a request")


def _result(queue: Queue, offset: int) -> broker_pb2.OffsetResult:
    return broker_pb2.OffsetResult(
        topic=queue.topic,
        queue_id=queue.queue_id,
        offset=offset,
        min_offset=queue.min_offset,
        max_offset=queue.max_offset,
        topic_id=queue.topic_id,
    )


def _failed(key: GroupQueue, error: DuemqError) -> broker_pb2.OffsetResult:
    return broker_pb2.OffsetResult(
        topic=key.topic, queue_id=key.queue_id, offset=NO_OFFSET, error=status.to_proto(error)
    )
