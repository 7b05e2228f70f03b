"""The command `duemq`.

`commands/` has one file a noun: they read arguments, ask the SDK and print; they compute nothing.
`app` holds the root and turns errors into exit codes, `output` prints for people or as JSON Lines,
`session` holds the options that every command has, `plugins` finds commands of other distributions.
"""

from __future__ import annotations

import os
import signal
import time

__version__ = "0.1.0"


began_s: float | None = None
"""When the process began, in time.monotonic's seconds; None: it is another program's."""


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    global began_s
    began_s = time.monotonic()
    # Until commands take it over: an exception might be lost in what is being imported.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Of a connection that fails gRPC would print a line at each attempt, before we say why it does.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from duemq_cli import streams
    from duemq_cli.app import cli

    streams.write_all()
    cli()
