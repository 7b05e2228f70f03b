"""The C library's heap, kept small.

A shard moves a lot of memory through three threads: frames, memtables, blocks.  glibc gives each
thread an arena of its own and keeps what is freed there: 130 MB after a million timers that need
20.  Two arenas and a trim when there is nothing else to do make it 85, at no cost in CPU.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
ARENAS = 2


def bound() -> None:
    """Bounds the number of arenas; for the start of the process, before there are threads."""
    _call("mallopt", _M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Lets the C library return what is free to the operating system.  Takes some milliseconds."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # not glibc: nothing to bound
        return
    function(*arguments)
