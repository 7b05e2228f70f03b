"""Handles and keys as clients send them: may this shard answer for them?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from duemq.errors import DuemqError, InvalidArgument, Unavailable
from duemq.protocol import timer_keys
from duemq.v1 import message_pb2, timer_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.others.other_shards import (
    NOWHERE_ELSE,
    TIMEOUT_S,
    ByShard,
    OtherShards,
    time_for,
)
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

SLICE = 500  # handles looked at before others' turn


class TimerNames:
    """One request's."""

    def __init__(
        self,
        scheduler: Scheduler,
        links: BrokerLinks,
        others: OtherShards,
        left_s: float | None = None,
    ) -> None:
        """`left_s`: how long the caller will wait."""
        self._scheduler = scheduler
        self._links = links
        self._others = others
        self._timeout_s = time_for(TIMEOUT_S, left_s)
        self._sources: dict[tuple[int, int], SourceId | DuemqError] = {}
        self._here: dict[tuple[int, int], _Here] = {}

    async def elsewhere(
        self, given: Sequence[message_pb2.TimerHandle], places: Sequence[int] | None = None
    ) -> ByShard:
        """Which of these timers other shards have; of those at `places`, or of all."""
        untold = self._links.untold()
        if not (untold or self._others.there):
            return NOWHERE_ELSE
        past: list[int] = []
        to_come: list[int] = []
        for at in range(len(given)) if places is None else places:
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            here = self._here_of(given[at])
            if here is None or here.has(given[at].offset):
                continue
            (past if here.is_past(given[at].offset) else to_come).append(at)
        found = await self._others.locate(given, sorted([*past, *to_come]), self._timeout_s)
        past = [at for at in past if at not in found.shards and given[at].store_id in untold]
        return found._replace(
            missing={**_untold(given, past, untold), **found.missing},
            to_come=set(to_come) - found.shards.keys(),
        )

    async def moved(
        self, given: Sequence[message_pb2.TimerHandle], unknown: Sequence[int]
    ) -> ByShard:
        """Which of those at these places, UNKNOWN here by now, other shards have after all.

        A timer that nobody had when `elsewhere` asked can have come to another shard since, and
        this one have got the queue behind it.
        """
        self._here.clear()
        return await self.elsewhere(given, unknown) if unknown else NOWHERE_ELSE

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
        topic, key = given.topic, given.key
        try:
            timer_keys.check_keyed_topic(topic)
            timer_keys.check_timer_key(key, "key")
            self._links.place.check_key(topic, key)
        except DuemqError as error:
            return error
        return TimerKey(topic, key)

    def _here_of(self, given: message_pb2.TimerHandle) -> _Here | None:
        """Of its source; None: nobody has the timer, the handle is wrong."""
        pair = given.store_id, given.queue_id
        if min(given.queue_id, given.offset, given.due_ms) < 0:
            return None
        here = self._here.get(pair)
        if here is None:
            source_id = SourceId(*pair)
            source = self._scheduler.numbers.source(source_id)
            own = self._scheduler.keyed.is_own(source_id)
            begin = 0 if own else self._links.begin_of(*pair)
            here = self._here[pair] = _Here(source, begin)
        return here

    def _source(self, store_id: int, queue_id: int) -> SourceId | DuemqError:
        """Whose timers this shard may answer for, or why not."""
        place = self._links.place
        if queue_id < 0:
            return _negative(queue_id, 0, 0)
        source_id = SourceId(store_id, queue_id)
        if not place.has(queue_id) and self._scheduler.numbers.source(source_id) is None:
            owner = timer_keys.shard_of_queue(queue_id, place.shards)
            return Unavailable(
                f"queue {queue_id} belongs to shard {owner} of {place.shards},"
                f" this is shard {place.shard}",
                field="queue_id",
                value=queue_id,
            )
        try:
            self._links.check_may_answer(store_id)
        except DuemqError as error:
            return error
        return source_id


class _Here(NamedTuple):
    """Of a source: what came from it, and what will come."""

    source: Source | None
    begin: int | None
    """What lies there or behind comes here; None: nothing does."""

    def is_past(self, offset: int) -> bool:
        """Whether this shard got the queue behind it."""
        return self.source is not None and offset < self.source.next_offset

    def has(self, offset: int) -> bool:
        """Whether the timer came to this shard, or will."""
        source = self.source
        if source is not None and source.had(offset):
            return True
        reached = source.next_offset if source is not None else 0
        return self.begin is not None and offset >= max(self.begin, reached)


def handle_of(given: message_pb2.TimerHandle) -> Cancelled:
    """As the core names it, whoever may answer for it."""
    return Cancelled(SourceId(given.store_id, given.queue_id), given.offset, given.due_ms)


def proto_of(handle: Cancelled) -> message_pb2.TimerHandle:
    """As clients get it."""
    source = handle.source
    return message_pb2.TimerHandle(
        store_id=source.store_id,
        queue_id=source.queue_id,
        offset=handle.offset,
        due_ms=handle.due_ms,
    )


def _untold(
    given: Sequence[message_pb2.TimerHandle], places: Sequence[int], untold: Mapping[int, str]
) -> dict[int, Unavailable]:
    """Of those that no shard has which is known: their brokers may know of others."""
    return {
        at: Unavailable(
            f"not at this shard, and broker {untold[given[at].store_id]} has not told yet which"
            " others may have it",
            field="broker",
            value=untold[given[at].store_id],
        )
        for at in places
    }


def _negative(queue_id: int, offset: int, due_ms: int) -> InvalidArgument:
    return InvalidArgument(
        f"handles: queue {queue_id}, offset {offset}, due {due_ms}: none may be negative",
        field="handles",
    )
