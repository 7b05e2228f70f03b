"""Reads for pulls: on the event loop what is in memory, in threads what is not."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from duemq.errors import Corrupt, OffsetOutOfRange, Unavailable
from duemq_server.broker.store.queues import Queue
from duemq_server.storage.errors import DiskFull, StorageError

log = logging.getLogger(__name__)

READER_THREADS = 4

T = TypeVar("T")


class DiskReads:
    """Owned by: the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READER_THREADS, "disk-reader")
        self._closed = False

    async def read(self, read: Callable[..., T], queue: Queue, offset: int) -> T:
        """What `read` answers; with `nowait` it raises BlockingIOError where it would wait.

        `queue`, `offset`: where it begins.  Raises OffsetOutOfRange where retention was faster,
        Corrupt, and Unavailable after `close` or while too many files are open.
        """
        try:
            try:
                return read(nowait=True)
            except BlockingIOError:
                if self._closed:
                    raise stopping() from None
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, read)
        except (StorageError, OSError, IndexError) as error:
            gone = isinstance(error, IndexError | FileNotFoundError)
            # Retention, and who deletes or purges, says so before it removes anything.  Of all else
            # a consumer must not hear this: it would begin anew, where it is.
            if gone and (queue.dropped or queue.min_offset > offset):
                message = f"offset: just removed ({error})"
                raise OffsetOutOfRange(message, field="offset") from error
            log.error("a read failed: %s", error)
            if isinstance(error, DiskFull):  # too many open files
                raise Unavailable(str(error)) from error
            raise Corrupt(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """The threads take nothing more; what they read their callers get."""
        self._closed = True
        self._threads.shutdown(wait=False)


def stopping() -> Unavailable:
    """What clients are told when the broker stops."""
    return Unavailable("the broker is stopping")
