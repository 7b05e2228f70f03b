"""What every child of an embedded cluster runs first.

`python -m duemq_server.local_cluster.child [--log FILE] MODULE …`

With `--log`, where FILE is its standard error, it keeps that bounded (log_files.py).

It ties the child's life to its parent's, then becomes `python -m MODULE …`.  The parent holds the
other end of the child's standard input and never writes: end of file means that the parent is
gone, however it died.  (Linux' PR_SET_PDEATHSIG would do less: it fires when the *thread* that
forked ends, and gives no time to drain.)
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import sys
import threading
import time

from duemq_server.entry import end_on_sigterm
from duemq_server.local_cluster import log_files

# How long an orphan may drain before it is ended for good.
ORPHAN_GRACE_S = 10.0
# How often the size of the log is looked at.
LOOK_S = 5.0


def _follow_parent(log: str | None) -> None:
    while not select.select([0], [], [], LOOK_S if log else None)[0] or os.read(0, 1):
        if log:
            with contextlib.suppress(OSError):  # a full disk, say: it grows on, and is tried again
                log_files.turn_over(log, sys.stderr.fileno())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> None:
    """Runs the module named first on the command line with the arguments after it."""
    end_on_sigterm()
    log = sys.argv[2] if sys.argv[1] == "--log" else None
    sys.argv = sys.argv[3 if log else 1 :]
    module = sys.argv[0]
    watch = threading.Thread(target=_follow_parent, args=(log,), name="parent-watch", daemon=True)
    watch.start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
