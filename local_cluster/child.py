"""What every child of an embedded cluster runs first.

`python -m duemq_server.local_cluster.child MODULE …`

It ties the child's life to its parent's, then becomes `python -m MODULE …`.  The parent holds the
other end of the child's standard input and never writes: end of file means that the parent is
gone, however it died.  (Linux' PR_SET_PDEATHSIG would do less: it fires when the *thread* that
forked ends, and gives no time to drain.)
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

from duemq_server.entry import end_on_sigterm

# How long an orphan may drain before it is ended for good.
ORPHAN_GRACE_S = 10.0


def _follow_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> None:
    """Runs the module named first on the command line with the arguments after it."""
    end_on_sigterm()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    threading.Thread(target=_follow_parent, name="parent-watch", daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
