"""The log's writer threads, tied to the event loop: what is committed is answered and shown.

Committed is what is durable; where the log has replicas, what they have, too.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from duemq.errors import Internal
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.settings import Settings
from duemq_server.broker.store.store import Store
from duemq_server.storage.writer import LogWriter

log = logging.getLogger(__name__)

ASYNC_SYNC_INTERVAL_S = 0.5
# A replay costs about 15 us a frame: so many make a start a second longer.
CHECKPOINT_FRAMES = 50_000


class Replicas(Protocol):
    """Those of the log: they say what is committed."""

    advance: Callable[[int], None]
    """Told what is."""

    def synced(self, position: int) -> None:
        """The log is durable here up to `position`."""
        ...


class LogLoop:
    """See the module."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        meters: Meters,
        settings: Settings,
        replicas: Replicas | None = None,
        *,
        unsynced: bool = False,
    ) -> None:
        """Without `replicas`, what is durable is committed; with `unsynced`, what is written."""
        self._store = store
        self._synced = self._advance
        if replicas is not None:
            replicas.advance = self._advance
            self._synced = replicas.synced
        self._commits = commits
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self.written = asyncio.Event()
        """Set when enough was written for a checkpoint."""
        self._checkpoint_bytes = settings.checkpoint_bytes
        self._checkpoint_at = (commits.position, store.frames_in)
        self._writer = LogWriter(
            store.log,
            self._on_durable,
            self._on_fatal,
            sync_interval_s=ASYNC_SYNC_INTERVAL_S if unsynced else None,
            on_disk_full=self._on_disk_full,
            on_commit=meters.committed,
        )

    def start(self) -> None:
        """Starts the writer."""
        self._writer.start()

    def _on_durable(self, position: int) -> None:
        self._loop.call_soon_threadsafe(self._synced, position)

    def _on_disk_full(self, _full: bool) -> None:
        self._loop.call_soon_threadsafe(self._space_changed)

    def _space_changed(self) -> None:
        self._commits.look_again()
        self._store.on_report()

    def _on_fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _advance(self, position: int) -> None:
        if self.failed.done():
            return
        # Answers first: they are short, and the producers make the next frames meanwhile.  Who
        # waits is only woken in here, and finds both done.
        self._commits.advance(position)
        try:
            self._store.durable(position)
        except Exception as error:  # half applied: only a new start makes it whole
            log.exception("what is durable could not be shown to consumers")
            self._fail(error)
            return
        bytes_before, frames_before = self._checkpoint_at
        if (
            position - bytes_before >= self._checkpoint_bytes
            or self._store.frames_in - frames_before >= CHECKPOINT_FRAMES
        ):
            self.written.set()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(Internal(f"the disk failed: {error}"))

    def checkpoint_begins(self) -> None:
        """Counts anew from here."""
        self.written.clear()
        self._checkpoint_at = (self._store.log.end_position, self._store.frames_in)

    async def stop(self) -> bool:
        """Syncs what is left and ends the threads; whether the disk was sound to the end."""
        await asyncio.to_thread(self._writer.stop)
        if not self.failed.done():
            self._synced(self._store.log.durable_position)
        if not self.failed.done():
            self.failed.cancel()
            return True
        if not self.failed.cancelled():
            self.failed.exception()  # it is why the process stops, or came after that
        return False
