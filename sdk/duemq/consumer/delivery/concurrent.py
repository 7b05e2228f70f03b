"""Concurrent consumption: chunks, workers, and what becomes of a message that fails.

A failed message is sent back to its broker (send_backs.py) and comes again as a retry.  If the
broker does not take it, nor when it is asked again after a backoff, the callback is called again
here.  Nothing is skipped.

Chunks adapt: about CHUNK_S of callback time each, so that slow callbacks spread over workers.

Callbacks that take long are found by a look at the workers every LOOK_S: README.md.

Owned by the consumer's event loop.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Unpack

from duemq.consumer.delivery.chunk_work import Caller, Indices, Stalls, Work
from duemq.consumer.delivery.seams import Dispatcher, DispatchOptions
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.process_queue import Chunk
from duemq.message import Message
from duemq.outcomes import NotTaken, Outcome, outcome_of
from duemq.transport.retrying import Backoff

log = logging.getLogger(__name__)

CHUNK_S = 0.001
CHUNK_MESSAGES_MAX = 64
CALLBACK_S_MIN = 1e-7
# Weight of the newest chunk in the mean time of a callback.  The mean is geometric: a quick
# callback that sometimes has to wait for the interpreter is still a quick one.
SMOOTHING = 0.2
SLOW_S = 0.1
LOOK_S = 0.05
# A processing timeout is noticed late by at most this part of it, or by LOOK_S.
LOOKS_PER_TIMEOUT = 4

Outcomes = Mapping[int, Outcome]
"""Of messages of a chunk, by index."""


class ConcurrentDispatcher(Dispatcher[Work]):
    """In any order; sends back what fails."""

    def __init__(self, callback: Callback, **calling: Unpack[DispatchOptions]) -> None:
        super().__init__(callback, **calling)
        self._works: defaultdict[Source, set[Work]] = defaultdict(set)  # submitted, not ended
        self._sending_back: Counter[Source] = Counter()
        self._some_ended = asyncio.Event()
        self._callback_s = CHUNK_S  # mean time of a callback; at first: one message a chunk
        self._stalls: Stalls[Work] = Stalls()
        self._look_s = min(LOOK_S, self._settings.processing_timeout_s / LOOKS_PER_TIMEOUT)
        self._next_look: asyncio.TimerHandle | None = None

    def _caller(self, callback: Callback, client_id: str) -> Caller:
        return Caller(callback, batch=self._batch, group=self._group, client_id=client_id)

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers after what they are doing; what they have not begun stays undone."""
        if self._next_look is not None:
            self._next_look.cancel()
        await self._workers.stop(timeout_s)

    def dispatch(
        self, source: Source, messages: Sequence[Message], next_offset: int, size_bytes: int
    ) -> None:
        """Cuts messages of one queue into chunks and hands them to the workers."""
        size = self._settings.batch_messages_max if self._batch else self._chunk_messages()
        count = len(messages)
        for first in range(0, count, size):
            part = messages[first : first + size]
            past = first + len(part)
            upto = next_offset if past == count else messages[past].offset
            chunk = source.pending.add(part, upto, size_bytes * len(part) // count)
            self._submit(Work(source, chunk))

    async def quiet(self, source: Source) -> None:
        """Returns when no callback and no send-back of a dropped queue is under way."""
        while self._sending_back[source] or any(w.running for w in self._works.get(source, ())):
            ended = self._some_ended
            await ended.wait()

    def _chunk_messages(self) -> int:
        return max(1, min(CHUNK_MESSAGES_MAX, int(CHUNK_S / self._callback_s)))

    def _submit(self, work: Work) -> None:
        if work.pending.dropped:
            return
        self._works[work.source].add(work)
        self._workers.submit(work)
        if self._next_look is None:
            self._next_look = self._loop.call_later(self._look_s, self._look)

    # --- what workers report --------------------------------------------------------------------

    def _ended(self, work: Work) -> None:
        if work.abandoned:
            return
        self._forget(work)
        source, chunk = work.source, work.chunk
        for index in _finished_aside(work):
            chunk.finish_aside(index)
        self._hear_failures(work)
        if work.cut is not None and work.walk.next == work.cut:  # it had not even begun
            self._submit(Work(source, chunk, (work.cut,)))
        elif work.indices is None and work.cut is None:
            self._learn(work)
            self._go_on(source, chunk)  # it was stopped a moment too late to be cut off
        source.pending.settle(chunk)
        self._progressed(source)

    def _go_on(self, source: Source, chunk: Chunk[Message]) -> None:
        """With what no worker has."""
        if chunk.walk.next < len(chunk.messages) and not source.pending.dropped:
            chunk.walk.stopped = False
            self._submit(Work(source, chunk))

    def _forget(self, work: Work) -> None:
        works = self._works[work.source]
        works.discard(work)
        if not works:
            del self._works[work.source]
        self._tell_quiet()

    def _tell_quiet(self) -> None:
        self._some_ended.set()
        self._some_ended = asyncio.Event()

    def _learn(self, work: Work) -> None:
        walked = work.walk.next - work.first
        if walked and not self._batch:
            self._learn_mean(max(work.seconds / walked, CALLBACK_S_MIN))

    def _learn_mean(self, mean_s: float) -> None:
        self._callback_s *= (mean_s / self._callback_s) ** SMOOTHING

    def _hear_failures(self, work: Work) -> None:
        """The worker may be adding more: those are heard when it ends."""
        news = work.failures[work.heard :]
        work.heard += len(news)
        for failed in news:
            outcomes: dict[int, Outcome] = {}
            for error, indices in _by_error(failed):
                if not isinstance(error, NotTaken):
                    self._log_failure(work, indices, error)
                    outcomes |= dict.fromkeys(indices, outcome_of(error))
            if outcomes:
                self._give_back(work, outcomes, self._ask_again)

    def _log_failure(self, work: Work, indices: Indices, error: BaseException) -> None:
        message = work.chunk.messages[indices[0]]
        line = self._failure_log.line(error, monotonic())
        log.log(
            line.level,
            "the callback failed for %s%r, attempt %d: %r%s",
            f"{len(indices)} messages from " if len(indices) > 1 else "",
            message,
            message.attempt,
            error,
            line.more,
            exc_info=line.traceback,
        )

    # --- what failed ----------------------------------------------------------------------------

    def _give_back(
        self, work: Work, outcomes: Outcomes, refused: Callable[[Work, Outcomes], None]
    ) -> None:
        """Of a queue that was dropped too: what its broker takes now need not come again.

        `refused` is called with what the broker does not take.
        """
        self._sending_back[work.source] += 1
        self._spawn(self._send_back(work, outcomes, refused))

    async def _send_back(
        self, work: Work, outcomes: Outcomes, refused: Callable[[Work, Outcomes], None]
    ) -> None:
        source, chunk = work.source, work.chunk
        messages, left = chunk.messages, dict(outcomes)
        try:
            taken = await asyncio.gather(
                *(
                    self._settler.send_back(
                        source, messages[index], outcome, messages[index].attempt
                    )
                    for index, outcome in outcomes.items()
                )
            )
            for index, is_taken in zip(outcomes, taken, strict=True):
                if is_taken:
                    chunk.finish_aside(index)
                    del left[index]
        finally:
            self._sending_back[source] -= 1
            if not self._sending_back[source]:
                del self._sending_back[source]
            self._tell_quiet()
        source.pending.settle(chunk)
        self._progressed(source)
        if left:
            refused(work, left)

    def _ask_again(self, work: Work, outcomes: Outcomes) -> None:
        """The broker may have taken the messages, and not been able to say so."""
        self._give_back_later(work, outcomes, self._call_again)

    def _ask_forever(self, work: Work, outcomes: Outcomes) -> None:
        """The callback still has the messages, and is not to be called beside."""
        self._give_back_later(work, outcomes, self._ask_forever)

    def _give_back_later(
        self, work: Work, outcomes: Outcomes, refused: Callable[[Work, Outcomes], None]
    ) -> None:
        settings = self._settings
        backoff = work.backoff or Backoff(settings.retry_wait_s_min, settings.retry_wait_s_max)
        again = Work(work.source, work.chunk, tuple(outcomes), backoff)

        def now() -> None:
            if not again.pending.dropped:
                self._give_back(again, outcomes, refused)

        self._loop.call_later(backoff.next_s(), now)

    def _call_again(self, work: Work, outcomes: Outcomes) -> None:
        """The broker does not take the messages: nothing else can be done."""
        if work.pending.dropped:
            return
        for index in outcomes:
            work.chunk.messages[index].again()
        self._submit(Work(work.source, work.chunk, tuple(outcomes), work.backoff))

    # --- what takes long ------------------------------------------------------------------------

    def _look(self) -> None:
        busy = {w: w.position for w in self._workers.busy() if not w.abandoned}
        for work, still_s in self._stalls.look(monotonic(), busy).items():
            if still_s >= self._settings.processing_timeout_s:
                self._time_out(work, busy[work])
            elif still_s >= SLOW_S and work.cut is None and work.indices is None:
                self._cut_off(work, busy[work])
        going_on = busy or self._works
        self._next_look = self._loop.call_later(self._look_s, self._look) if going_on else None

    def _cut_off(self, work: Work, index: int) -> None:
        """Leaves a worker the message that it is busy with, and gives the rest to another."""
        if self._batch or index >= len(work.chunk.messages):
            return
        if work.chunk.cut_off(index):
            work.cut = index
            self._learn_mean(SLOW_S)
            self._hear_failures(work)
            self._go_on(work.source, work.chunk)

    def _time_out(self, work: Work, position: int) -> None:
        overdue = self._take_away(work, position)
        if not overdue:
            return  # it has ended just now
        work.abandoned = True
        self._forget(work)
        self._workers.replace(work)
        reason = f"timed out after {self._settings.processing_timeout_s:g} s"
        log.error(
            "the callback runs for %r and %d more: %s; sent back",
            work.chunk.messages[overdue[0]],
            len(overdue) - 1,
            reason,
        )
        self._hear_failures(work)
        self._give_back(work, dict.fromkeys(overdue, Outcome(reason)), self._ask_forever)
        if work.indices is None and work.cut is None:
            self._go_on(work.source, work.chunk)

    def _take_away(self, work: Work, position: int) -> Indices:
        """The messages that a worker is stuck with; it has no say in them any more."""
        if work.indices is not None:
            return work.indices
        if work.cut is not None:
            return (work.cut,) if work.walk.next == work.cut else ()
        count = len(work.chunk.messages) if self._batch else 1
        if work.chunk.cut_off(position, count):
            return tuple(range(position, position + count))
        return ()


def _finished_aside(work: Work) -> Indices:
    """Of messages that are set aside in the chunk, those that this work has done."""
    if work.indices is not None:
        return work.finished
    if work.cut is None or work.walk.next == work.cut:
        return ()
    return () if any(work.cut in failed for failed in work.failures) else (work.cut,)


def _by_error(failed: Mapping[int, BaseException]) -> list[tuple[BaseException, Indices]]:
    """What one error is of comes together: all of a list, unless a BatchFailed named errors."""
    errors: dict[int, tuple[BaseException, list[int]]] = {}
    for index, error in failed.items():
        errors.setdefault(id(error), (error, []))[1].append(index)
    return [(error, tuple(indices)) for error, indices in errors.values()]
