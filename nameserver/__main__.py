"""`duemq-nameserver`: runs one nameserver until SIGTERM."""

import asyncio
import sys
from collections.abc import Sequence

from duemq_server.nameserver.process import Nameserver
from duemq_server.nameserver.settings import Settings
from duemq_server.serving import process


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set.  Raises DuemqError, OSError."""
    await process.live(Nameserver(settings), stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a nameserver.  Returns the exit status."""
    return process.main("nameserver", Settings, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
