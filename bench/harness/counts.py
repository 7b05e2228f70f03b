"""What the members of a benchmark's group received, shared with the benchmark by a mapped file.

A member's file: how many came; how often each number came; when it came last; from which queue.
It outlives a member that is killed, up to the last message.
"""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

from duemq import Message
from duemq.transport.closing import Closing
from duemq_server.bench.harness.arrivals import number_of

_TOTAL_BYTES, _TIME_BYTES, _QUEUE_BYTES = 8, 8, 4
SEEN_MAX = 255


def queue_code(broker: str, queue: int) -> int:
    """A queue of a topic as a number that all processes compute alike."""
    return zlib.crc32(f"{broker}/{queue}".encode())


class Tally(Closing):
    """One member's; written by one thread of it, read by the benchmark at any time."""

    def __init__(self, path: Path, count: int) -> None:
        """Makes the file, or maps it if it is there.  `count`: of messages that are to come."""
        size = _TOTAL_BYTES + count * (_TIME_BYTES + _QUEUE_BYTES + 1)
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        view = memoryview(self._map)
        times = _TOTAL_BYTES + count * _TIME_BYTES
        queues = times + count * _QUEUE_BYTES
        self._total = view[:_TOTAL_BYTES].cast("Q")
        self.received_ns = view[_TOTAL_BYTES:times].cast("Q")
        """time.perf_counter_ns() by number; 0: it did not come here."""
        self.queues = view[times:queues].cast("I")
        """`queue_code` by number, where it came."""
        self.seen = view[queues:size]
        """How often, by number."""

    @property
    def total(self) -> int:
        """How many came."""
        return self._total[0]

    def count(self, message: Message) -> None:
        """A callback: counts only."""
        number = number_of(message.body)
        self.seen[number] = min(self.seen[number] + 1, SEEN_MAX)
        self._total[0] += 1

    def note(self, message: Message, now_ns: int) -> None:
        """Counts, and says when and from where."""
        number = number_of(message.body)
        self.received_ns[number] = now_ns
        self.queues[number] = queue_code(message.broker, message.queue)
        self.seen[number] = min(self.seen[number] + 1, SEEN_MAX)
        self._total[0] += 1

    def close(self) -> None:
        """Lets go of the file."""
        for view in (self._total, self.received_ns, self.queues, self.seen):
            view.release()
        self._map.close()
