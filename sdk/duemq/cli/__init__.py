"""The command `duemq`.  Needs the extra `duemq[cli]`.

One file a noun: `send`, `consume`, `topic`, `group`, `cluster`, `timer`, `trace`, `up`, `bench/`.
They read arguments, ask the SDK and print; they compute nothing.  `app` holds the root and turns
errors into exit codes, `output` prints for people or as JSON Lines, `session` holds the options
that every command has.
"""

from __future__ import annotations

import os
import signal
import sys

from duemq.embedded import safe_path


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    # Until commands take it over: an exception might be lost in what is being imported.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from duemq.cli.app import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"duemq: the command line needs {error.name}: pip install 'duemq[cli]'")
    # For the processes that commands start.
    os.environ.update(safe_path.environment(os.environ))
    cli()
