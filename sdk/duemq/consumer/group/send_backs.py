"""Gives failed messages back to their brokers: SendBack, several messages a request.

One request a broker at a time; what fails meanwhile gathers for the next one.  A request is
repeated until SEND_BACK_TIMEOUT_S is over: it is idempotent, a broker stores a message for its
retry once however often it is told.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from duemq.consumer.delivery.failure_log import FailureLog, and_more
from duemq.consumer.delivery.seams import Spawn
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.offset_client import Failure, OffsetClient, SentBack
from duemq.errors import DuemqError, FencedMember, TopicReplaced
from duemq.message import Message
from duemq.outcomes import Outcome
from duemq.tracing import meters, spans
from duemq.transport import retrying

log = logging.getLogger(__name__)

SEND_BACK_TIMEOUT_S = 5.0
MESSAGES_PER_REQUEST_MAX = 256

Lost = Callable[[Source, FencedMember | TopicReplaced], None]


class _Waiting(NamedTuple):
    source: Source
    message: Message
    failure: Failure
    done: asyncio.Future[bool]


class SendBacks:
    """The settler (dispatching.Settler) of one member."""

    def __init__(
        self,
        offsets: OffsetClient,
        spawn: Spawn,
        lost: Lost,
        *,
        group: str,
        client_id: str = "",
        timeout_s: float = SEND_BACK_TIMEOUT_S,
    ) -> None:
        """`lost` is told of a queue that another member has taken over, or that is gone."""
        self._timeout_s = timeout_s
        self._offsets = offsets
        self._spawn = spawn
        self._lost = lost
        self._group = group
        self._client_id = client_id
        self._failure_log = FailureLog()
        # By broker; bounded by the flow control of the queues.
        self._waiting: defaultdict[str, deque[_Waiting]] = defaultdict(deque)
        self._sending: set[str] = set()

    async def send_back(
        self, source: Source, message: Message, outcome: Outcome, deliveries: int
    ) -> bool:
        """See dispatching.Settler."""
        queue = source.queue
        failure = Failure(
            queue, message.offset, source.generation, outcome, deliveries, source.topic_id
        )
        done = asyncio.get_running_loop().create_future()
        self._waiting[queue.broker].append(_Waiting(source, message, failure, done))
        if queue.broker not in self._sending:
            self._sending.add(queue.broker)
            self._spawn(self._send(queue.broker))
        return await done

    async def _send(self, broker: str) -> None:
        """Until nothing waits."""
        waiting = self._waiting[broker]
        try:
            while waiting:
                count = min(len(waiting), MESSAGES_PER_REQUEST_MAX)
                batch = [waiting.popleft() for _ in range(count)]
                began_ns = time.time_ns()
                try:
                    answers = await self._ask(broker, [each.failure for each in batch])
                except DuemqError as error:
                    # What waited behind is no better off: each decides anew what to do.
                    batch += waiting
                    waiting.clear()
                    log.warning(
                        "group %s: %d messages could not be sent back to %s: %s",
                        self._group,
                        len(batch),
                        broker,
                        error,
                    )
                    answers = [SentBack(error)] * len(batch)
                for each, answer in zip(batch, answers, strict=True):
                    self._settle(each, answer, began_ns)
        finally:
            self._sending.discard(broker)

    async def _ask(self, broker: str, failures: Sequence[Failure]) -> list[SentBack]:
        async def attempt(left_s: float) -> list[SentBack]:
            return await self._offsets.send_back(broker, failures, left_s)

        return await retrying.until(monotonic() + self._timeout_s, attempt)

    def _settle(self, each: _Waiting, answer: SentBack, began_ns: int) -> None:
        message, failure, error = each.message, each.failure, answer.error
        end_ns, server = time.time_ns(), ""
        if (traced := spans.enabled()) or meters.enabled():
            server = self._offsets.address_of(message.broker)
            seconds = (end_ns - began_ns) / 1e9
            meters.settled(message.topic, self._group, seconds, error, server)
        if traced:
            spans.record_settle(
                message,
                start_ns=began_ns,
                end_ns=end_ns,
                group=self._group,
                client_id=self._client_id,
                attempt=failure.deliveries - 1,
                dead_letter=answer.dead_letter,
                due_ms=answer.due_ms,
                server=server,
                error=error,
            )
        if not each.done.done():
            each.done.set_result(error is None)
        if isinstance(error, FencedMember | TopicReplaced):
            self._lost(each.source, error)
        elif error is not None:
            self._log("not sent back", message, error)
        elif answer.dead_letter:
            self._log("is a dead letter", message, failure.outcome.error)

    def _log(self, what: str, message: Message, why: DuemqError | str) -> None:
        untold = self._failure_log.tell((what, type(why)), monotonic())
        level = logging.DEBUG if untold is None else logging.WARNING
        more = and_more(untold)
        log.log(level, "group %s: %r %s: %s%s", self._group, message, what, why, more)
