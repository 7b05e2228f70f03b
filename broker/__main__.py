"""`python -m broker`: wires one broker together and runs it until SIGTERM."""

import sys
from collections.abc import Sequence
from functools import partial

from broker.process import Broker
from broker.settings import Settings
from duemq.rpc import server as rpc
from duemq.rpc import settings as rpc_settings
from duemq.rpc.logging import configure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a broker.  Returns the exit status."""
    settings = rpc_settings.load(Settings, argv)
    configure(settings.log_level, settings.log_format, f"broker {settings.name}")
    return rpc.run(partial(Broker.serve, settings))


if __name__ == "__main__":
    sys.exit(main())
