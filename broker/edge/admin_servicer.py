"""The service BrokerAdmin: from protobuf to the store and back."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from duemq.errors import TopicNotFound
from duemq.protocol import checks, names
from duemq.protocol.limits import QUEUES_MAX
from duemq.v1 import admin_pb2
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.errors import StorageError

log = logging.getLogger(__name__)

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["BrokerAdmin"]


class About(NamedTuple):
    """What does not change while the broker runs."""

    broker: str
    store_id: int
    version: str
    started_ms: int


class AdminServicer:
    """See protos/duemq/v1/admin.proto."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        pulls: PullRequests,
        activity: Activity,
        about: About,
        in_per_s: Callable[[Queue], float],
    ) -> None:
        self._store = store
        self._commits = commits
        self._pulls = pulls
        self._activity = activity
        self._about = about
        self._in_per_s = in_per_s

    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, _: Any
    ) -> admin_pb2.TopicDescription:
        """Makes a topic."""
        wanted = request.topic
        if request.if_missing and wanted.name in self._store.topics:
            # It may be on its way to the disk for somebody else.
            await self._commits.wait(self._store.log.end_position)
            return self._describe(self._store.topics.find(wanted.name))
        if request.if_missing and not self._store.settings.auto_create_topics:
            raise TopicNotFound(
                f"topic: {wanted.name!r} is not here, and auto_create_topics is off",
                field="topic",
                value=wanted.name,
            )
        topic, settled = self._store.create_topic(
            wanted.name, wanted.queues, wanted.message_bytes_max
        )
        await self._commits.wait(settled)
        return self._describe(topic)

    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, _: Any
    ) -> admin_pb2.DeleteTopicResponse:
        """Deletes a topic and its messages."""
        queues = self._store.queues_of(request.name)
        settled = self._store.delete_topic(request.name, request.topic_id)
        self._activity.forget(topic=request.name)
        self._pulls.wake(queues)
        await self._commits.wait(settled)
        return admin_pb2.DeleteTopicResponse()

    async def PurgeTopic(
        self, request: admin_pb2.PurgeTopicRequest, _: Any
    ) -> admin_pb2.TopicDescription:
        """Takes records out of a topic's queues."""
        checks.count("cuts", len(request.cuts), 0, QUEUES_MAX, "in a request")
        cuts = {cut.queue_id: cut.before_offset for cut in request.cuts}
        await self._commits.wait(
            offset_changes.purge(self._store, request.name, cuts, request.topic_id)
        )
        return self._describe(self._store.topics.find(request.name))

    async def ListTopics(
        self, request: admin_pb2.ListTopicsRequest, _: Any
    ) -> admin_pb2.ListTopicsResponse:
        """The topics of this broker, by name."""
        topics = sorted(self._store.topics, key=lambda topic: topic.name)
        return admin_pb2.ListTopicsResponse(
            topics=[
                _config(topic)
                for topic in topics
                if request.system or not names.is_system(topic.name)
            ]
        )

    async def DescribeTopic(
        self, request: admin_pb2.DescribeTopicRequest, _: Any
    ) -> admin_pb2.TopicDescription:
        """A topic and its queues."""
        return self._describe(self._store.topics.find(request.name))

    async def DescribeBroker(
        self, _request: admin_pb2.DescribeBrokerRequest, _: Any
    ) -> admin_pb2.BrokerDescription:
        """The broker itself."""
        log = self._store.log
        return admin_pb2.BrokerDescription(
            broker=self._about.broker,
            store_id=self._about.store_id,
            version=self._about.version,
            started_ms=self._about.started_ms,
            log_start_position=log.start_position,
            log_durable_position=log.durable_position,
            checkpoint_position=self._store.checkpoint_position,
            read_only=not self._store.writable,
            delay_levels_ms=self._store.settings.delay_levels_ms,
        )

    def _describe(self, topic: Topic) -> admin_pb2.TopicDescription:
        return admin_pb2.TopicDescription(
            topic=_config(topic),
            queues=[self._queue(queue) for queue in self._store.queues_of(topic.name)],
            broker=self._about.broker,
            topic_id=topic.id,
        )

    def _queue(self, queue: Queue) -> admin_pb2.QueueDescription:
        return admin_pb2.QueueDescription(
            queue_id=queue.queue_id,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            last_store_ms=_last_store_ms(queue),
            in_per_s=self._in_per_s(queue),
            messages=queue.records_from(queue.min_offset),
        )


def _last_store_ms(queue: Queue) -> int:
    try:
        return queue.last_store_ms()
    except (StorageError, OSError, IndexError) as error:
        log.error("%s/%d: when its last record was stored: %s", *queue.key, error)
        return 0


def _config(topic: Topic) -> admin_pb2.TopicConfig:
    return admin_pb2.TopicConfig(
        name=topic.name, queues=topic.queues, message_bytes_max=topic.message_bytes_max
    )
