"""Who calls the application: a pool of threads, or of tasks for coroutine functions.

Workers take much at once (chunk_work.py, ordered_runs.py): a hand-over between threads costs about
as much as a hundred trivial callbacks.  `running` is set before `dropped` is looked at: whoever
drops a queue and then finds nothing of it running knows that no callback runs or will.
"""

import asyncio
import itertools
import logging
import threading
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


class Pool(Protocol[T]):
    """Runs work; reports each one's end in the event loop."""

    def start(self) -> None:
        """Makes the workers."""
        ...

    def submit(self, work: T) -> None:
        """Queues work; never waits (the flow control of the queues bounds it)."""
        ...

    def busy(self) -> list[T]:
        """What the workers have in hand now, also those that were given up."""
        ...

    def replace(self, work: T) -> None:
        """The worker that has this in hand is given up; another takes its place.

        At most as many as there are workers: beyond that there is one less until it returns.
        """
        ...

    async def stop(self, timeout_s: float) -> None:
        """Ends the workers, each after what it is doing."""
        ...

    def inside(self) -> bool:
        """Tells whether the caller is one of the workers.  From any thread."""
        ...


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

    __slots__ = ("given_up", "work", "worker")

    def __init__(self) -> None:
        self.worker: Any = None
        self.work: T | None = None
        self.given_up = False
        """It has been replaced, and ends when its work does."""


class _Hands(Generic[T]):
    """The workers of a pool: which are busy, which were replaced."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.all: list[_Hand[T]] = [_Hand() for _ in range(count)]
        """Changed in the event loop; replaced as a whole, so that any thread may look."""

    @property
    def good(self) -> list[_Hand[T]]:
        """Those that go on working."""
        return [hand for hand in self.all if not hand.given_up]

    def busy(self) -> list[T]:
        """What is in hand."""
        return [work for hand in self.all if (work := hand.work) is not None]

    def replace(self, work: T) -> tuple[_Hand[T], _Hand[T]] | None:
        """Answers the hand that has this work, given up, and a new one; None: too many already."""
        living = [hand for hand in self.all if _alive(hand)]
        held = next((hand for hand in living if hand.work is work), None)
        if held is None or len(living) >= 2 * self._count:
            return None
        held.given_up = True
        fresh: _Hand[T] = _Hand()
        self.all = [*living, fresh]
        return held, fresh


def _alive(hand: _Hand[Any]) -> bool:
    return hand.worker is None or not hand.given_up or _runs(hand.worker)


def _runs(worker: Any) -> bool:
    if isinstance(worker, threading.Thread):
        return worker.is_alive()
    return worker is not None and not worker.done()


class ThreadWorkers(Generic[T]):
    """Threads "duemq-consumer-N" on one SimpleQueue."""

    def __init__(self, caller: Calls[T], count: int, ended: Callable[[T], None]) -> None:
        self._caller = caller
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._todo: SimpleQueue[T | None] = SimpleQueue()
        self._reports: deque[T] = deque()
        self._reporting = False  # a call of _report is on its way to the loop
        self._hands: _Hands[T] = _Hands(count)
        self._made = 0

    def start(self) -> None:
        """Starts the threads."""
        for hand in self._hands.all:
            self._start(hand)

    def _start(self, hand: _Hand[T]) -> None:
        name = f"duemq-consumer-{self._made}"
        self._made += 1
        hand.worker = threading.Thread(target=self._run, args=(hand,), name=name, daemon=True)
        hand.worker.start()

    def submit(self, work: T) -> None:
        """Queues work."""
        self._todo.put(work)

    def busy(self) -> list[T]:
        """What the threads have in hand."""
        return self._hands.busy()

    def replace(self, work: T) -> None:
        """Starts another thread; the one that has this work ends with it."""
        replaced = self._hands.replace(work)
        if replaced is None:
            log.error("too many callbacks do not return: a thread less until one does")
            return
        self._start(replaced[1])

    async def stop(self, timeout_s: float) -> None:
        """Threads in a callback that does not return are left behind; they are daemons."""
        for _ in self._hands.all:  # also one that was given up as it just became free
            self._todo.put(None)
        threads = [hand.worker for hand in self._hands.good if _runs(hand.worker)]
        deadline = monotonic() + timeout_s
        for thread in threads:
            await asyncio.to_thread(thread.join, max(0.0, deadline - monotonic()))

    def inside(self) -> bool:
        """Tells whether the caller is one of the threads."""
        return any(hand.worker is threading.current_thread() for hand in self._hands.all)

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


class TaskWorkers(Generic[T]):
    """Tasks on one asyncio queue, for callbacks that are coroutine functions.

    A task that is cancelled ends, and another takes its place: it may have been the callback.
    The task that starts it is none of theirs: where the whole loop is cancelled, nothing begins.
    """

    def __init__(self, caller: Calls[T], count: int, ended: Callable[[T], None]) -> None:
        self._caller = caller
        self._ended = ended
        self._todo: asyncio.Queue[T | None] = asyncio.Queue()
        self._hands: _Hands[T] = _Hands(count)
        self._idle: asyncio.Queue[_Hand[T]] = asyncio.Queue()  # without a task
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the tasks."""
        for hand in self._hands.all:
            self._idle.put_nowait(hand)
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        for made in itertools.count():
            hand = await self._idle.get()
            if (work := hand.work) is not None:
                hand.work = None
                self._ended(work)
            hand.worker = asyncio.create_task(self._run(hand), name=f"duemq-consumer-{made}")

    def submit(self, work: T) -> None:
        """Queues work."""
        self._todo.put_nowait(work)

    def busy(self) -> list[T]:
        """What the tasks have in hand."""
        return self._hands.busy()

    def replace(self, work: T) -> None:
        """Cancels the task that has this work, and starts another."""
        replaced = self._hands.replace(work)
        if replaced is None:
            log.error("too many callbacks do not end: a task less until one does")
            return
        given_up, fresh = replaced
        given_up.worker.cancel()
        self._idle.put_nowait(fresh)

    async def stop(self, timeout_s: float) -> None:
        """Cancels callbacks that do not return in time."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        hands = self._hands.all
        tasks = [self._keeper, *(hand.worker for hand in hands if hand.worker is not None)]
        for _ in hands:
            self._todo.put_nowait(None)
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)

    def inside(self) -> bool:
        """Tells whether the caller is one of the tasks."""
        try:
            current = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            return False
        return current is not None and any(hand.worker is current for hand in self._hands.all)

    async def _run(self, hand: _Hand[T]) -> None:
        try:
            while not hand.given_up and (work := await self._todo.get()) is not None:
                hand.work = work
                work.running = True
                if not work.pending.dropped:
                    await self._caller.call_async(work)
                if task_cancelled():
                    raise asyncio.CancelledError
                hand.work = None
                self._ended(work)
        except asyncio.CancelledError:
            if not hand.given_up:
                self._idle.put_nowait(hand)
            raise


def task_cancelled() -> bool:
    """The task that runs this was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_async(callback: Callback) -> bool:
    """Tells whether a callback is to be awaited."""
    return iscoroutinefunction(callback) or iscoroutinefunction(type(callback).__call__)
