"""The service GroupAdmin: settings, progress and offsets of groups on this broker."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from duemq.errors import DuemqError, GroupNotFound, OffsetOutOfRange
from duemq.protocol import checks, names
from duemq.protocol.retry_policy import RetryPolicy
from duemq.transport import status
from duemq.v1 import group_admin_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.groups import progress
from duemq_server.broker.groups.coordinator import Coordinator
from duemq_server.broker.groups.progress import Activity, QueueState
from duemq_server.broker.reading import time_search
from duemq_server.broker.reading.pull import QUEUES_MAX
from duemq_server.broker.store.changes import group_changes, offset_changes
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import StorageError

log = logging.getLogger(__name__)

SERVICE = group_admin_pb2.DESCRIPTOR.services_by_name["GroupAdmin"]
NO_OFFSET = -1
LAG_UNREADABLE = -1


class _Move(NamedTuple):
    """Where a group's offset in a queue is to go, or why it cannot."""

    topic: str
    queue_id: int
    target: int | DuemqError
    topic_id: int = 0
    """Of which topic of this name; 0: of whichever is there."""


class GroupAdminServicer:
    """See protos/duemq/v1/group_admin.proto."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        pulls: PullRequests,
        coordinator: Coordinator,
        activity: Activity,
        forget: Callable[[str], None],
        consumed_per_s: Callable[[GroupQueue, int], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._commits = commits
        self._pulls = pulls
        self._coordinator = coordinator
        self._activity = activity
        self._forget = forget
        self._consumed_per_s = consumed_per_s
        self._now_ms = now_ms

    # -- settings ---------------------------------------------------------------------------------

    async def PutGroup(
        self, request: group_admin_pb2.PutGroupRequest, _: Any
    ) -> group_admin_pb2.GroupConfig:
        """Makes a group, or changes its settings; answers what is in force."""
        config = GroupConfig(request.group.group, RetryPolicy.received(request.group.retry))
        await self._commits.wait(group_changes.put(self._store, config))
        return _sent(self._store.groups.effective(config.group))

    async def DeleteGroup(
        self, request: group_admin_pb2.DeleteGroupRequest, _: Any
    ) -> group_admin_pb2.DeleteGroupResponse:
        """Forgets a group."""
        group = request.group
        names.check_own_group(group)
        coordinated, settled = self._is_coordinated(group), 0
        self._coordinator.check_deletable(group)
        if group_changes.knows(self._store, group):
            retries = self._retry_queues(group)
            settled = group_changes.delete(self._store, group)
            self._activity.forget(group=group)
            self._pulls.wake(retries)
        elif not coordinated:
            raise _unknown(group)
        if coordinated:  # behind what a full disk refuses: all of the group goes, or nothing
            self._forget(group)
        await self._commits.wait(settled)
        return group_admin_pb2.DeleteGroupResponse()

    def _retry_queues(self, group: str) -> list[Queue]:
        topic = names.retry_topic(group)
        return self._store.queues_of(topic) if topic in self._store.topics else []

    def _is_coordinated(self, group: str) -> bool:
        try:
            self._coordinator.group(group)
        except GroupNotFound:
            return False
        return True

    # -- progress ---------------------------------------------------------------------------------

    async def DescribeProgress(
        self, request: group_admin_pb2.DescribeProgressRequest, _: Any
    ) -> group_admin_pb2.GroupProgress:
        """How far a group is on this broker."""
        group = request.group
        names.check_group(group)
        if not (group_changes.knows(self._store, group) or self._is_coordinated(group)):
            raise _unknown(group)
        now_ms = self._now_ms()
        states = list(progress.states_of(self._store, self._activity, group))
        # In a thread: the entries that tell the age may be cold.
        lags_ms = await asyncio.to_thread(lambda: [_lag_ms(state, now_ms) for state in states])
        return group_admin_pb2.GroupProgress(
            config=_sent(self._store.groups.effective(group)),
            queues=[
                self._progress(group, state, lag_ms)
                for state, lag_ms in zip(states, lags_ms, strict=True)
            ],
            sent_back=self._store.sent_back.of(group),
            dead_letters=self._store.dead_letters.of(group),
            dlq_messages=progress.dead_letters_kept(self._store, group),
            retries_waiting=progress.retries_waiting(self._store, group),
            put=group in self._store.groups,
        )

    def _progress(
        self, group: str, state: QueueState, lag_ms: int
    ) -> group_admin_pb2.QueueProgress:
        queue = state.queue
        key = GroupQueue(group, queue.topic, queue.queue_id)
        return group_admin_pb2.QueueProgress(
            topic=queue.topic,
            queue_id=queue.queue_id,
            offset=state.progress.offset,
            generation=state.progress.generation,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            lag=state.lag,
            lag_ms=lag_ms,
            pulled_offset=state.pulled_offset,
            settled=len(state.settled),
            consumed_per_s=self._consumed_per_s(key, state.progress.offset),
            last_commit_ms=self._activity.committed_ms(key),
        )

    # -- offsets ----------------------------------------------------------------------------------

    async def ResetOffsets(
        self, request: group_admin_pb2.ResetOffsetsRequest, _: Any
    ) -> group_admin_pb2.ResetOffsetsResponse:
        """Moves a group's offsets, or says how it would."""
        names.check_own_group(request.group)
        if not request.dry_run:
            group_changes.check_known(self._store, request.group)
        moves = await self._targets(request)
        return await self._move(request.group, moves, request.dry_run)

    async def _targets(self, request: group_admin_pb2.ResetOffsetsRequest) -> list[_Move]:
        to = request.WhichOneof("to")
        if to is None or (to in ("earliest", "latest") and not getattr(request, to)):
            raise checks.wrong("to", to, "earliest, latest, at_ms or offset")
        checks.at_least("at_ms", request.at_ms, 0)
        queues = self._store.queues_of(request.topic)
        checks.count("queue_ids", len(request.queue_ids), 0, QUEUES_MAX)
        wanted = sorted(set(request.queue_ids)) or [queue.queue_id for queue in queues]
        # It may be made anew while times are looked for: `_move` refuses what was found then.
        topic_id = queues[0].topic_id

        def find() -> list[_Move]:
            return [
                _Move(request.topic, queue_id, self._target(request, queue_id), topic_id)
                for queue_id in wanted
            ]

        return await asyncio.to_thread(find) if to == "at_ms" else find()

    def _target(
        self, request: group_admin_pb2.ResetOffsetsRequest, queue_id: int
    ) -> int | DuemqError:
        try:
            queue = self._store.queue(request.topic, queue_id)
        except DuemqError as error:
            return error
        to = request.WhichOneof("to")
        if to == "at_ms":
            return time_search.found_or_corrupt(queue, request.at_ms)
        low, high = queue.min_offset, queue.max_offset
        if to != "offset":
            return low if to == "earliest" else high
        if low <= request.offset <= high:
            return request.offset
        return OffsetOutOfRange(
            f"offset: {request.offset} of topic {queue.topic}, queue {queue_id} is not kept:"
            f" {low} to {high} are",
            field="offset",
            value=request.offset,
            limit=f"{low} to {high}",
        )

    async def CloneOffsets(
        self, request: group_admin_pb2.CloneOffsetsRequest, _: Any
    ) -> group_admin_pb2.ResetOffsetsResponse:
        """Gives a group the offsets that another has; not those of its own retry topic."""
        names.check_own_group(request.to_group, "to_group")
        names.check_group(request.group)
        if request.group == request.to_group:
            raise checks.wrong("to_group", request.to_group, "another group than the source")
        if request.group not in self._store.offsets:
            raise _unknown(request.group)
        if not request.dry_run:
            group_changes.check_known(self._store, request.to_group)
        if request.topic:
            self._store.queues_of(request.topic)  # raises TopicNotFound
        moves = [
            _Move(topic, queue_id, known.offset)
            for topic, queue_id, known in self._store.offsets.of_group(request.group, request.topic)
            if not names.is_retry(topic)
        ]
        return await self._move(request.to_group, moves, request.dry_run)

    async def _move(
        self, group: str, moves: Iterable[_Move], dry_run: bool
    ) -> group_admin_pb2.ResetOffsetsResponse:
        answer = group_admin_pb2.ResetOffsetsResponse()
        changes: list[tuple[GroupQueue, int]] = []
        for topic, queue_id, target, topic_id in moves:
            key = GroupQueue(group, topic, queue_id)
            before = self._store.offsets.find(key)
            change = answer.changes.add(
                topic=topic, queue_id=queue_id, before=before.offset if before else NO_OFFSET
            )
            try:
                queue = self._store.queue(topic, queue_id, topic_id)
                change.min_offset, change.max_offset = queue.min_offset, queue.max_offset
                if isinstance(target, DuemqError):
                    raise target
            except DuemqError as error:
                change.after = change.before
                change.error.CopyFrom(status.to_proto(error))
            else:
                change.after = target
                changes.append((key, target))
        if not dry_run and changes:
            settled = offset_changes.reset(self._store, group, changes)
            for key, _ in changes:
                self._activity.forget_pull(key)
            # Members that wait for records learn that they have lost the queue.
            self._pulls.wake(self._store.queue(key.topic, key.queue_id) for key, _ in changes)
            await self._commits.wait(settled)
        return answer


def _lag_ms(state: QueueState, now_ms: int) -> int:
    try:
        return state.lag_ms(now_ms)
    except (StorageError, OSError, IndexError) as error:
        log.error("%s/%d: how old its oldest record is: %s", *state.queue.key, error)
        return LAG_UNREADABLE


def _unknown(group: str) -> GroupNotFound:
    return GroupNotFound(f"group: {group!r} is not here", field="group", value=group)


def _sent(config: GroupConfig) -> group_admin_pb2.GroupConfig:
    sent = group_admin_pb2.GroupConfig(group=config.group)
    config.retry.write(sent.retry)
    return sent
