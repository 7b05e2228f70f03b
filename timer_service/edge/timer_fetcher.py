"""Frames of delayed messages, fetched from the %TIMER% queues of brokers.

Owned by the event loop.  A fetcher a queue: it asks for what follows the last offset taken over,
waits at the broker until there is something, and hands it to the shard.  Where to begin is the
shard's own knowledge; only for a queue it has never seen the broker is asked what the group
%TIMER% had committed.

A broker whose data directory was put back from a copy hears with a claim how far its queues were
taken over, and goes on behind that.  If it has given such offsets a second time by then, the shard
would take the first part of what comes for what it has, and drop it: so such a broker refuses the
fetch, and the shard fetches nothing from the queue any more, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from duemq.errors import (
    Corrupt,
    DuemqError,
    FencedTimer,
    InvalidArgument,
    OffsetOutOfRange,
    Overloaded,
    Unavailable,
)
from duemq.protocol.names import TIMER_GROUP, TIMER_TOPIC
from duemq.protocol.route import Broker
from duemq.transport import status
from duemq.transport.retrying import Backoff
from duemq.v1 import broker_pb2, stubs
from duemq_server.serving import process
from duemq_server.serving.tracing import spans
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers import intake
from duemq_server.timer_service.timers.log_entries import SourceId

log = logging.getLogger(__name__)

FETCH_BYTES_MAX = 512 * 1024
FETCH_WAIT_MS = 20_000
CALL_MARGIN_S = 10.0
RETRY_S_MIN = 0.05
RETRY_S_MAX = 2.0
CALL_TIMEOUT_S = 5.0
# A fetch costs some 0.3 ms on both sides, whatever it brings.  While little comes with each, the
# broker answers the next one later: a steady trickle costs fifty fetches a second and a queue, not
# thousands.  What is due so soon that it would be late it answers at once.
LINGER_BELOW_BYTES = 32 * 1024
LINGER_MS = 20
# Between fetches that bring little, and that soon: for these a broker does not linger.
PAUSE_S = 0.001
SOON_MS = 250
# A broker that is stopping answers waiting fetches at once, with nothing.
EMPTY_S_MIN = 1.0
EMPTY_PAUSE_S = 0.1


class TimerFetcher:
    """One queue of one broker."""

    def __init__(
        self,
        shard: Shard,
        broker: str,
        stub: Callable[[], stubs.BrokerStub],
        source: SourceId,
        begin: int,
        on_refused: Callable[[], None],
    ) -> None:
        """`begin`: what lies before it another shard has taken over.

        `on_refused` is called when the broker says that the queue is another service's, or not what
        was taken over: a claim tells more.
        """
        self.source = source
        self.begin = begin
        self.put_back = ""
        """Why nothing is fetched any more: the broker has not what was taken over from it."""
        self.claims = 0
        """So many were answered by the broker that is meant, not by one that has its address."""
        self.doubted: int | None = 0
        """So many were when it had not, or not yet, what was taken over; None: it has."""
        self._kept_from = 0  # what lies before it the broker keeps no more
        self.lag = 0  # records at the broker that were not fetched at the last look
        self.problem = ""
        """Why nothing more comes until somebody mends it."""
        self._linger_ms = 0
        self._shard = shard
        self._broker = broker
        self._meant = Broker(broker, "", store_id=source.store_id).meant
        self._stub = stub
        self._on_refused = on_refused
        self._task = process.lasting(
            self._run(), f"fetcher {broker}/{source.queue_id}", shard.log_loop.fail
        )

    async def stop(self) -> None:
        """Ends fetching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff(RETRY_S_MIN, RETRY_S_MAX)
        while True:
            claims = self.claims
            try:
                offset = await self._start()
                while True:
                    offset = await self._fetch(offset)
                    backoff.reset()
                    self.problem, self.doubted = "", None
            except FencedTimer:
                self._on_refused()
                await asyncio.sleep(backoff.next_s())
            except DuemqError as error:
                # Nobody may wait; what is there is answered, perhaps in a moment.
                goes_on = isinstance(error, Overloaded) and self.doubted is None
                level = logging.DEBUG if backoff.attempts or goes_on else logging.WARNING
                if isinstance(error, Corrupt | OffsetOutOfRange | InvalidArgument):
                    level, self.problem = logging.ERROR, str(error)
                log.log(
                    level, "%s, %s/%d: %s", self._broker, TIMER_TOPIC, self.source.queue_id, error
                )
                refused = isinstance(error, OffsetOutOfRange | InvalidArgument)
                # It may be another one when it is back.
                if not goes_on and (self.doubted is None or not refused):
                    self.doubted = self.claims
                if refused and self.doubted is not None:
                    self._on_refused()
                    # Since the first refusal, and before this one, it heard what was taken over.
                    if claims > self.doubted and (why := await self._why_put_back(error)):
                        self._end(why)
                        return
                await asyncio.sleep(backoff.next_s())

    async def _start(self) -> int:
        """Where to go on."""
        source = self._shard.scheduler.numbers.source(self.source)
        if source is not None:
            return max(source.next_offset, self.begin, self._kept_from)
        known = await self._at_broker()
        return self.begin if known is None else max(known.offset, known.min_offset, self.begin)

    async def _at_broker(self) -> broker_pb2.OffsetResult | None:
        """What the broker has of the queue, and the offset that was committed there."""
        request = broker_pb2.GetOffsetsRequest(group=TIMER_GROUP, topic=TIMER_TOPIC)
        answer = await status.answer(
            self._stub().GetOffsets(request, timeout=CALL_TIMEOUT_S, metadata=self._meant),
            self._broker,
        )
        found = (each for each in answer.queues if each.queue_id == self.source.queue_id)
        return next(found, None)

    async def _why_put_back(self, error: DuemqError) -> str:
        """What tells that the broker goes on with a copy of its data; empty: nothing does.

        If it has let go of what was committed, it is the shard that does: what it lacks is lost,
        and what came later is not.
        """
        if isinstance(error, InvalidArgument) and error.field == "offset":
            return str(error)  # inside of a frame, which begins with what was taken over
        if not isinstance(error, OffsetOutOfRange):
            return ""
        source = self._shard.scheduler.numbers.source(self.source)
        try:
            known = await self._at_broker()
        except DuemqError:
            return ""  # the next fetch tells
        if known is None:
            return ""
        self._kept_from = known.min_offset
        reached = max(self.begin, source.next_offset if source is not None else 0)
        if reached <= known.max_offset:
            return ""
        return f"it has offsets up to {known.max_offset}, and those up to {reached} were taken over"

    def _end(self, why: str) -> None:
        self.problem = ""
        self.put_back = (
            f"nothing is fetched from queue {self.source.queue_id} of broker {self._broker} any"
            f" more: {why}, so its data directory was put back from a copy, and messages came under"
            " offsets that were taken over before.  Stop it, remove the file store_id there (of a"
            " broker without replicas), and start it: what it took since is delivered; what it got"
            " just before the copy was made may come twice"
        )
        log.error("%s", self.put_back)

    async def _fetch(self, offset: int) -> int:
        # Commits wait for the first answer, which is not to wait for messages.
        wait_ms = FETCH_WAIT_MS if self.doubted is None else 0
        request = broker_pb2.FetchFramesRequest(
            topic=TIMER_TOPIC,
            queue_id=self.source.queue_id,
            offset=offset,
            max_bytes=FETCH_BYTES_MAX,
            wait_ms=wait_ms,
            timer_id=self._shard.directory.producer_id,
            linger_ms=self._linger_ms,
        )
        timeout_s = FETCH_WAIT_MS / 1000 + CALL_MARGIN_S
        asked_s = time.monotonic()
        call = self._stub().FetchFrames(request, timeout=timeout_s, metadata=self._meant)
        answer = await status.answer(call, self._broker)
        if answer.store_id != self.source.store_id:
            raise Unavailable(f"{self._broker} has another store now, {answer.store_id:016x}")
        if not answer.frames:
            if wait_ms and time.monotonic() - asked_s < EMPTY_S_MIN:
                await asyncio.sleep(EMPTY_PAUSE_S)
            return offset
        began_ns = time.time_ns()
        source = self._shard.scheduler.numbers.source(self.source)
        fetched_from = offset
        if offset == self._kept_from and source is not None:
            fetched_from = max(source.next_offset, self.begin)
        ingested = await self._shard.ingest(
            self.source, self._broker, answer.frames, fetched_from, self.begin
        )
        self.lag = answer.max_offset - answer.next_offset
        if spans.enabled():
            await self._trace(answer.frames, began_ns)
        asked_to_linger_ms, self._linger_ms = self._linger_ms, 0
        if len(answer.frames) < LINGER_BELOW_BYTES:
            self._linger_ms = LINGER_MS
            soon = ingested.first_due_ms < time.time_ns() // 1_000_000 + SOON_MS
            early_s = asked_s + asked_to_linger_ms / 1000 - time.monotonic()
            if soon:
                await asyncio.sleep(PAUSE_S)
            elif early_s > 0:  # a broker of an older release, or one where too many wait
                await asyncio.sleep(early_s)
        return answer.next_offset

    async def _trace(self, data: bytes, began_ns: int) -> None:
        frames = [fetched.frame for fetched in intake.frames_in(data)]
        traced = [f for f in frames if spans.traced(f.target_topic) and not f.untraced]
        if not traced:  # the next fetch waits for nothing
            return
        await self._shard.log_loop.durable(self._shard.directory.log.end_position)
        for each in traced:
            spans.record_schedule(
                each.target_topic,
                self._broker,
                each.queue_id,
                each.base_offset,
                each.count,
                start_ns=began_ns,
                end_ns=time.time_ns(),
                due_ms=int(each.due_ms.min()),
                records=each.payload,
            )
