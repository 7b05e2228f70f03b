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


class Commits:
    """Calls back by log position, in the order in which it was asked to."""

    def __init__(self, position: int) -> None:
        self.position = position
        """Everything before it is durable."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._progress: asyncio.Event | None = None  # while somebody waits for it

    async def wait(self, position: int) -> None:
        """Returns when the log is durable up to `position`."""
        if position <= self.position:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call(position, partial(_resolve, future))
        await future

    def call(self, position: int, callback: Callable[[], None]) -> None:
        """Calls back when the log is durable up to `position`, which it is not yet."""
        self._waiting.append((position, callback))

    def advance(self, position: int) -> None:
        """The log is durable up to `position`."""
        self.position = max(position, self.position)
        # A repeat may wait, behind others, for a position before theirs: it is answered with them.
        while self._waiting and self._waiting[0][0] <= self.position:
            self._waiting.popleft()[1]()
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    async def progress(self) -> None:
        """Returns after the next group commit."""
        if self._progress is None:
            self._progress = asyncio.Event()
        await self._progress.wait()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
