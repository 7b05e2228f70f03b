"""`python -m timer_service`: runs one timer shard until SIGTERM.

`python -m timer_service set-aside DIRECTORY` accepts the loss of damaged timers (set_aside.py).
"""

import asyncio
import os
import sys
from collections.abc import Sequence

from duemq.errors import DuemqError
from duemq.rpc import process
from storage.dirlock import DirLock
from storage.disk import RealDisk
from storage.errors import StorageError
from timer_service import heap, set_aside
from timer_service.limits import Limits
from timer_service.process import TimerService
from timer_service.settings import Settings
from timer_service.shard import now_ms


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, StorageError, OSError."""
    with DirLock(settings.data_dir):
        await process.live(TimerService(settings), stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a timer shard.  Returns the exit status."""
    heap.bound()
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["set-aside"]:
        return _set_aside(given[1:])
    return process.main("timer", Settings, serve, argv, failures=(StorageError,))


def _set_aside(directories: Sequence[str]) -> int:
    if len(directories) != 1 or not os.path.isdir(directories[0]):
        print("usage: python -m timer_service set-aside DIRECTORY", file=sys.stderr)
        return 2
    [directory] = directories
    try:
        with DirLock(directory):
            for line in set_aside.set_aside(directory, RealDisk(), Limits(), now_ms()):
                print(line)
    except (DuemqError, StorageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
