"""`python -m timer_service`: runs one timer shard until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from duemq.rpc import process
from storage.dirlock import DirLock
from storage.errors import StorageError
from timer_service import heap
from timer_service.process import TimerService
from timer_service.settings import Settings


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, StorageError, OSError."""
    with DirLock(settings.data_dir):
        await process.live(TimerService(settings), stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a timer shard.  Returns the exit status."""
    heap.bound()
    return process.main("timer", Settings, serve, argv, failures=(StorageError,))


if __name__ == "__main__":
    sys.exit(main())
