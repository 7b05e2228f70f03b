"""Who waits for the log to be durable.

Owned by: the event loop.  The writer thread reports positions through `call_soon_threadsafe`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

# The reader of a stream holds back while this much waits for the disk; a slow disk then slows its
# clients down and is not answered with errors.
PENDING_BYTES_HIGH = 32 << 20
# A unary call waits this long for room before it is answered OVERLOADED.
ROOM_TIMEOUT_S = 5.0
# So many who have left are not worth a look at all the others.
LEFT_MIN = 256


class Waiting:
    """Who is called back, unless it `leave`s."""

    __slots__ = ("callback", "position")

    def __init__(self, position: int, callback: Callable[[], None]) -> None:
        self.position = position
        self.callback: Callable[[], None] | None = callback


class Commits:
    """Calls back by log position, in the order in which it was asked to."""

    def __init__(self, position: int) -> None:
        self.position = position
        """Everything before it is durable."""
        self._waiting: deque[Waiting] = deque()
        self._left = 0  # of those, who has left
        self._progress: asyncio.Event | None = None  # while somebody waits for it

    async def wait(self, position: int) -> None:
        """Returns when the log is durable up to `position`."""
        if position <= self.position:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self.call(position, partial(_resolve, future))
        try:
            await future
        except asyncio.CancelledError:
            self.leave(waiting)
            raise

    def call(self, position: int, callback: Callable[[], None]) -> Waiting:
        """Calls back when the log is durable up to `position`, which it is not yet."""
        waiting = Waiting(position, callback)
        self._waiting.append(waiting)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """It is not called back any more.

        While nothing is committed, whoever gave up comes again and again.
        """
        if waiting.callback is None:
            return
        waiting.callback = None
        self._left += 1
        if self._left >= LEFT_MIN and 2 * self._left > len(self._waiting):
            self._waiting = deque(each for each in self._waiting if each.callback is not None)
            self._left = 0

    def advance(self, position: int) -> None:
        """The log is durable up to `position`."""
        self.position = max(position, self.position)
        # A repeat may wait, behind others, for a position before theirs: it is answered with them.
        while self._waiting and self._waiting[0].position <= self.position:
            self._call(self._waiting.popleft())
        self.look_again()

    def look_again(self) -> None:
        """Who waits for progress asks once more whether it has to."""
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _call(self, waiting: Waiting) -> None:
        callback, waiting.callback = waiting.callback, None
        if callback is None:
            self._left -= 1
        else:
            callback()

    async def progress(self) -> None:
        """Returns after the next group commit, or when nothing is committed for want of space."""
        if self._progress is None:
            self._progress = asyncio.Event()
        await self._progress.wait()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
