"""Calls the application: a pool of threads, or of tasks for coroutine functions.

Workers take whole chunks from one queue, not messages: a hand-over between threads costs about as
much as a hundred trivial callbacks.  A worker walks through its chunk in order; a message whose
callback raises is set aside and reported, and the rest goes on.  `Work.running` is set before
`dropped` is looked at: whoever drops a queue and then finds no running work knows that no
callback runs or will.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from inspect import iscoroutinefunction
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

from duemq import tracing
from duemq.message import Message
from duemq.process_queue import Chunk, ProcessQueue
from duemq.rpc.backoff import Backoff

Callback = Callable[[Any], Any]


class Work:
    """A chunk, or one message of it that is tried again, on its way through a worker."""

    __slots__ = ("backoff", "chunk", "failures", "index", "running", "seconds")

    def __init__(
        self, chunk: Chunk[Message], index: int | None = None, backoff: Backoff | None = None
    ) -> None:
        self.chunk = chunk
        self.index = index
        """None: everything that was not tried yet."""
        self.backoff = backoff
        """Of what failed before."""
        self.running = False
        self.failures: list[tuple[int | None, BaseException]] = []
        """(index, error) of what is to be tried again; index None: the whole chunk."""
        self.seconds = 0.0
        """How long the callbacks took."""

    @property
    def queue(self) -> ProcessQueue[Message]:
        """Where its messages come from."""
        return self.chunk.queue

    @property
    def attempt(self) -> int:
        """How often it failed before."""
        return self.backoff.attempts if self.backoff else 0


class Workers(Protocol):
    """Runs work; reports each one's end in the event loop."""

    def start(self) -> None:
        """Makes the workers."""
        ...

    def submit(self, work: Work) -> None:
        """Queues work; never waits (the flow control of the queues bounds it)."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers, each after what it is doing."""
        ...

    def inside(self) -> bool:
        """Tells whether the caller is one of the workers."""
        ...


class Caller:
    """Calls the callback with what a work holds, and traces it."""

    def __init__(self, callback: Callback, *, batch: bool, group: str, client_id: str) -> None:
        self.callback = callback
        self.batch = batch
        self._group = group
        self._client_id = client_id

    def call(self, work: Work) -> None:
        """For threads: walks through the work."""
        began = monotonic()
        try:
            if self.batch:
                self._call_batch(work)
            elif work.index is None:
                self._call_each(work)
            else:
                self._call_aside(work, work.index)
        finally:
            work.seconds = monotonic() - began

    def _call_batch(self, work: Work) -> None:
        messages = list(work.chunk.messages)
        try:
            with self._span(messages, work):
                self.callback(messages)
        except BaseException as error:
            work.failures.append((None, error))
        else:
            work.chunk.finish_next(len(messages))

    def _call_each(self, work: Work) -> None:
        chunk, queue, callback = work.chunk, work.queue, self.callback
        traced = tracing.enabled()
        for message in chunk.messages[chunk.position :]:
            if queue.dropped:
                return
            try:
                if traced:
                    with self._span([message], work):
                        callback(message)
                else:
                    callback(message)
            except BaseException as error:
                work.failures.append((chunk.set_aside(), error))
            else:
                chunk.finish_next()

    def _call_aside(self, work: Work, index: int) -> None:
        message = work.chunk.messages[index]
        try:
            with self._span([message], work):
                self.callback(message)
        except BaseException as error:
            work.failures.append((index, error))
        else:
            work.chunk.finish_aside(index)

    async def call_async(self, work: Work) -> None:
        """For tasks: the same, awaiting each call."""
        began = monotonic()
        chunk = work.chunk
        if self.batch:
            todo: list[tuple[int | None, Any]] = [(None, list(chunk.messages))]
        elif work.index is None:
            todo = list[tuple[int | None, Any]](enumerate(chunk.messages))[chunk.position :]
        else:
            todo = [(work.index, chunk.messages[work.index])]
        for index, item in todo:
            if work.queue.dropped:
                break
            try:
                with self._span(item if self.batch else [item], work):
                    await self.callback(item)
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
                self._failed(work, index, error)
            except Exception as error:
                self._failed(work, index, error)
            else:
                self._finished(work, index)
        work.seconds = monotonic() - began

    def _failed(self, work: Work, index: int | None, error: BaseException) -> None:
        if index is not None and work.index is None:
            work.chunk.set_aside()
        work.failures.append((index, error))

    def _finished(self, work: Work, index: int | None) -> None:
        if index is None:
            work.chunk.finish_next(len(work.chunk.messages))
        elif work.index is None:
            work.chunk.finish_next()
        else:
            work.chunk.finish_aside(index)

    def _span(self, messages: list[Message], work: Work) -> Any:
        return tracing.process(
            messages, group=self._group, client_id=self._client_id, attempt=work.attempt
        )


class ThreadWorkers:
    """Threads "duemq-consumer-N" on one SimpleQueue."""

    def __init__(self, caller: Caller, count: int, ended: Callable[[Work], None]) -> None:
        self._caller = caller
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._todo: SimpleQueue[Work | None] = SimpleQueue()
        self._reports: deque[Work] = deque()
        self._reporting = False  # a call of _report is on its way to the loop
        self._threads = [
            threading.Thread(target=self._run, name=f"duemq-consumer-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        """Queues work."""
        self._todo.put(work)

    async def stop(self, timeout_s: float) -> None:
        """Threads in a callback that does not return are left behind; they are daemons."""
        for _ in self._threads:
            self._todo.put(None)
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(0.0, deadline - monotonic()))

    def inside(self) -> bool:
        """Tells whether the caller is one of the threads."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work.running = True
            if not work.queue.dropped:
                self._caller.call(work)
            self._reports.append(work)
            if not self._reporting:
                self._reporting = True
                try:
                    self._loop.call_soon_threadsafe(self._report)
                except RuntimeError:  # the loop is closed: nobody is interested any more
                    return

    def _report(self) -> None:
        self._reporting = False  # before the deque is emptied, so that no report is left in it
        while self._reports:
            self._ended(self._reports.popleft())


class TaskWorkers:
    """Tasks on one asyncio queue, for callbacks that are coroutine functions."""

    def __init__(self, caller: Caller, count: int, ended: Callable[[Work], None]) -> None:
        self._caller = caller
        self._count = count
        self._ended = ended
        self._todo: asyncio.Queue[Work | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the tasks."""
        self._tasks = [
            asyncio.create_task(self._run(), name=f"duemq-consumer-{number}")
            for number in range(self._count)
        ]

    def submit(self, work: Work) -> None:
        """Queues work."""
        self._todo.put_nowait(work)

    async def stop(self, timeout_s: float) -> None:
        """Cancels callbacks that do not return in time."""
        for _ in self._tasks:
            self._todo.put_nowait(None)
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def inside(self) -> bool:
        """Tells whether the caller is one of the tasks."""
        try:
            return asyncio.current_task() in self._tasks
        except RuntimeError:  # no loop runs in this thread
            return False

    async def _run(self) -> None:
        while (work := await self._todo.get()) is not None:
            work.running = True
            if not work.queue.dropped:
                await self._caller.call_async(work)
            self._ended(work)


def is_async(callback: Callback) -> bool:
    """Tells whether a callback is to be awaited."""
    return iscoroutinefunction(callback) or iscoroutinefunction(type(callback).__call__)
