"""Which queue of %TIMER% delayed messages wait in for the timer service.  Pure.

A queue is fetched in order, so that what is due in a second would wait behind all that came before
it, were it for next month, whenever more is sent than the timer service takes over.  So what is due
soon has queues of its own, the upper half.  Messages for one queue of their topic are all in the
lower half: what is due in the same millisecond is to fire in the order in which it came.
"""

from zlib import crc32

import numpy as np

SOON_MS = 60_000
# What is due within it makes a timer service's fetch answer at once.
AT_ONCE_MS = 250


def ordered(target_queue_id: int, queues: int) -> int:
    """The queue, of so many, of a batch for that queue of its topic."""
    return target_queue_id % max(1, queues // 2)


def unordered(sender: str, queues: int, latest_due_ms: int, now_ms: int) -> int:
    """The queue, of so many, of a batch for any queue, whose last message is due then."""
    later, number = queues // 2, crc32(sender.encode())
    if later and latest_due_ms > now_ms + SOON_MS:
        return number % later
    return later + number % (queues - later)


def at_once(due_ms: bytes, now_ms: int) -> bool:
    """Whether some of these due times, packed i64, are so soon that a fetch is not to linger."""
    return bool(np.frombuffer(due_ms, dtype="<i8").min() <= now_ms + AT_ONCE_MS)
