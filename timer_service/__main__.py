"""`duemq-timer-service`: runs one timer shard until SIGTERM.

`duemq-timer-service set-aside [--last-copy] DIRECTORY` accepts the loss of damaged timers
(set_aside.py); of a replica only if it is the last one.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

from duemq.errors import DuemqError
from duemq_server.replication import disk_id
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import StorageError
from duemq_server.storage.replicas import is_replicas
from duemq_server.timer_service import malloc
from duemq_server.timer_service.disk import set_aside
from duemq_server.timer_service.process import TimerService
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.timers.limits import Limits

LAST_COPY = "--last-copy"


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, StorageError, OSError."""
    with process.holding(DirLock(settings.data_dir)):
        await process.live(_process(settings), stop)


def _process(settings: Settings) -> process.Process:
    if not settings.replicated:
        disk_id.check_none(settings.data_dir)
        return TimerService(settings)
    # Who has no replicas does not load what they need.
    from duemq_server.replication.running.process import Replica
    from duemq_server.timer_service.replica import TimerReplica

    return Replica(settings, TimerReplica(settings))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a timer shard.  Returns the exit status."""
    malloc.bound()
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["set-aside"]:
        return _set_aside(given[1:])
    return process.main("timer", Settings, serve, argv, failures=(StorageError,))


def _set_aside(arguments: Sequence[str]) -> int:
    last_copy = arguments[:1] == [LAST_COPY]
    directories = arguments[1:] if last_copy else arguments
    if len(directories) != 1 or directories[0].startswith("-"):
        print(f"usage: duemq-timer-service set-aside [{LAST_COPY}] DIRECTORY", file=sys.stderr)
        return 2
    [directory] = directories
    if not os.path.isdir(directory):
        print(f"error: {directory} is not a directory", file=sys.stderr)
        return 2
    if is_replicas(directory) and not last_copy:
        print(
            f"error: {directory} is a replica's: empty it, and it gets everything from the one that"
            f" leads. What is given up in it may be missed once it leads: {LAST_COPY} in front of"
            " it does that, for when no other replica has it, or there are none any more",
            file=sys.stderr,
        )
        return 2
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
