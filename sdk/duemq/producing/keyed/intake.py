"""From a message's options to the request that it travels in.  Runs in callers' threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from duemq.errors import Closed, InvalidArgument
from duemq.producing.batch import RECORD_BYTES, Labels
from duemq.producing.keyed.batch import KeyedBatch, ScheduleCall
from duemq.producing.keyed.calls import no_shard
from duemq.producing.outbox import Outbox, Target, check_size
from duemq.protocol import checks, timer_keys
from duemq.protocol.due import DELAY_LEVELS, DELAYS_MS, DUE_MS_MAX, Due
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT
from duemq.protocol.message_ids import MessageIds

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from duemq.producing.batch_encoding import Extras
    from duemq.producing.keyed.calls import TimerCalls
    from duemq.protocol.route import Queue


class BatchOwner(Protocol):
    """Whose messages they are."""

    async def open_target(self, topic: str, timeout_s: float) -> Target:
        """Finds a topic, made if need be.  Raises DuemqErrors."""
        ...

    def settled(self, batch: KeyedBatch) -> None:
        """It is done: wakes who waits, and takes note of what is not stored."""
        ...


class KeyedIntake:
    """One producer's."""

    def __init__(
        self, outbox: Outbox, calls: TimerCalls, owner: BatchOwner, timeout_s: float
    ) -> None:
        """`timeout_s`: from here to the shard's answer."""
        self._outbox = outbox
        self._calls = calls
        self._owner = owner
        self._timeout_s = timeout_s
        self._ids = MessageIds()  # guarded by the lock of `calls`

    def __iter__(self) -> Iterator[KeyedBatch]:
        """What is not answered yet."""
        with self._calls.lock:
            calls = self._calls.lanes.open()
        return iter([call.batch for call in calls if isinstance(call, ScheduleCall)])

    def add(
        self,
        target: Target,
        queue: Queue | str | None,
        body: bytes,
        extras: Extras,
        due: Due,
        now_ms: int,
        labels: Labels,
        parent: SpanContext | None,
        timer_key: str,
        *,
        if_absent: bool,
    ) -> tuple[KeyedBatch, int]:
        """As Outbox.add.  Raises Closed, Unavailable while no shard is known."""
        topic, calls, outbox = target.topic, self._calls, self._outbox
        if not calls.shards:
            raise no_shard()
        shard = timer_keys.shard_of(topic, timer_key, calls.shards)
        size = len(body) + len(extras.encoded) + RECORD_BYTES
        now = time.monotonic()

        def begin() -> ScheduleCall:
            head = self._ids.head(now_ms)
            batch = KeyedBatch(topic, (queue, due.field), {}, 0, head, now_ms)
            if outbox.tracing and target.traced:
                batch.draw(0)
            return ScheduleCall(
                shard,
                now,
                self._timeout_s,
                batch,
                self._owner.open_target,
                self._settled,
                if_absent=if_absent,
                bytes_max=outbox.frame_bytes,
            )

        way = topic, shard, queue, due.field, if_absent
        batch: KeyedBatch | None = None
        outbox.reserve(size)
        try:
            with calls.lock:
                try:
                    call, begun = calls.gather(way, (topic, timer_key), now, begin)
                    call.batch.reserved += size
                    batch = call.batch
                    index = len(batch.bodies)
                    if index >= batch.traced_next or parent is not None:
                        batch.trace(index, len(body), extras, labels, parent)
                    batch.add_extras(extras)
                    batch.due_values.append(due.value)
                    batch.timer_keys.append(timer_key)
                    batch.bodies.append(body)
                    if batch.born_ms != now_ms:
                        batch.born_at(index, now_ms)
                    batch.size += size
                except BaseException:
                    if batch is not None:
                        try:
                            batch.cut()
                        finally:  # another signal may have come
                            batch.cut()
                    raise
            if begun:
                calls.wake()
        except BaseException as error:
            if batch is None:
                outbox.release(size)
            if not isinstance(error, Closed):  # a signal's handler raised
                calls.wake()
            raise
        return batch, index

    def _settled(self, batch: KeyedBatch) -> None:
        self._outbox.release(batch.reserved)
        self._owner.settled(batch)


def check_keyed(timer_key: str | None, body_bytes: int, due: Due | None, now_ms: int) -> Due:
    """The due time, which there must be.  Raises InvalidArgument, TooLarge.

    What is wrong with one message must not fail those that travel with it.
    """
    if timer_key is None:
        raise checks.wrong("if_absent", True, "only with a timer_key")
    timer_keys.check_timer_key(timer_key)
    if due is None:
        raise InvalidArgument(
            f"timer_key {timer_key!r}: only a delayed message has one",
            field="timer_key",
            value=timer_key,
            limit="with delay or deliver_at",
        )
    if due.field == DELAY_LEVELS:
        raise checks.wrong("delay_level", due.value, "delay or deliver_at beside a timer_key")
    if due.field == DELAYS_MS:
        checks.at_most("delay", due.value, DUE_MS_MAX - now_ms)
    check_size(body_bytes, MESSAGE_BYTES_DEFAULT)
    return due
