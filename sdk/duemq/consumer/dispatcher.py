"""From pulled messages to finished ones: chunks, workers, and what is tried again.

Owned by the consumer's event loop.  A failed callback is called again after a backoff, for as
long as the queue is ours; nothing is skipped.  Chunks adapt: about CHUNK_S of callback time each,
so that slow callbacks spread over all workers and quick ones do not pay for hand-overs.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from duemq.consumer.settings import ConsumerSettings
from duemq.consumer.workers import (
    Callback,
    Caller,
    TaskWorkers,
    ThreadWorkers,
    Work,
    Workers,
    is_async,
)
from duemq.message import Message
from duemq.process_queue import Chunk, ProcessQueue
from duemq.rpc.backoff import Backoff

log = logging.getLogger(__name__)

CHUNK_S = 0.001
CHUNK_MESSAGES_MAX = 64
CALLBACK_S_MIN = 1e-7
# Weight of the newest chunk in the mean time of a callback.  The mean is geometric: a quick
# callback that sometimes has to wait for the interpreter is still a quick one.
SMOOTHING = 0.2

Pending = ProcessQueue[Message]


class Dispatcher:
    """Runs the callback over what was pulled."""

    def __init__(
        self,
        callback: Callback,
        *,
        batch: bool,
        settings: ConsumerSettings,
        progressed: Callable[[Pending], None],
        group: str = "",
        client_id: str = "",
    ) -> None:
        """`progressed` is called in the loop whenever messages of a queue were finished."""
        self._settings = settings
        self._batch = batch
        self._progressed = progressed
        self._loop = asyncio.get_running_loop()
        caller = Caller(callback, batch=batch, group=group, client_id=client_id)
        pool = TaskWorkers if is_async(callback) else ThreadWorkers
        self._workers: Workers = pool(caller, settings.threads, self._ended)
        self._works: defaultdict[Pending, set[Work]] = defaultdict(set)  # submitted, not ended
        self._some_ended = asyncio.Event()
        self._callback_s = CHUNK_S  # mean time of a callback; at first: one message a chunk

    def start(self) -> None:
        """Starts the workers."""
        self._workers.start()

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers after what they are doing; what they have not begun stays undone."""
        await self._workers.stop(timeout_s)

    def in_callback(self) -> bool:
        """Tells whether the caller is one of the workers."""
        return self._workers.inside()

    def dispatch(
        self, pending: Pending, messages: Sequence[Message], next_offset: int, size_bytes: int
    ) -> None:
        """Cuts messages of one queue into chunks and hands them to the workers."""
        size = self._settings.batch_messages_max if self._batch else self._chunk_messages()
        count = len(messages)
        for first in range(0, count, size):
            part = messages[first : first + size]
            past = first + len(part)
            upto = next_offset if past == count else messages[past].offset
            self._submit(Work(pending.add(part, upto, size_bytes * len(part) // count)))

    async def quiet(self, pending: Pending) -> None:
        """Returns when no callback for a dropped queue runs."""
        while any(work.running for work in self._works.get(pending, ())):
            ended = self._some_ended
            await ended.wait()

    def _chunk_messages(self) -> int:
        return max(1, min(CHUNK_MESSAGES_MAX, int(CHUNK_S / self._callback_s)))

    def _submit(self, work: Work) -> None:
        if work.queue.dropped:
            return
        self._works[work.queue].add(work)
        self._workers.submit(work)

    def _ended(self, work: Work) -> None:
        pending, chunk = work.queue, work.chunk
        works = self._works[pending]
        works.discard(work)
        if not works:
            del self._works[pending]
        self._some_ended.set()
        self._some_ended = asyncio.Event()
        if pending.dropped:
            return
        self._learn(work)
        for index, error in work.failures:
            self._again(chunk, index, error, work.backoff)
        pending.settle(chunk)
        self._progressed(pending)

    def _learn(self, work: Work) -> None:
        if work.index is None and not self._batch:
            mean_s = max(work.seconds / len(work.chunk.messages), CALLBACK_S_MIN)
            self._callback_s *= (mean_s / self._callback_s) ** SMOOTHING

    def _again(
        self, chunk: Chunk[Message], index: int | None, error: BaseException, before: Backoff | None
    ) -> None:
        settings = self._settings
        backoff = before or Backoff(settings.retry_wait_s_min, settings.retry_wait_s_max)
        wait_s = backoff.next_s()
        first = chunk.messages[index or 0]
        log.warning(
            "the callback failed for %s at %s/%s/%d offset %d, attempt %d; again in %.1f s: %r",
            "a batch" if index is None else f"message {first.message_id}",
            first.topic,
            first.broker,
            first.queue,
            first.offset,
            backoff.attempts,
            wait_s,
            error,
            exc_info=error if backoff.attempts == 1 else None,
        )
        self._loop.call_later(wait_s, self._submit, Work(chunk, index, backoff))
