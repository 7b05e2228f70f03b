"""Fires on the wire: one SendStream to each broker.

Owned by the event loop.  What to send and when is the lanes' business (fire_lane.py); this only
moves bytes, and tells the shard of answers, and of connections that come and go.  An answer that
does not come is noticed by the channel's keepalive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc.aio
import numpy as np

from duemq.errors import DuemqError, FencedProducer, OutOfSequence, Rejected, Unavailable
from duemq.settings import Tls
from duemq.transport import channel, status
from duemq.transport.retrying import Backoff
from duemq.v1 import view_pb2
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.serving.tracing import spans
from duemq_server.timer_service.firing import SLEEP_S_MAX
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireOutcome
from duemq_server.timer_service.shard import Shard

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 512 * 1024
# Batches are sent so long before they are due, for the broker to have them on its disk in time; it
# shows consumers nothing before.  In a flow they wait for one another, and are fewer.
SENT_AHEAD_MS = 3
AHEAD_REQUESTS_MAX = 2
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 2.0
_METHOD = "/duemq.v1.Broker/SendStream"


class _Request(NamedTuple):
    request_id: int
    batches: list[FireBatch]
    sent_ns: int


class FireStream:
    """The stream to one broker."""

    def __init__(
        self,
        shard: Shard,
        broker: str,
        address: str,
        clock: BrokerClock,
        tls: Tls | None = None,
        check: Callable[[grpc.aio.Channel], Awaitable[object]] | None = None,
        meant: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """`check` raises DuemqErrors unless that broker is at the other end of a connection.

        Another one that has its address would store what is sent, and this one get it as well.
        `meant` says to one that has it since the check whom the stream is for; a broker of an older
        release takes no notice.
        """
        self.broker = broker
        self.address = address
        self._shard = shard
        self._clock = clock
        self._tls = tls
        self._check = check
        self._meant = meant
        self._more = asyncio.Event()
        self._requests: deque[_Request] = deque()
        self._next_id = 0
        self._refused: set[str] = set()
        self._task = process.lasting(self._run(), f"fire stream {broker}", shard.log_loop.fail)

    def kick(self) -> None:
        """There may be something to send."""
        self._more.set()

    def end(self) -> None:
        """Sends nothing any more; what was not answered is sent again on the next stream."""
        self._task.cancel()

    async def stop(self) -> None:
        """Returns when the stream has ended."""
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff(RECONNECT_S_MIN, RECONNECT_S_MAX)
        while True:
            try:
                async with channel.connect(self.address, self._tls) as connection:
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        await connection.channel_ready()
                    if self._check is not None:
                        await self._check(connection)
                    backoff.reset()
                    await self._stream(connection)
            except (DuemqError, TimeoutError, asyncio.InvalidStateError) as error:
                level = logging.INFO if backoff.attempts == 0 else logging.DEBUG
                # InvalidStateError: gRPC's word for a write to a stream that has just ended.
                log.log(
                    level, "broker %s at %s: %s", self.broker, self.address, error or "no answer"
                )
            finally:
                self._shard.disconnected(self.broker, self)
            await asyncio.sleep(backoff.next_s())

    async def _stream(self, connection: grpc.aio.Channel) -> None:
        call: Any = connection.stream_stream(
            _METHOD,
            request_serializer=view_pb2.SendRequestView.SerializeToString,
            response_deserializer=view_pb2.SendResponseView.FromString,
        )(metadata=self._meant)
        self._requests.clear()
        self._shard.connected(self.broker, self)
        reader = asyncio.create_task(self._read(call), name=f"answers {self.broker}")
        writer = asyncio.create_task(self._write(call), name=f"fires {self.broker}")
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Any) -> None:
        dispatcher = self._shard.scheduler.dispatcher
        while True:
            self._more.clear()
            # One look at the clock: what becomes sendable between two would be missed by both.
            # By the broker's clock where ours is ahead: it would not take them before.
            behind_ms = self._clock.behind_ms
            now = now_ms() - behind_ms
            ahead_ms = SENT_AHEAD_MS if len(self._requests) < AHEAD_REQUESTS_MAX else 0
            batches = dispatcher.sendable(self.broker, now, REQUEST_BYTES_MAX, ahead_ms)
            if batches:
                await self._send(call, batches)
                continue
            retry_ms = dispatcher.next_retry_ms(self.broker, now, ahead_ms)
            timeout_s = None
            if retry_ms != NEVER:
                wait_s = (retry_ms + behind_ms) / 1000 - time.time()
                timeout_s = min(max(wait_s, 0.0), SLEEP_S_MAX)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._more.wait()
            except TimeoutError:
                continue

    async def _send(self, call: Any, batches: list[FireBatch]) -> None:
        now = now_ms() - self._clock.behind_ms
        self._next_id += 1
        self._requests.append(_Request(self._next_id, batches, time.time_ns()))
        producer_id = self._shard.directory.producer_id
        request = view_pb2.SendRequestView(
            request_id=self._next_id,
            batches=[
                view_pb2.BatchView(
                    topic=batch.lane.id.topic,
                    queue_id=batch.lane.id.queue_id,
                    producer_id=producer_id,
                    producer_epoch=batch.lane.epoch,
                    sequence=batch.sequence,
                    records=batch.records,
                    sizes=batch.sizes,
                    tag_hashes=batch.tag_hashes,
                    key_hashes=batch.key_hashes,
                    not_before_ms=batch.last_due_ms,
                    early_ms=batch.early_ms(now),
                )
                for batch in batches
            ],
        )
        await status.answer(call.write(request), self.address)

    async def _read(self, call: Any) -> None:
        while True:
            response = await status.answer(call.read(), self.address)
            if not isinstance(response, view_pb2.SendResponseView):
                raise Unavailable(f"{self.address}: the broker ended the stream")
            request = self._answered(response)
            self._clock.observe(now_ms(), response.now_ms, steady_ms())
            for batch, result in zip(request.batches, response.results, strict=True):
                self._take(batch, result, request.sent_ns, response.now_ms)
            self._more.set()

    def _answered(self, response: view_pb2.SendResponseView) -> _Request:
        """The request that it answers, the oldest one.  Raises Unavailable if it does not fit."""
        request = self._requests.popleft() if self._requests else None
        if request is None or request.request_id != response.request_id:
            raise Unavailable(f"{self.address}: answers are out of order")
        if len(response.results) != len(request.batches):
            raise Unavailable(
                f"{self.address}: answered {len(response.results)} of {len(request.batches)}"
                " batches"
            )
        return request

    def _take(
        self, batch: FireBatch, result: view_pb2.BatchResultView, sent_ns: int, answered_ms: int
    ) -> None:
        if result.duplicate and not batch.repeated:
            reason = "it has another batch of this number"
            self._refused_now(batch, FireOutcome.OUT_OF_SEQUENCE, reason)
            return
        if not result.HasField("error"):
            self._shard.answered(batch, FireOutcome.STORED, result.store_ms)
            if spans.enabled() and spans.traced(batch.lane.id.topic):
                _record_spans(batch, result.base_offset, result.store_ms, answered_ms, sent_ns)
            return
        error = status.from_proto(result.error)
        lane, reason = batch.lane, ""
        # A later epoch than this start's is of a copy that runs beside it: one of the two fires.
        of_a_copy = isinstance(error, FencedProducer) and not lane.begun
        if of_a_copy or isinstance(error, OutOfSequence):
            outcome = FireOutcome.OUT_OF_SEQUENCE
        else:
            outcome = FireOutcome.REJECTED if isinstance(error, Rejected) else FireOutcome.REFUSED
            level = logging.DEBUG if lane.failures else logging.WARNING
            reason = error.message
            log.log(level, "%s refused a batch, trying again: %s", lane.id, error)
        self._refused_now(batch, outcome, reason)

    def _refused_now(self, batch: FireBatch, outcome: FireOutcome, reason: str) -> None:
        """Now by the clock of `_write`, which looks whether it is time to try again."""
        sent_by_ms = now_ms() - self._clock.behind_ms
        self._shard.answered(batch, outcome, 0, reason, sent_by_ms)


def _record_spans(
    batch: FireBatch, offset: int, store_ms: int, answered_ms: int, sent_ns: int
) -> None:
    """Of a stored batch."""
    lane = batch.lane.id
    spans.record_fire(
        lane.topic,
        lane.broker,
        lane.queue_id,
        offset,
        batch.due_ms.tolist(),
        store_ms=store_ms,
        answered_ms=answered_ms,
        start_ns=sent_ns,
        end_ns=time.time_ns(),
        records=batch.records,
        sizes=np.frombuffer(batch.sizes, dtype="<u4").tolist(),
    )
