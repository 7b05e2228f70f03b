"""`duemq-broker`: runs one broker until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from duemq_server.broker.process import Broker
from duemq_server.broker.settings import Settings
from duemq_server.replication import disk_id
from duemq_server.serving import process
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.errors import StorageError


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, StorageError, OSError."""
    with process.holding(DirLock(settings.data_dir)):
        await process.live(_process(settings), stop)


def _process(settings: Settings) -> process.Process:
    if not settings.replicated:
        disk_id.check_none(settings.data_dir)
        return Broker(settings)
    # Who has no replicas does not load what they need.
    from duemq_server.broker.replica import BrokerReplica
    from duemq_server.replication.running.process import Replica

    return Replica(settings, BrokerReplica(settings))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a broker.  Returns the exit status."""
    return process.main("broker", Settings, serve, argv, failures=(StorageError,))


if __name__ == "__main__":
    sys.exit(main())
