"""What workers do in any order: walk through a chunk of one queue.

A message whose callback raises, or that a BatchFailed names, is set aside and reported; the rest
goes on.
"""

from collections.abc import Hashable, Mapping, Sequence
from time import monotonic
from typing import Generic, TypeVar

from duemq.consumer.delivery.calling import Calling, check_ran
from duemq.consumer.delivery.workers import cancelling
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.process_queue import Chunk, ProcessQueue
from duemq.message import Message
from duemq.outcomes import errors_of
from duemq.transport.retrying import Backoff

Indices = tuple[int, ...]
W = TypeVar("W", bound=Hashable)


class Work:
    """A chunk, or some messages of it that are tried again, on its way through a worker."""

    def __init__(
        self,
        source: Source,
        chunk: Chunk[Message],
        indices: Indices | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """`indices`: of messages that were set aside; None: everything that was not tried yet."""
        self.source = source
        self.chunk = chunk
        self.walk = chunk.walk
        self.first = chunk.walk.next
        """Index of the first message that was not tried before."""
        self.indices = indices
        self.backoff = backoff
        """Of what failed and could not be sent back."""
        self.running = False
        self.failures: list[dict[int, BaseException]] = []
        """What was not done, by index, and why; one a call.  The worker appends."""
        self.finished: Indices = ()
        """What was tried again, and is done."""
        self.seconds = 0.0
        """How long the callbacks took."""
        # The event loop's notes.
        self.heard = 0
        """So many failures were dealt with."""
        self.cut: int | None = None
        """Index of the message that alone is left to the worker: another has the rest."""
        self.abandoned = False
        """It took too long: its result counts no more."""

    @property
    def pending(self) -> ProcessQueue[Message]:
        """Where its messages come from."""
        return self.source.pending

    @property
    def position(self) -> int:
        """Changes with every message."""
        return self.walk.next if self.indices is None else 0


class Caller(Calling):
    """Calls the callback with what a work holds."""

    def call(self, work: Work) -> None:
        """For threads: walks through the work, unless it timed out before it began."""
        if work.abandoned:
            return
        began = monotonic()
        try:
            if work.indices is not None:
                self._call_aside(work, work.indices)
            elif self.batch:
                self._call_batch(work)
            else:
                self._call_each(work)
        finally:
            work.seconds = monotonic() - began

    def _call_each(self, work: Work) -> None:
        walk, callback = work.walk, self.callback
        span = self.watch(work.chunk.messages)
        for message in work.chunk.messages[walk.next :]:
            if walk.stopped:
                return
            try:
                if span is not None:
                    with span([message]):
                        answer = callback(message)
                        if answer is not None:
                            check_ran(answer)
                else:
                    answer = callback(message)
                    if answer is not None:
                        check_ran(answer)
            except BaseException as error:
                _failed(work, [message], error)
            else:
                walk.next += 1

    def _call_batch(self, work: Work) -> None:
        messages = work.chunk.messages
        try:
            with self.span(messages):
                check_ran(self.callback(messages))
        except BaseException as error:
            _failed(work, messages, error)
        else:
            work.walk.next += len(messages)

    def _call_aside(self, work: Work, indices: Indices) -> None:
        messages = [work.chunk.messages[index] for index in indices]
        try:
            with self.span(messages):
                check_ran(self.callback(messages if self.batch else messages[0]))
        except BaseException as error:
            _failed_again(work, indices, messages, error)
        else:
            work.finished = indices

    async def call_async(self, work: Work) -> None:
        """For tasks: the same, awaiting each call."""
        began = monotonic()
        try:
            if work.indices is not None:
                await self._await_aside(work, work.indices)
            elif self.batch:
                await self._await_batch(work)
            else:
                await self._await_each(work)
        finally:
            work.seconds = monotonic() - began

    async def _await_each(self, work: Work) -> None:
        walk, span, cancelled = work.walk, self.watch(work.chunk.messages), cancelling()
        for message in work.chunk.messages[walk.next :]:
            if walk.stopped:
                return
            error = await self.awaited([message], message, span)
            if error is None:
                walk.next += 1
            else:
                _failed(work, [message], error)
            if cancelled():
                walk.stopped = True

    async def _await_batch(self, work: Work) -> None:
        messages = work.chunk.messages
        error = await self.awaited(messages, messages, self.span)
        if error is None:
            work.walk.next += len(messages)
        else:
            _failed(work, messages, error)

    async def _await_aside(self, work: Work, indices: Indices) -> None:
        messages = [work.chunk.messages[index] for index in indices]
        error = await self.awaited(messages, messages if self.batch else messages[0], self.span)
        if error is None:
            work.finished = indices
        else:
            _failed_again(work, indices, messages, error)


def _failed(work: Work, messages: Sequence[Message], error: BaseException) -> None:
    """The next messages of a work were tried: passes them, and sets aside what is not done."""
    walk = work.walk
    begin = walk.next
    undone = {begin + place: each for place, each in errors_of(error, messages).items()}
    work.failures.append(undone)
    walk.aside.update(undone)
    walk.next = begin + len(messages)


def _failed_again(
    work: Work, indices: Indices, messages: Sequence[Message], error: BaseException
) -> None:
    """The same for messages that are set aside."""
    undone = {indices[place]: each for place, each in errors_of(error, messages).items()}
    work.failures.append(undone)
    work.finished = tuple(index for index in indices if index not in undone)


class Stalls(Generic[W]):
    """How long workers have been busy with one message.  Pure.

    It looks now and then where each is, so that a callback that returns soon pays nothing for it.
    A stall is noticed up to one interval between looks late, never early.
    """

    def __init__(self) -> None:
        self._seen: dict[W, tuple[int, float]] = {}  # work → position, since when

    def look(self, now_s: float, busy: Mapping[W, int]) -> dict[W, float]:
        """`busy`: all work that is being done → its position.  Answers seconds without progress."""
        seen: dict[W, tuple[int, float]] = {}
        for work, position in busy.items():
            last, since_s = self._seen.get(work, (None, now_s))
            seen[work] = position, since_s if last == position else now_s
        self._seen = seen
        return {work: now_s - since_s for work, (_, since_s) in seen.items()}
