"""Handles and keys as clients send them: may this shard answer for them?"""

from __future__ import annotations

from duemq.errors import DuemqError, InvalidArgument, Unavailable
from duemq.protocol import timer_keys
from duemq.v1 import message_pb2, timer_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId


class TimerNames:
    """One request's."""

    def __init__(self, links: BrokerLinks, settings: Settings) -> None:
        self._links = links
        self._settings = settings
        self._sources: dict[tuple[int, int], SourceId | DuemqError] = {}

    def handle(self, given: message_pb2.TimerHandle) -> Cancelled | DuemqError:
        """As the core names it, or what is wrong with it."""
        pair = given.store_id, given.queue_id
        source = self._sources.get(pair)
        if source is None:
            source = self._sources[pair] = self._source(*pair)
        offset, due_ms = given.offset, given.due_ms
        if isinstance(source, DuemqError):
            return source
        if offset < 0 or due_ms < 0:
            return _negative(pair[1], offset, due_ms)
        return Cancelled(source, offset, due_ms)

    def key(self, given: timer_pb2.TimerKey) -> TimerKey | DuemqError:
        """As the core names it, or what is wrong with it."""
        settings = self._settings
        topic, key = given.topic, given.key
        try:
            timer_keys.check_keyed_topic(topic)
            timer_keys.check_timer_key(key, "key")
            timer_keys.check_shard(topic, key, settings.shard, settings.shards)
        except DuemqError as error:
            return error
        return TimerKey(topic, key)

    def _source(self, store_id: int, queue_id: int) -> SourceId | DuemqError:
        """Whose timers this shard may answer for, or why not."""
        settings = self._settings
        if queue_id < 0:
            return _negative(queue_id, 0, 0)
        if queue_id % settings.shards != settings.shard:
            return Unavailable(
                f"queue {queue_id} belongs to shard {queue_id % settings.shards}"
                f" of {settings.shards}, this is shard {settings.shard}",
                field="queue_id",
                value=queue_id,
            )
        try:
            self._links.check_may_answer(store_id)
        except DuemqError as error:
            return error
        return SourceId(store_id, queue_id)


def proto_of(handle: Cancelled) -> message_pb2.TimerHandle:
    """As clients get it."""
    source = handle.source
    return message_pb2.TimerHandle(
        store_id=source.store_id,
        queue_id=source.queue_id,
        offset=handle.offset,
        due_ms=handle.due_ms,
    )


def _negative(queue_id: int, offset: int, due_ms: int) -> InvalidArgument:
    return InvalidArgument(
        f"handles: queue {queue_id}, offset {offset}, due {due_ms}: none may be negative",
        field="handles",
    )
