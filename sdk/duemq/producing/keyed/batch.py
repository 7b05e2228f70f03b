"""Messages under timer keys that travel together, and the request that they travel in."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from duemq.errors import Closed, DuemqError, Internal, Timeout, TimerExists, Unavailable
from duemq.producing.batch import Batch
from duemq.producing.handle import text_of
from duemq.producing.keyed.lanes import ShardCall
from duemq.producing.outbox import Target
from duemq.protocol.due import DELAYS_MS
from duemq.v1 import timer_pb2
from duemq.v1.message_pb2 import TimerHandle

Finds = Callable[[str, float], Awaitable[Target]]
"""Finds a topic in so many seconds, made if need be.  Raises DuemqErrors."""


class KeyedBatch(Batch):
    """Of one topic and one way to travel; each message may fail by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.timer_keys: list[str] = []
        self.reserved = 0
        """Of the buffer, in bytes."""
        self.results: Any = ()
        """A ScheduleResult a message."""

    def cut(self) -> None:
        """As Batch."""
        super().cut()
        del self.timer_keys[len(self.bodies) :]

    def records(self) -> bytes:
        """As a RecordBatch."""
        return b"".join(self.parts()[0])

    def answered(self, shard: str, answer: timer_pb2.ScheduleResponse) -> None:
        """The shard has decided.  `wake` then tells who waits."""
        self.results = list(answer.results)  # which a receipt can be pickled with
        for index, result in enumerate(self.results):
            if result.outcome == timer_pb2.EXISTS:
                self.errors[index] = self._exists(index, result.handle)
        first = self.results[0].handle
        due_ms = [x.handle.due_ms for x in self.results if x.outcome != timer_pb2.EXISTS]
        packed = struct.pack(f"<{len(due_ms)}q", *due_ms)
        self.stored(shard, first.store_id, first.queue_id, first.offset, answer.now_ms, packed)

    def _exists(self, index: int, there: TimerHandle) -> TimerExists:
        key = self.timer_keys[index]
        due = datetime.fromtimestamp(there.due_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return TimerExists(
            f"timer_key {key!r} of topic {self.topic!r}: a message waits under it until {due}",
            handle=text_of(there),
            due_ms=there.due_ms,
            field="timer_key",
            value=key,
        )

    def replaced_of(self, index: int) -> str | None:
        """The timer handle of what the message at `index` replaced."""
        result = self.results[index]
        return text_of(result.replaced) if result.HasField("replaced") else None

    def handle_of(self, index: int) -> str:
        """The timer handle of the message at `index`."""
        return text_of(self.results[index].handle)


class ScheduleCall(ShardCall):
    """The request that a batch travels in."""

    method = "Schedule"

    def __init__(
        self,
        shard: int,
        now: float,
        timeout_s: float,
        batch: KeyedBatch,
        find: Finds,
        settled: Callable[[KeyedBatch], object],
        *,
        if_absent: bool,
        bytes_max: int,
    ) -> None:
        """`settled`: told when the batch is done.  `bytes_max`: it grows no further."""
        super().__init__(shard, now, now + timeout_s)
        self.batch = batch
        self._timeout_s = timeout_s
        self._find = find
        self._settled = settled
        self._if_absent = if_absent
        self._bytes_max = bytes_max

    @property
    def full(self) -> bool:
        """It takes no more."""
        return super().full or self.batch.size >= self._bytes_max

    async def prepare(self, left_s: float) -> None:
        """Finds the topic, and the queue of an ordering key that came before it was found."""
        target = await self._find(self.batch.topic, left_s)
        ordering_key, _ = self.batch.way
        if isinstance(ordering_key, str):
            self.batch.queue = target.queue_for(ordering_key)

    def request(self, request_id: bytes) -> timer_pb2.ScheduleRequest:
        """As it is sent."""
        batch = self.batch
        request = timer_pb2.ScheduleRequest(
            request_id=request_id, topic=batch.topic, queue_id=-1, if_absent=self._if_absent
        )
        if batch.queue is not None:
            request.queue_id, request.broker = batch.queue.queue_id, batch.queue.broker
        values = batch.due_values[:1] if len(set(batch.due_values)) == 1 else batch.due_values
        dues = request.delays_ms if batch.due_field == DELAYS_MS else request.due_ms
        dues.extend(values)
        request.records.ParseFromString(batch.records())
        return request

    def answered(self, shard_name: str, answer: timer_pb2.ScheduleResponse) -> None:
        """Tells who waits."""
        count = self.batch.count
        if len(answer.results) != count:
            raise Internal(f"{shard_name} answered {len(answer.results)} of {count} messages")
        self.batch.answered(shard_name, answer)
        self._settled(self.batch)

    def failed(self, error: DuemqError, *, asked: bool) -> None:
        """Tells who waits."""
        if isinstance(error, Unavailable):
            doubt = (
                "the timer shard did not confirm it within {} s; whether the message is stored is"
                " unknown: {}"
            )
            text = doubt if asked else "not sent within {} s: {}"
            error = Timeout(text.format(self._timeout_s, error), limit=self._timeout_s)
        elif isinstance(error, Closed):
            outcome = "its outcome is unknown" if asked else "it was not sent"
            error = Closed(f"the producer was closed before the answer; {outcome}")
        self.batch.failed(error)
        self._settled(self.batch)
