"""gRPC does not survive a fork.

Its threads are not in the child, whatever the parent had closed before: a call there waits for ever
(gRPC 1.85 with asyncio; its own fork handlers crash or skip).  So a child is told at once.
"""

import os

from duemq.errors import Closed

REMEDY = "fork before the first client, or start processes by spawn"

_first_in: list[int] = []
"""The process in which gRPC's event loop was first needed."""


def enter() -> None:
    """The caller is about to use gRPC in an event loop.

    Raises Closed in a process that was forked from one that had done so.
    """
    if not _first_in:
        _first_in.append(os.getpid())
    elif _first_in[0] != os.getpid():
        raise Closed(f"this process was forked after its parent had clients: {REMEDY}")
