"""Send-backs: from the request to the answer after the disk has it.

A request is worked off in pieces of a bounded size: a piece's records are read (inline from the
page cache, else in a thread), then checked and stored without a break (send_back.py).
"""

import asyncio
from collections.abc import Callable
from functools import partial

from duemq.errors import DuemqError, Overloaded
from duemq.protocol import checks, names
from duemq.transport import status
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.commits import PENDING_BYTES_HIGH, ROOM_TIMEOUT_S, Commits
from duemq_server.broker.groups.send_back import FailedMessage, Outcome, SendBacks, SentBack
from duemq_server.broker.reading import reader
from duemq_server.broker.reading.reader import StoredRecord
from duemq_server.broker.store.changes import group_changes
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.serving.permissions.access import ACCESS
from duemq_server.serving.permissions.rights import Action, Need

MESSAGES_MAX = 1_024
# Records of one piece; one that is larger comes alone.
PIECE_BYTES_MAX = 4 << 20
# So few are tried inline: more of them may lie in frames whose checksums take long.
INLINE_RECORDS_MAX = 32
# Requests that have records in memory; the others wait.
AT_ONCE_MAX = 4

Wanted = tuple[int, Queue]
"""A message by its index in the request, and the queue to read it from."""


class SendBackRequests:
    """Takes requests to the store."""

    def __init__(
        self, store: Store, commits: Commits, now_ms: Callable[[], int], broker: str
    ) -> None:
        self._store = store
        self._commits = commits
        self._now_ms = now_ms
        self._core = SendBacks(store, broker)
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def send_back(self, request: broker_pb2.SendBackRequest) -> broker_pb2.SendBackResponse:
        """Stores what a group could not process; errors of messages travel in the answer.

        Raises InvalidArgument, GroupNotFound, Overloaded.
        """
        group = request.group
        names.check_own_group(group)
        checks.count("messages", len(request.messages), 1, MESSAGES_MAX, "in a request")
        group_changes.check_known(self._store, group)
        failures = [_failure(group, message) for message in request.messages]
        async with self._turns:
            outcomes, settled = await self._store_all(group, failures)
        await self._commits.wait(settled)
        return broker_pb2.SendBackResponse(
            results=[
                _result(failure, outcome)
                for failure, outcome in zip(failures, outcomes, strict=True)
            ]
        )

    async def _store_all(
        self, group: str, failures: list[FailedMessage]
    ) -> tuple[list[Outcome], int]:
        """(Outcomes in order, settled)."""
        outcomes: list[Outcome] = [SentBack(duplicate=True)] * len(failures)
        wanted: list[Wanted] = []
        settled = 0
        access = ACCESS.get()
        for index, failure in enumerate(failures):
            try:
                if access is not None:
                    access.check((Need(Action.RECEIVE, failure.key.topic),))
                queue = self._core.check(failure)
            except DuemqError as error:
                outcomes[index] = error
                continue
            if queue is not None:
                # The topic may be made anew while this is read.
                failures[index] = failure._replace(topic_id=queue.topic_id)
                wanted.append((index, queue))
            else:  # what settled it may still be on its way to the disk
                settled = self._store.log.end_position
        while wanted:
            await self._room()
            records = await self._read([(queue, failures[i].offset) for i, queue in wanted])
            piece, wanted = wanted[: len(records)], wanted[len(records) :]
            stored, end = self._core.store(
                group, [failures[index] for index, _ in piece], records, self._now_ms()
            )
            settled = max(settled, end)
            for (index, _), outcome in zip(piece, stored, strict=True):
                outcomes[index] = outcome
        return outcomes, settled

    async def _read(self, places: list[tuple[Queue, int]]) -> list[StoredRecord | DuemqError]:
        """Of the first of them, as many as a piece holds; at least one."""
        read = partial(reader.read_each, self._store.log, places, PIECE_BYTES_MAX)
        if len(places) <= INLINE_RECORDS_MAX:
            try:
                return read(nowait=True)
            except BlockingIOError:
                pass
        return await asyncio.to_thread(read)

    async def _room(self) -> None:
        """Returns when the disk is not too far behind.  Raises Overloaded."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                log = self._store.log
                while log.pending_bytes > PENDING_BYTES_HIGH and not log.disk_full:
                    await self._commits.progress()
        except TimeoutError:
            raise Overloaded(f"the disk is behind by more than {ROOM_TIMEOUT_S} s") from None


def _failure(group: str, message: broker_pb2.FailedMessage) -> FailedMessage:
    return FailedMessage(
        GroupQueue(group, message.topic, message.queue_id),
        message.offset,
        message.generation,
        message.delay_ms if message.HasField("delay_ms") else None,
        message.dead_letter,
        message.error,
        message.deliveries,
        message.topic_id,
    )


def _result(failure: FailedMessage, outcome: Outcome) -> broker_pb2.SendBackResult:
    result = broker_pb2.SendBackResult(
        topic=failure.key.topic, queue_id=failure.key.queue_id, offset=failure.offset
    )
    if isinstance(outcome, DuemqError):
        result.error.CopyFrom(status.to_proto(outcome))
    else:
        result.dead_letter = outcome.dead_letter
        result.due_ms = outcome.due_ms
        result.duplicate = outcome.duplicate
    return result
