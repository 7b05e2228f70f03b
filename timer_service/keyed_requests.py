"""Requests about timers under keys, as they come: many callers, and other timers meanwhile.

Owned by the event loop.  A request is decided at once if what waits under its keys is known
(scheduling/keyed/changes.py), or else after a look-up in the thread `timer-key-look-up`:

    asked ──► others have its keys? ── yes ──► behind them
                 no ──► advance ──► decided ──► answered
                          │  ▲
                          └──┴── look-up, of all that wait for one

Requests for a key are decided in the order in which they came: one that waits for a look-up holds
up those behind it for the same keys, and no others.  What comes again while it is decided shares
the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from duemq.errors import Overloaded, Unavailable
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.far.key_look_up import HandleAsk, KeyAsk
from duemq_server.timer_service.scheduling.keyed.changes import KeyedChange
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.keyed_entry import NO_REQUEST, RequestKey

SLICE = 250  # timers decided on before others have a turn: some 3 ms of work
SPACING_S = 0.001
LOOK_UP_REQUESTS = 500  # enough for a look-up though others are still decided on
OPEN_MAX = 10_000  # requests that wait to be decided
PAUSE_S = 0.0001


def _pause() -> None:
    """The look-up's thread lets the event loop have the interpreter at once, not in 0.5 ms."""
    time.sleep(PAUSE_S)


class _Asked:
    """A request, and who waits for it."""

    def __init__(self, change: KeyedChange, done: asyncio.Future[None]) -> None:
        self.change = change
        self.done = done


class KeyedRequests:
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timer-key-look-up")
        self._last: dict[TimerKey, asyncio.Future[None]] = {}  # who has a key, or will, last
        self._under_way: dict[RequestKey, _Asked] = {}
        self._open = 0
        self._ready: deque[_Asked] = deque()
        self._sought: list[_Asked] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def decide(self, change: KeyedChange) -> KeyedChange:
        """The request once it is decided; or the one like it that came before.

        Raises what `KeyedChange.advance` does, and Overloaded; not LogFull or DiskFull: it waits.
        """
        named = change.request.id != NO_REQUEST
        asked = self._under_way.get(change.request) if named else None
        if asked is None:
            if self._open >= OPEN_MAX:
                raise Overloaded(
                    f"{OPEN_MAX} requests about timer keys wait to be decided", limit=OPEN_MAX
                )
            asked = _Asked(change, self._loop.create_future())
            if named:
                self._under_way[change.request] = asked
            self._begin(asked)
        await asyncio.shield(asked.done)
        return asked.change

    def _begin(self, asked: _Asked) -> None:
        """It is ready when those before it, for any of its keys, are done."""
        before = {self._last[key] for key in asked.change.keys if key in self._last}
        self._last.update(dict.fromkeys(asked.change.keys, asked.done))
        self._open += 1
        asked.done.add_done_callback(lambda _: self._end(asked))
        if not before:
            self._is_ready(asked)
            return
        left = len(before)

        def one_less(_: asyncio.Future[None]) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._is_ready(asked)

        for each in before:
            each.add_done_callback(one_less)

    def _end(self, asked: _Asked) -> None:
        asked.done.exception()  # seen, also if the caller has gone
        self._open -= 1
        for key in asked.change.keys:
            if self._last.get(key) is asked.done:
                del self._last[key]
        if self._under_way.get(asked.change.request) is asked:
            del self._under_way[asked.change.request]

    def _is_ready(self, asked: _Asked) -> None:
        self._ready.append(asked)
        self._ensure("decide", self._decide)

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

        self._tasks[name] = asyncio.create_task(run(), name=f"keyed requests: {name}")

    async def _decide(self) -> None:
        left = SLICE
        while self._ready:
            asked = self._ready.popleft()
            await self._step(asked)
            left -= max(asked.change.size, 1)
            if len(self._sought) >= LOOK_UP_REQUESTS or (self._sought and not self._ready):
                self._ensure("look up", self._look_up)
            if left <= 0:
                left = SLICE
                await asyncio.sleep(SPACING_S if self._ready else 0)

    async def _step(self, asked: _Asked) -> None:
        try:
            decided = await self._advanced(asked.change)
        except Exception as error:
            asked.done.set_exception(error)
            return
        if decided:
            asked.done.set_result(None)
        else:
            self._sought.append(asked)

    async def _advanced(self, change: KeyedChange) -> bool:
        while True:
            try:
                return change.advance(self._clock())
            except (LogFull, DiskFull):
                await self._room()

    async def _look_up(self) -> None:
        segments, numbers = self._scheduler.segments, self._scheduler.numbers
        while self._sought:
            sought, self._sought = self._sought, []
            keys, handles = _asks([asked.change for asked in sought])
            look_up = segments.key_look_up(keys, handles, numbers.find_source)
            try:
                await self._loop.run_in_executor(self._thread, look_up.run, _pause)
            except Exception as error:
                # Too many open files, say.
                told = Unavailable(str(error)) if isinstance(error, DiskFull) else error
                for asked in sought:
                    asked.done.set_exception(told)
                continue
            segments.keys_looked_up(look_up)
            for asked in sought:
                asked.change.answered()
            self._ready.extend(sought)
            self._ensure("decide", self._decide)


def _asks(changes: Sequence[KeyedChange]) -> tuple[list[KeyAsk], list[HandleAsk]]:
    asks = [change.asks() for change in changes]
    return [ask for keys, _ in asks for ask in keys], [ask for _, found in asks for ask in found]
