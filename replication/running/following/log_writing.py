"""The writer threads of a replica's log, tied to the event loop: until it leads, or again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from duemq.errors import Internal
from duemq_server.replication.running.threads import in_thread
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.storage.writer import LogWriter


class LogWriting:
    """See the module.  A service that leads writes its log by itself."""

    def __init__(self, log: ReplicaLog) -> None:
        self.on_durable: Callable[[int], None] = lambda position: None
        """Told in the event loop what is durable; changes with the role."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self._writer = LogWriter(log, self._durable, self._fatal, name="replica-writer")

    def start(self) -> None:
        """Starts the threads."""
        self._writer.start()

    def _durable(self, position: int) -> None:
        self._loop.call_soon_threadsafe(self._tell, position)

    def _tell(self, position: int) -> None:
        self.on_durable(position)

    def _fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.fail, error)

    def fail(self, error: BaseException) -> None:
        """See `failed`; also for who met the failure elsewhere than in the threads."""
        if not self.failed.done():
            self.failed.set_exception(Internal(f"the disk failed: {error}"))

    async def truncate(self, position: int) -> None:
        """See ReplicaLog.truncate.  To its end: whoever leads next begins where the log ends."""
        await in_thread(self._writer.truncate, position)

    async def stop(self) -> None:
        """Writes and syncs what waits, ends the threads."""
        await asyncio.to_thread(self._writer.stop)
        await asyncio.sleep(0)  # what the threads told is heard
        if not self.failed.done():
            self.failed.cancel()
