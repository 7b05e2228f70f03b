"""`duemq-broker`: runs one broker until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from duemq_server.broker.process import Broker
from duemq_server.broker.settings import Settings
from duemq_server.serving import process
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.errors import StorageError


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, StorageError, OSError."""
    with DirLock(settings.data_dir):
        await process.live(Broker(settings), stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a broker.  Returns the exit status."""
    return process.main("broker", Settings, serve, argv, failures=(StorageError,))


if __name__ == "__main__":
    sys.exit(main())
