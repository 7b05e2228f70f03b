"""The service MessageAdmin: finds messages, and says what groups have made of one.

Look-ups run in one thread of their own, one after the other, so that they never hold up pulls.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from duemq.errors import (
    Corrupt,
    OffsetOutOfRange,
    Overloaded,
    TopicNotFound,
)
from duemq.protocol import checks, names
from duemq.protocol.limits import FOUND_MAX
from duemq.protocol.record_bytes import text_hash
from duemq.v1 import message_admin_pb2, message_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.pulls.disk_reads import stopping
from duemq_server.broker.groups.progress import Activity, QueueState, state_of
from duemq_server.broker.reading import lookup, reader
from duemq_server.broker.reading.lookup import Cursor, FoundRecord, LookupStart, MessageQuery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import StorageError

log = logging.getLogger(__name__)

SERVICE = message_admin_pb2.DESCRIPTOR.services_by_name["MessageAdmin"]
LIMIT_DEFAULT = 64
TEXT_BYTES_MAX = 4_096
MESSAGE_ID_BYTES_MAX = 255
TIME_MS_MAX = 1 << 62
# Look-ups that wait for their turn or are in it.
LOOKUPS_MAX = 32


class MessageAdminServicer:
    """See protos/duemq/v1/message_admin.proto."""

    def __init__(self, store: Store, commits: Commits, activity: Activity, broker: str) -> None:
        self._store = store
        self._commits = commits
        self._activity = activity
        self._broker = broker
        self._threads = ThreadPoolExecutor(1, "look-up")
        self._lookups = 0
        self._closed = False

    def close(self) -> None:
        """Starts no look-up any more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def FindMessages(
        self, request: message_admin_pb2.FindMessagesRequest, _: Any
    ) -> message_admin_pb2.FindMessagesResponse:
        """One bounded step of a look-up."""
        query = _query(request)
        queues, start = self._range(request)
        step = await self._in_turn(
            queues,
            lambda: lookup.search(
                self._store.log, queues, query, start, request.limit or LIMIT_DEFAULT
            ),
        )
        following = step.following and Cursor(queues[0].topic_id, step.following)
        return message_admin_pb2.FindMessagesResponse(
            messages=[self._found(request.topic, each) for each in step.found],
            cursor=lookup.encode_cursor(following) if following else b"",
        )

    def _range(
        self, request: message_admin_pb2.FindMessagesRequest
    ) -> tuple[list[Queue], LookupStart]:
        """The queues to look at, and where to begin in the first.

        Raises TopicReplaced if they are not those of the answer that the cursor is of.
        """
        topic_id, cursor = lookup.decode_cursor(request.cursor) if request.cursor else (0, None)
        self._store.topics.meant(request.topic, topic_id)
        if not request.HasField("queue_id"):
            if request.HasField("offset"):
                raise checks.wrong("offset", request.offset, "together with queue_id")
            return self._store.queues_of(request.topic), cursor or LookupStart(0, 0)
        queue = self._store.queue(request.topic, request.queue_id)
        if cursor is not None and cursor.queue_id != queue.queue_id:
            raise checks.wrong("cursor", cursor.queue_id, "that of an answer to the same request")
        return [queue], cursor or LookupStart(queue.queue_id, max(0, request.offset))

    async def _in_turn(
        self, queues: list[Queue], work: Callable[[], lookup.LookupStep]
    ) -> lookup.LookupStep:
        if self._closed:
            raise stopping()
        if self._lookups >= LOOKUPS_MAX:
            raise Overloaded(
                f"{self._lookups} look-ups wait here, the most allowed", limit=LOOKUPS_MAX
            )
        self._lookups += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):  # its turn never came
                raise stopping() from None
            raise
        except (StorageError, OSError, IndexError) as error:
            if any(queue.dropped for queue in queues):
                topic = queues[0].topic
                message = f"topic: {topic} was deleted meanwhile"
                raise TopicNotFound(message, field="topic", value=topic) from error
            log.error("a look-up failed: %s", error)
            raise Corrupt(f"{type(error).__name__}: {error}") from error
        finally:
            self._lookups -= 1

    async def MarkResent(
        self, request: message_admin_pb2.MarkResentRequest, _: Any
    ) -> message_admin_pb2.MarkResentResponse:
        """Notes that dead letters were sent again."""
        names.check_group(request.group)
        checks.count("offsets", len(request.offsets), 0, FOUND_MAX, "in a request")
        settled = offset_changes.mark_resent(
            self._store, request.group, request.queue_id, request.offsets
        )
        await self._commits.wait(settled)
        return message_admin_pb2.MarkResentResponse()

    def _found(self, topic: str, found: FoundRecord) -> message_admin_pb2.FoundMessage:
        # What is no Record is shown all the same: as a body, and nothing else.
        record = _record(found.entry) or message_pb2.Record(body=bytes(found.entry))
        return message_admin_pb2.FoundMessage(
            queue=message_pb2.QueueRef(topic=topic, broker=self._broker, queue_id=found.queue_id),
            offset=found.offset,
            store_ms=found.store_ms,
            record=record,
            resent=self._store.offsets.is_done(
                GroupQueue(names.RESENT_GROUP, topic, found.queue_id), found.offset
            ),
        )

    async def DescribeDelivery(
        self, request: message_admin_pb2.DescribeDeliveryRequest, _: Any
    ) -> message_admin_pb2.DescribeDeliveryResponse:
        """What each group has made of one message."""
        queue = self._store.queue(request.topic, request.queue_id)
        reader.check_offset(queue, request.offset)
        if request.offset == queue.max_offset:
            raise OffsetOutOfRange(
                f"offset: {request.offset} of topic {queue.topic}, queue {queue.queue_id} is not"
                " stored yet",
                field="offset",
                value=request.offset,
                limit=f"{queue.min_offset} to {queue.max_offset - 1}",
            )
        answer = message_admin_pb2.DescribeDeliveryResponse()
        for group in self._store.offsets.groups():
            key = GroupQueue(group, queue.topic, queue.queue_id)
            progress = self._store.offsets.find(key)
            if progress is not None:
                state = state_of(self._store, self._activity, key, progress)
                answer.groups.add(
                    group=group,
                    state=_delivery(state, request.offset),
                    offset=progress.offset,
                )
        return answer


def _delivery(state: QueueState, offset: int) -> message_admin_pb2.DeliveryState:
    if offset < state.progress.offset:
        return message_admin_pb2.CONSUMED
    if offset in state.settled:
        return message_admin_pb2.SENT_BACK
    if offset < state.pulled_offset:
        return message_admin_pb2.IN_FLIGHT
    return message_admin_pb2.WAITING


def _query(request: message_admin_pb2.FindMessagesRequest) -> MessageQuery:
    """Raises InvalidArgument."""
    message_id, key = request.message_id, request.key
    if message_id and key:
        raise checks.wrong("key", key[:64], "message_id or key, not both")
    checks.count("message_id", len(message_id.encode()), 0, MESSAGE_ID_BYTES_MAX, "bytes")
    checks.count("key", len(key.encode()), 0, TEXT_BYTES_MAX, "bytes")
    for name, value in (("from_ms", request.from_ms), ("to_ms", request.to_ms)):
        checks.between(name, value, 0, TIME_MS_MAX)
    checks.between("limit", request.limit, 1, FOUND_MAX, zero=f"{LIMIT_DEFAULT}")
    query = MessageQuery(from_ms=request.from_ms, to_ms=request.to_ms)
    if key:
        return replace(
            query,
            key_hash=text_hash(key.encode()),
            matches=lambda entry: (record := _record(entry)) is not None and record.key == key,
        )
    if message_id:
        return replace(
            query,
            needle=lookup.message_id_field(message_id),
            matches=lambda entry: (
                (record := _record(entry)) is not None and record.message_id == message_id
            ),
        )
    return query


def _record(entry: bytes | memoryview) -> message_pb2.Record | None:
    """The record of a batch's entry; None: the producer sent something else."""
    try:
        batch = message_pb2.RecordBatch.FromString(bytes(entry))
    except DecodeError:
        return None
    return batch.records[0] if len(batch.records) == 1 else None
