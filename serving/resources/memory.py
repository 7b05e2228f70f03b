"""When a process that has had a burst gives its memory back.

glibc keeps what was freed: a hundred requests of 16 MB that never ended leave more than a gigabyte
behind, and the machine's other processes, or a container's limit, pay for it.  Giving back holds up
who asks for memory meanwhile, so it is done while little is going on.
"""

import asyncio
import ctypes
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

LOOK_S = 2.0
# More than that above the least that the process had is worth a try.
SPARE_BYTES = 64 << 20
# Where a try frees less, the memory is in use: the next one comes after twice the time.
FREED_BYTES_MIN = 16 << 20
RETRY_S_MIN, RETRY_S_MAX = 10.0, 600.0
# Of the time between two looks, by all threads: more is not quiet.
QUIET_CPU = 0.2


class Spare:
    """Says when to try.  Pure."""

    def __init__(self) -> None:
        self._least: int | None = None
        self._cpu_s = self._at_s = 0.0
        self._wait_s = RETRY_S_MIN
        self._not_before_s = 0.0

    def look(self, rss_bytes: int, cpu_s: float, now_s: float) -> bool:
        """Whether to give memory back now.  `cpu_s`: of the process, ever; `now_s`: monotonic."""
        quiet = cpu_s - self._cpu_s <= QUIET_CPU * (now_s - self._at_s)
        self._cpu_s, self._at_s = cpu_s, now_s
        self._least = rss_bytes if self._least is None else min(self._least, rss_bytes)
        return quiet and rss_bytes - self._least > SPARE_BYTES and now_s >= self._not_before_s

    def tried(self, freed_bytes: int, now_s: float) -> None:
        """So much was given back."""
        useless = freed_bytes < FREED_BYTES_MIN
        self._wait_s = min(self._wait_s * 2, RETRY_S_MAX) if useless else RETRY_S_MIN
        self._not_before_s = now_s + self._wait_s


def rss_bytes() -> int:
    """What the process has in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_memory_back() -> None:
    """Returns what is free to the system: after a burst.  Takes up to 0.1 s a GiB."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


async def watch(rss: Callable[[], int] = rss_bytes) -> None:
    """Gives memory back whenever it is time; for ever."""
    spare = Spare()
    while True:
        await asyncio.sleep(LOOK_S)
        before = rss()
        if spare.look(before, time.process_time(), time.monotonic()):
            with suppress(RuntimeError):  # no thread: it is tried again
                await asyncio.to_thread(give_memory_back)
            freed = before - rss()
            spare.tried(freed, time.monotonic())
            log.debug("%d of %d bytes of memory given back", freed, before)
