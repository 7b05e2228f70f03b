"""Cancels as they come: many callers, of one handle or ten thousand, and other timers meanwhile.

Owned by the event loop.  Handles are decided on together (cancelling.py), a slice at a time, with a
pause behind each or some, so that nothing else waits for long:

    asked ──► in memory? ──► answered
                 no ──► look-up, in the thread `timer-look-up` ──► in memory or there? ──► answered

Who asks while a slice is decided shares the next one, and what is asked for while a look-up runs
shares the next: the busier, the cheaper each handle.  A look-up of many is cheaper than many, and
threads that work at the same time take the interpreter from each other: so a look-up begins when
nothing is left to decide on, or enough wait for it.  Look-ups have a thread of their own, so that a
flush holds none up.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from duemq.errors import DuemqError, Unavailable
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.far.look_up import Query
from duemq_server.timer_service.scheduling.cancelling import NOT_YET, Cancelling, source_of
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

SLICE = 500  # handles decided on at once: some 2 ms of work
WORK_S = 0.002  # on slices, then a pause: other threads get the interpreter
SPACING_S = 0.001  # how long it is
LOOK_UP_SLICES = 20  # enough for a look-up though others are still decided on: the longest list
PAUSE_S = 0.0001


def _pause() -> None:
    """The look-up's thread lets the event loop have the interpreter at once, not in 0.5 ms."""
    time.sleep(PAUSE_S)


class Decided(NamedTuple):
    """Outcomes, to be told when the log is durable up to `end`."""

    outcomes: list[str | DuemqError]
    end: int


class _Slice:
    """Handles of one caller or several."""

    def __init__(self) -> None:
        self._parts: list[Sequence[Cancelled]] = []
        self._count = 0
        self.callers: list[tuple[asyncio.Future[Decided], int, int]] = []
        self.cancelling: Cancelling | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, handles: Sequence[Cancelled], caller: asyncio.Future[Decided]) -> None:
        start, self._count = self._count, self._count + len(handles)
        self._parts.append(handles)
        self.callers.append((caller, start, self._count))

    def join(self, other: _Slice) -> None:
        """Takes over the callers of another slice that waits for a look-up, too."""
        assert self.cancelling is not None
        assert other.cancelling is not None
        first = self.cancelling.join(other.cancelling)
        self._count = first + len(other)
        for caller, start, end in other.callers:
            self.callers.append((caller, first + start, first + end))

    def decide(self, scheduler: Scheduler, now_ms: int) -> bool:
        """False: a look-up is needed.  Raises LogFull, DiskFull."""
        if self.cancelling is None:
            handles = list(itertools.chain.from_iterable(self._parts))
            self.cancelling = Cancelling(scheduler, handles)
        return self.cancelling.advance(now_ms)

    def tell(self) -> None:
        """Answers the callers all of whose handles are decided."""
        assert self.cancelling is not None
        left = []
        for caller, start, end in self.callers:
            outcomes = self.cancelling.outcomes(start, end)
            if outcomes is None:
                left.append((caller, start, end))
            elif not caller.done():
                caller.set_result(Decided(outcomes, self.cancelling.end))
        self.callers = left

    def fail(self, error: Exception) -> None:
        for caller, _, _ in self.callers:
            if not caller.done():
                caller.set_exception(error)


class Cancels:
    """Everything that is asked and not yet decided."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], int], room: Callable[[], Awaitable[None]]
    ) -> None:
        """`room` is called while the log is full: it returns when there may be some.

        It raises what whoever asked shall be told if there will be none.
        """
        self._scheduler = scheduler
        self._clock = clock
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timer-look-up")
        self._new: deque[_Slice] = deque()
        self._sought: deque[_Slice] = deque()
        self._found: deque[tuple[_Slice, Query]] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrived = asyncio.Event()

    def arrived(self) -> None:
        """Timers came: who waits for some looks again."""
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def cancel(self, handles: Sequence[Cancelled], timeout_s: float) -> Decided:
        """As `decide`; waits for timers that have not arrived.  NOT_YET: nor did it in time."""
        deadline = self._loop.time() + timeout_s
        outcomes, end = await self.decide(handles)
        while waiting := [at for at, outcome in enumerate(outcomes) if outcome == NOT_YET]:
            arrived = await self._arrival(handles, waiting, deadline)
            if not arrived:
                break
            decided = await self.decide([handles[at] for at in arrived])
            end = max(end, decided.end)
            for at, outcome in zip(arrived, decided.outcomes, strict=True):
                outcomes[at] = outcome
        return Decided(outcomes, end)

    async def _arrival(
        self, handles: Sequence[Cancelled], waiting: Sequence[int], deadline: float
    ) -> list[int]:
        """Waits until some of the timers arrived; those.  Empty: none did until the deadline."""
        first: dict[SourceId, Cancelled] = {}
        for at in waiting:
            handle = handles[at]
            if handle.offset < first.setdefault(handle.source, handle).offset:
                first[handle.source] = handle
        scheduler = self._scheduler
        try:
            async with asyncio.timeout_at(deadline):
                while all(source_of(scheduler, handle) is None for handle in first.values()):
                    await self._arrived.wait()
        except TimeoutError:
            return []
        return [at for at in waiting if source_of(scheduler, handles[at]) is not None]

    async def decide(self, handles: Sequence[Cancelled]) -> Decided:
        """Cancels what is pending of these."""
        callers = []
        for start in range(0, len(handles), SLICE):
            part = handles[start : start + SLICE]
            if not self._new or len(self._new[-1]) + len(part) > SLICE:
                self._new.append(_Slice())
            callers.append(self._loop.create_future())
            self._new[-1].add(part, callers[-1])
        self._ensure("decide", self._decide)
        decided: list[Decided] = await asyncio.gather(*callers)
        outcomes = [outcome for each in decided for outcome in each.outcomes]
        return Decided(outcomes, max((each.end for each in decided), default=0))

    async def stop(self) -> None:
        """Nobody may ask any more."""
        while self._tasks:  # one starts the other
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    def _ensure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Starts the work, unless it is under way."""
        if name in self._tasks:
            return

        async def run() -> None:
            try:
                await work()
            finally:
                del self._tasks[name]

        self._tasks[name] = asyncio.create_task(run(), name=f"cancels: {name}")

    async def _decide(self) -> None:
        """What was looked up goes first: its callers have waited longer."""
        rested_s = time.perf_counter()
        while self._found or self._new:
            if self._found:
                each, query = self._found.popleft()
                assert each.cancelling is not None
                each.cancelling.answered(query)
            else:
                each = self._new.popleft()
            await self._step(each)
            if len(self._sought) >= LOOK_UP_SLICES or (self._sought and not self._new):
                self._ensure("look up", self._look_up)
            if (self._found or self._new) and time.perf_counter() >= rested_s + WORK_S:
                await asyncio.sleep(SPACING_S)
                rested_s = time.perf_counter()
            else:
                await asyncio.sleep(0)

    async def _look_up(self) -> None:
        segments, numbers = self._scheduler.segments, self._scheduler.numbers
        while self._sought:
            slices, self._sought = self._sought, deque()
            asked: list[tuple[_Slice, Query]] = []
            for each in slices:
                assert each.cancelling is not None
                asked.append((each, each.cancelling.query()))
                await asyncio.sleep(0)
            look_up = segments.look_up([query for _, query in asked], numbers.find_source)
            try:
                await self._loop.run_in_executor(self._thread, look_up.run, _pause)
            except Exception as error:
                # Too many open files, say.
                told = Unavailable(str(error)) if isinstance(error, DiskFull) else error
                for each in slices:
                    each.fail(told)
                continue
            segments.looked_up(look_up)
            self._found += asked
            self._ensure("decide", self._decide)

    async def _decided(self, each: _Slice) -> bool:
        while True:
            try:
                return each.decide(self._scheduler, self._clock())
            except (LogFull, DiskFull):
                await self._room()

    async def _step(self, each: _Slice) -> None:
        try:
            decided = await self._decided(each)
        except Exception as error:
            each.fail(error)
            return
        each.tell()
        if decided:
            return
        if self._sought and len(self._sought[-1]) + len(each) <= SLICE:
            self._sought[-1].join(each)
        else:
            self._sought.append(each)
