"""Has a state follow what is committed, in a thread, and saves it now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec

from duemq_server.replication.running.state import ReplicaState
from duemq_server.serving.clock import steady_ms
from duemq_server.storage.errors import DiskFull

log = logging.getLogger(__name__)

ENTRIES_MAX = 2_000
"""Of one call: some 30 ms of a thread beside the event loop."""
CHECKPOINT_S = 10.0
DROP_S = 60.0
FULL_S = 1.0
"""Until a full disk is tried again."""

P = ParamSpec("P")


class Applying:
    """See the module.  Used from one event loop; nobody else calls the state meanwhile."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._goal = state.applied
        self._log_start = 0
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        self._waits = False  # for space, which is told once
        self.lock = asyncio.Lock()
        """Held while a thread is in the state."""

    def advance(self, committed: int, log_start: int = 0) -> None:
        """So much is committed and on this disk; the leader's log begins there."""
        self._log_start = max(self._log_start, log_start)
        self._goal = max(self._goal, committed)
        if self._state.applied < self._goal:
            self._news.set()

    async def run(self) -> None:
        """For ever.  Raises what the state raises: half applied, it needs a new start."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._state.applied < self._goal and await self._apply_some():
                self._moved.set()

    async def _apply_some(self) -> bool:
        """Whether to go on: not if nothing more takes effect, before `advance` tells of more.

        Part of an entry never does, nor what is not durable here.
        """
        before = self._state.applied
        try:
            async with self.lock:
                await asyncio.to_thread(self._state.apply, self._goal, ENTRIES_MAX)
        except DiskFull as error:
            if not self._waits:
                log.error("what is followed waits for space: %s", error)
            self._waits = True
            await asyncio.sleep(FULL_S)
            return True
        self._waits = False
        return self._state.applied > before

    async def alone(self, do: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Has a thread do something with the state; to its end, also if the caller is cancelled."""
        await asyncio.shield(asyncio.create_task(self._alone(do, *args, **named)))

    async def _alone(self, do: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        async with self.lock:
            await asyncio.to_thread(do, *args, **named)

    async def reach(self, position: int) -> None:
        """Returns when everything before `position` has taken effect."""
        while self._state.applied < position:
            self._moved.clear()
            await self._moved.wait()

    async def keep(self) -> None:
        """Saves the state, drops what nobody keeps; for ever."""
        dropped_ms = steady_ms()
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            try:
                async with self.lock:  # also in silence: it may be time for one by now
                    await asyncio.to_thread(self._state.checkpoint)
            except DiskFull as error:  # what goes may make room for it
                log.error("no checkpoint of what is followed: %s", error)
            if steady_ms() - dropped_ms >= DROP_S * 1000:
                dropped_ms = steady_ms()
                await self._drop()

    async def _drop(self) -> None:
        async with self.lock:
            try:
                await asyncio.to_thread(self._state.drop_before, self._log_start)
            except DiskFull as error:
                log.error("what the leader keeps no more stays for now: %s", error)
