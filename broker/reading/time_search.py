"""Where in a queue a moment is.  Pure; any thread.

A queue's store times do not go back (Tables stamps them so, unless the clock was set back by more
than ten minutes: what is found then is near such a step), and the consume queue holds them beside
the positions: a binary search of 32-byte entries, without a look at the log.
"""

import logging

from duemq.errors import Corrupt
from duemq_server.broker.store.queues import Queue
from duemq_server.storage.errors import StorageError

_log = logging.getLogger(__name__)


def found_or_corrupt(queue: Queue, at_ms: int) -> int | Corrupt:
    """As `first_stored_since`; what cannot be read of one queue is no error of the others'."""
    try:
        return first_stored_since(queue, at_ms)
    except (StorageError, OSError, IndexError) as error:
        _log.error("%s/%d cannot be searched by time: %s", *queue.key, error)
        return Corrupt(f"{type(error).__name__}: {error}")


def first_stored_since(queue: Queue, at_ms: int) -> int:
    """Offset of the first record stored at `at_ms` or later; `max_offset`: none is yet."""
    while True:
        low = queue.min_offset
        try:
            return _search(queue, low, queue.max_offset, at_ms)
        except (IndexError, FileNotFoundError):
            if queue.dropped:
                return queue.max_offset  # its topic was deleted, as who asks will learn
            if queue.min_offset == low:
                raise
            # Retention has moved the queue's start meanwhile.


def _search(queue: Queue, low: int, high: int, at_ms: int) -> int:
    while low < high:
        middle = (low + high) // 2
        entry = queue.entry_from(middle)
        if entry is not None and entry[5] < at_ms:
            low = middle + 1
        else:
            high = middle
    return low
