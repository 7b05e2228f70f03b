"""`python -m timer_service`: wires one timer shard together and runs it until SIGTERM."""

import sys
from collections.abc import Sequence
from functools import partial

from duemq.rpc import server as rpc
from duemq.rpc import settings as rpc_settings
from duemq.rpc.logging import configure
from timer_service import heap
from timer_service.process import TimerService
from timer_service.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a timer shard.  Returns the exit status."""
    heap.bound()
    settings = rpc_settings.load(Settings, argv)
    configure(settings.log_level, settings.log_format, f"timer {settings.name}")
    return rpc.run(partial(TimerService.serve, settings))


if __name__ == "__main__":
    sys.exit(main())
