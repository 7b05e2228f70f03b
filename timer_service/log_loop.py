"""The timer log's writer threads, tied to the event loop: of what is committed the core is told.

Committed is what is durable; where the log has replicas, what they have, too.  A batch is sent, a
cancel is answered, a broker is told an offset, and a checkpoint is saved, only when that which it
rests on is committed: another leader may never have heard of the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from duemq.errors import DuemqError, Internal, Unavailable
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.writer import Commit, LogWriter
from duemq_server.timer_service.disk.bounded_log import BoundedLog
from duemq_server.timer_service.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class Replicas(Protocol):
    """Those of the log: they say what is committed."""

    advance: Callable[[int], None]
    """Told what is, in the event loop."""

    def synced(self, position: int) -> None:
        """The log is durable here up to `position`."""
        ...


class LogLoop:
    """See the module."""

    def __init__(
        self,
        timer_log: SegmentedLog,
        scheduler: Scheduler,
        on_commit: Callable[[Commit], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """All of `timer_log` is committed.  Without `replicas`, what is durable is."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self.on_sendable: Callable[[str], None] = lambda broker: None
        """Called when there is something new to send to a broker."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called when more of the log is committed: a full one may have room."""
        self._scheduler = scheduler
        self._position = timer_log.durable_position  # that the core was told
        self._progress = asyncio.Event()
        self._over: DuemqError | None = None
        self._ending = False
        self._bounded: BoundedLog | None = None
        self._synced = self._advance
        if replicas is not None:
            scheduler.log = self._bounded = BoundedLog(timer_log, scheduler.limits.uncommitted_max)
            replicas.advance = self._replicas_have
            self._synced = replicas.synced
        self._writer = LogWriter(
            timer_log,
            self._on_durable,
            self._on_fatal,
            on_commit=on_commit,
            name="timerlog-writer",
        )

    def start(self) -> None:
        """Starts the writer."""
        self._writer.start()

    def _on_durable(self, position: int) -> None:
        self._loop.call_soon_threadsafe(self._synced, position)

    def _on_fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.fail, error)

    def _replicas_have(self, position: int) -> None:
        assert self._bounded is not None
        if position > self._position:
            self._bounded.advance(position)
            self._advance(position)

    def _advance(self, position: int) -> None:
        self._position = position
        for broker in self._scheduler.durable(position):
            self.on_sendable(broker)
        self.on_progress()
        self._stir()

    def _stir(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """The shard cannot go on."""
        if not self.failed.done():
            log.critical("the timer shard failed", exc_info=error)
            self.failed.set_exception(Internal(f"the timer shard failed: {error}"))
        self._stir()

    @property
    def position(self) -> int:
        """Up to where the core knows that the log is committed."""
        return self._position

    @property
    def replicated(self) -> bool:
        """Whether others hold the log, too."""
        return self._bounded is not None

    def close(self) -> None:
        """The log of a shard with replicas takes nothing more.  What it holds is committed yet."""
        assert self._bounded is not None
        self._bounded.close()

    def resign(self, error: DuemqError) -> None:
        """As `close`; who waits for more to be committed, or appends, gets `error`."""
        assert self._bounded is not None
        self._over = error
        self._bounded.end(error)
        self._stir()

    async def durable(self, position: int) -> None:
        """Returns when the core knows that the log is committed up to here.

        Raises Internal, and what `resign` was given.
        """
        while self._position < position:
            if self.failed.done():
                self.failed.result()
            if self._over is not None:
                raise self._over
            await self._progress.wait()

    async def progress_or(self, timeout_s: float) -> None:
        """Returns when more of the log is committed, or after a while.

        Raises Internal when the shard has failed, Unavailable when it stops: no room will come.
        """
        if self.failed.done():
            self.failed.result()
        if self._ending:
            raise Unavailable("this timer service stops")
        progress = self._progress
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await progress.wait()

    def end_waits(self) -> None:
        """The shard stops: who waits for room in a full log gets Unavailable."""
        self._ending = True
        self._stir()

    async def stop(self) -> None:
        """Syncs what is left and ends the threads."""
        await asyncio.to_thread(self._writer.stop)
