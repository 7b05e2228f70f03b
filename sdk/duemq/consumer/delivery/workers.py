"""Who calls the application: a pool of threads, or of tasks for coroutine functions.

Workers take much at once (chunk_work.py, ordered_runs.py): a hand-over between threads costs about
as much as a hundred trivial callbacks.  `running` is set before `dropped` is looked at: whoever
drops a queue and then finds nothing of it running knows that no callback runs or will.
"""

import asyncio
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from inspect import iscoroutinefunction
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.message import Message

log = logging.getLogger(__name__)

# For a cancelled callback that does not end at once.
CANCEL_TIMEOUT_S = 1.0
# Between looks at threads that are to end: at interpreter exit none begins to join them.
LOOK_S = 0.001

Callback = Callable[[Any], Any]
# What users give, as type checkers see it; what it returns is awaited, or only seen by `check_ran`.
OnMessage = Callable[[Message], object]
OnMessages = Callable[[list[Message]], object]
OnEither = Callable[[Message | list[Message]], object]


class Task(Protocol):
    """What a pool asks of what it runs."""

    running: bool
    """A worker has it; set by the pool, and never taken back."""

    @property
    def pending(self) -> ProcessQueue[Message]:
        """Where its messages come from; once that is dropped, nothing begins."""
        ...


T = TypeVar("T", bound=Task)
T_contra = TypeVar("T_contra", bound=Task, contravariant=True)


class Calls(Protocol[T_contra]):
    """Does the work."""

    def call(self, work: T_contra) -> None:
        """In a thread.  Raises nothing."""
        ...

    async def call_async(self, work: T_contra) -> None:
        """In a task, and no further once that is cancelled.  Raises nothing."""
        ...


class _Hand(Generic[T]):
    """One worker: what it is doing."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.work: T | None = None
        self.given_up = False
        """It has been replaced, and ends when its work does."""

    @property
    def runs(self) -> bool:
        """Its thread, or task, does."""
        if isinstance(self.worker, threading.Thread):
            return self.worker.is_alive()
        return not self.worker.done()


class Pool(ABC, Generic[T]):
    """Runs work; reports each one's end in the event loop."""

    def __init__(self, caller: Calls[T], count: int, ended: Callable[[T], None]) -> None:
        self._caller = caller
        self._ended = ended
        self._count = count
        # Changed in the event loop; replaced as a whole, so that any thread may look.
        self._hands: list[_Hand[T]] = [_Hand() for _ in range(count)]
        self._made = itertools.count()
        self._todo: Any

    def start(self) -> None:
        """Makes the workers."""
        for hand in self._hands:
            self._start(hand)

    def submit(self, work: T) -> None:
        """Queues work; never waits (the flow control of the queues bounds it)."""
        self._todo.put_nowait(work)

    def busy(self) -> list[T]:
        """What the workers have in hand now, also those that were given up."""
        return [work for hand in self._hands if (work := hand.work) is not None]

    def replace(self, work: T) -> None:
        """The worker that has this in hand is given up; another takes its place.

        At most as many as there are workers: beyond that there is one less until it returns.
        """
        living = [hand for hand in self._hands if not hand.given_up or hand.runs]
        held = next((hand for hand in living if hand.work is work), None)
        if held is None or len(living) >= 2 * self._count:
            log.error("too many callbacks do not return: a worker less until one does")
            return
        held.given_up = True
        fresh: _Hand[T] = _Hand()
        self._hands = [*living, fresh]
        self._give_up(held)
        self._start(fresh)

    @abstractmethod
    def _start(self, hand: _Hand[T]) -> None: ...

    def _give_up(self, hand: _Hand[T]) -> None:
        """A thread cannot be ended."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Ends the workers, each after what it is doing."""

    def inside(self) -> bool:
        """Tells whether the caller is one of the workers.  From any thread."""
        callers = threading.current_thread(), _task()
        return any(hand.worker in callers for hand in self._hands if hand.worker is not None)


class ThreadWorkers(Pool[T]):
    """Threads "duemq-consumer-N" on one SimpleQueue."""

    def __init__(self, caller: Calls[T], count: int, ended: Callable[[T], None]) -> None:
        super().__init__(caller, count, ended)
        self._loop = asyncio.get_running_loop()
        self._todo = SimpleQueue()
        self._reports: deque[T] = deque()
        self._reporting = False  # a call of _report is on its way to the loop

    def _start(self, hand: _Hand[T]) -> None:
        name = f"duemq-consumer-{next(self._made)}"
        hand.worker = threading.Thread(target=self._run, args=(hand,), name=name, daemon=True)
        hand.worker.start()

    async def stop(self, timeout_s: float) -> None:
        """Threads in a callback that does not return are left behind; they are daemons."""
        for _ in self._hands:  # also one that was given up as it just became free
            self._todo.put(None)
        deadline = monotonic() + timeout_s
        while any(not hand.given_up and hand.worker and hand.runs for hand in self._hands):
            if monotonic() >= deadline:
                return
            await asyncio.sleep(LOOK_S)

    def _run(self, hand: _Hand[T]) -> None:
        while not hand.given_up and (work := self._todo.get()) is not None:
            hand.work = work
            work.running = True
            if not work.pending.dropped:
                self._caller.call(work)
            hand.work = None
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


class TaskWorkers(Pool[T]):
    """Tasks on one asyncio queue, for callbacks that are coroutine functions.

    One that is cancelled ends, and the keeper, a task itself, starts another: README.md.
    """

    def __init__(self, caller: Calls[T], count: int, ended: Callable[[T], None]) -> None:
        super().__init__(caller, count, ended)
        self._todo = asyncio.Queue()
        self._idle: asyncio.Queue[_Hand[T]] = asyncio.Queue()  # without a task
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Makes the tasks."""
        super().start()
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            hand = await self._idle.get()
            if (work := hand.work) is not None:
                hand.work = None
                self._ended(work)
            name = f"duemq-consumer-{next(self._made)}"
            hand.worker = asyncio.create_task(self._run(hand), name=name)

    def _start(self, hand: _Hand[T]) -> None:
        self._idle.put_nowait(hand)

    def _give_up(self, hand: _Hand[T]) -> None:
        hand.worker.cancel()

    async def stop(self, timeout_s: float) -> None:
        """Cancels callbacks that do not return in time."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        tasks = [self._keeper, *(each.worker for each in self._hands if each.worker is not None)]
        for _ in self._hands:
            self._todo.put_nowait(None)
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)

    async def _run(self, hand: _Hand[T]) -> None:
        cancelled = cancelling()
        try:
            while not hand.given_up and (work := await self._todo.get()) is not None:
                hand.work = work
                work.running = True
                if not work.pending.dropped:
                    await self._caller.call_async(work)
                if cancelled():
                    raise asyncio.CancelledError
                hand.work = None
                self._ended(work)
        except asyncio.CancelledError:
            if not hand.given_up:
                self._start(hand)
            raise


def cancelling() -> Callable[[], int]:
    """Tells how often the task that runs this was cancelled."""
    task = _task()
    return int if task is None else task.cancelling


def _task() -> asyncio.Task[Any] | None:
    return asyncio.current_task() if asyncio._get_running_loop() else None


def is_async(callback: Callback) -> bool:
    """Tells whether a callback is to be awaited."""
    return iscoroutinefunction(callback) or iscoroutinefunction(type(callback).__call__)
