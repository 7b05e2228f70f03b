"""The timer log's writer threads, tied to the event loop: of what is durable the core is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from duemq.errors import Internal
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.writer import Commit, LogWriter
from duemq_server.timer_service.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class LogLoop:
    """See the module."""

    def __init__(
        self,
        timer_log: SegmentedLog,
        scheduler: Scheduler,
        on_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self.on_sendable: Callable[[str], None] = lambda broker: None
        """Called when there is something new to send to a broker."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called when more of the log is durable: a full one may have room."""
        self._log = timer_log
        self._scheduler = scheduler
        self._durable_position = timer_log.durable_position  # that the core was told
        self._progress = asyncio.Event()
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
        self._loop.call_soon_threadsafe(self._advance, position)

    def _on_fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.fail, error)

    def _advance(self, position: int) -> None:
        self._durable_position = position
        for broker in self._scheduler.durable(position):
            self.on_sendable(broker)
        self.on_progress()
        self._progress.set()
        self._progress = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """The shard cannot go on."""
        if not self.failed.done():
            log.critical("the timer shard failed", exc_info=error)
            self.failed.set_exception(Internal(f"the timer shard failed: {error}"))
        self._progress.set()

    async def durable(self, position: int) -> None:
        """Returns when the core knows that the log is durable up to here.  Raises Internal."""
        while self._durable_position < position:
            if self.failed.done():
                self.failed.result()
            await self._progress.wait()

    async def progress_or(self, timeout_s: float) -> None:
        """Returns when more of the log is durable, or after a while."""
        progress = self._progress
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await progress.wait()

    async def stop(self) -> None:
        """Syncs what is left and ends the threads."""
        await asyncio.to_thread(self._writer.stop)
