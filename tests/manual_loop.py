"""An event loop whose time is a number: it passes only when everybody sleeps, and then at once.

So a test sees for how long a program sleeps, and what wakes it, without waiting for anything:

    with ManualLoop(start_ms) as loop:
        loop.run_until_complete(main())

`loop.wall_ms` is the clock on the wall: loop time plus what `set_clock` has put it off by.  A
program that nothing will ever wake ends with `AsleepForEverError`.  Threads are not seen: give what
is tested stand-ins that work at once.
"""

from __future__ import annotations

import asyncio
import selectors
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any


class AsleepForEverError(Exception):
    """Every task waits, and no timer is set."""


class _Selector(selectors.DefaultSelector):
    loop: ManualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise AsleepForEverError
        if not events and timeout:
            self.loop.passed_s += timeout
        return events


class ManualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, start_ms: int) -> None:
        self.start_ms = start_ms
        self.passed_s = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def __enter__(self) -> ManualLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_until_complete(asyncio.sleep(0))
        self.close()

    def time(self) -> float:
        """Monotonic."""
        return self.passed_s

    @property
    def wall_s(self) -> float:
        """Unix time."""
        return self.start_ms / 1000 + self.passed_s

    @property
    def wall_ms(self) -> int:
        """Unix time."""
        return self.start_ms + int(self.passed_s * 1000 + 0.001)

    async def silence(self, seconds: float) -> None:
        """Time passes."""
        await asyncio.sleep(seconds)

    def set_clock(self, by_ms: int) -> None:
        """Somebody sets the clock on the wall."""
        self.start_ms += by_ms


class AtOnce(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
