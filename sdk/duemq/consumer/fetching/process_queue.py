"""What a consumer has pulled of one queue and not finished yet.  Pure.

Messages come in `Chunk`s, the unit of dispatch: one worker at a time walks through a chunk in
order and finishes each message or sets it aside, which does not hold up the rest.  The *commit
point* is the smallest unfinished offset, or where the next pull goes on when nothing is unfinished:

    pulled 1001 to 1010      all finished                  → 1011
                             1009 and 1010 unfinished      → 1009
                             1001 unfinished, rest finished → 1001

So a commit never skips a message, and a crash repeats what lies behind the commit point.  Offsets
that the tag filter left out have no message and never hold the commit point back.

Threads.  A worker writes to its `Walk` only; everything else belongs to the consumer's event loop.
Each of a walk's fields is changed by one bytecode, and a message is in `aside` before `next` passes
it, so that no reader ever sees it in neither.  A worker that is stuck in one message is cut off
(`Chunk.cut_off`): the chunk gets a new walk, and whatever the worker still writes to the old one
counts for nothing.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from duemq.consumer.settings import Window
from duemq.errors import InvariantError


class Offered(Protocol):
    """What a chunk asks of a message."""

    @property
    def offset(self) -> int:
        """Its queue offset."""
        ...


M = TypeVar("M", bound=Offered)


class Walk:
    """One worker's way through a chunk."""

    def __init__(self, begin: int = 0, aside: set[int] | None = None) -> None:
        self.next = begin
        """Index of the first message that is not tried; the worker counts on as each is done."""
        self.aside: set[int] = aside or set()
        """Indices of messages that were tried and are not done."""
        self.stopped = False
        """The worker begins no further message.  Set by the event loop."""

    def set_aside(self, count: int) -> int:
        """The next messages are not done, and passed; answers the index of the first."""
        index = self.next
        self.aside.update(range(index, index + count))
        self.next = index + count
        return index


class Chunk(Generic[M]):
    """Consecutive messages of one queue; the unit of dispatch."""

    def __init__(
        self, pending: "ProcessQueue[M]", messages: Sequence[M], next_offset: int, size_bytes: int
    ) -> None:
        self.pending = pending
        self.messages = messages
        self.size_bytes = size_bytes
        self.walk = Walk()
        self._next_offset = next_offset
        self._counted = len(messages)  # as unfinished, in the queue's sum

    @property
    def position(self) -> int:
        """Index of the first message that was not tried yet."""
        return self.walk.next

    def finish_next(self, count: int = 1) -> None:
        """The next messages are done."""
        self.walk.next += count

    def set_aside(self, count: int = 1) -> int:
        """The next messages are to be finished one by one; answers the index of the first."""
        return self.walk.set_aside(count)

    def finish_aside(self, index: int) -> None:
        """A message that was set aside is done."""
        self.walk.aside.discard(index)

    def cut_off(self, index: int, count: int = 1) -> bool:
        """Stops a worker that is busy with these messages; what follows is for another walk.

        True: they are set aside here, and what the worker still does about them goes unseen.
        False: it was done with them just now, and ends before one of the next.
        """
        walk = self.walk
        walk.stopped = True  # before the look: past this message the worker sees it
        if walk.next != index:
            return False
        self.walk = Walk(index + count, walk.aside.union(range(index, index + count)))
        return True

    @property
    def unfinished(self) -> int:
        """How many messages are not done."""
        walk = self.walk
        return len(self.messages) - walk.next + len(walk.aside)

    @property
    def commit_point(self) -> int:
        """The smallest unfinished offset, or the one to go on with after this chunk."""
        walk = self.walk
        position = walk.next  # read first: a message set aside after this is at or past it
        index = min(min(walk.aside, default=position), position)
        return self.messages[index].offset if index < len(self.messages) else self._next_offset


class ProcessQueue(Generic[M]):
    """The unfinished messages of one queue, in order."""

    def __init__(self, start: int) -> None:
        self.pull_offset = start
        """Where the next pull begins."""
        self.dropped = False
        """No more of its messages are begun: see `drop`."""
        self._chunks: deque[Chunk[M]] = deque()
        self._unfinished_messages = 0
        self._unfinished_bytes = 0

    def add(self, messages: Sequence[M], next_offset: int, size_bytes: int) -> Chunk[M]:
        """Takes over pulled messages, in order; `next_offset` is where the queue goes on."""
        if not messages or messages[0].offset < self.pull_offset:
            raise InvariantError("messages are added in order, each once")
        chunk = Chunk(self, messages, next_offset, size_bytes)
        self._chunks.append(chunk)
        self._unfinished_messages += len(messages)
        self._unfinished_bytes += size_bytes
        self.pull_offset = next_offset
        return chunk

    def skip_to(self, next_offset: int) -> None:
        """Nothing for us lies before this offset."""
        self.pull_offset = next_offset

    def drop(self) -> None:
        """Lets go of the queue: workers begin no more of its messages."""
        self.dropped = True
        for chunk in self._chunks:
            chunk.walk.stopped = True

    def settle(self, chunk: Chunk[M]) -> None:
        """Frees the room of what is done in a chunk.  Idempotent."""
        unfinished = chunk.unfinished
        self._unfinished_messages -= chunk._counted - unfinished
        if not unfinished and chunk._counted:
            self._unfinished_bytes -= chunk.size_bytes
        chunk._counted = unfinished
        while self._chunks and not self._chunks[0]._counted:
            self._chunks.popleft()

    @property
    def commit_point(self) -> int:
        """The next offset to consume after a crash now: everything before it is done."""
        for chunk in self._chunks:
            if chunk.unfinished:
                return chunk.commit_point
        return self.pull_offset

    @property
    def unfinished(self) -> int:
        """Messages that are not settled."""
        return self._unfinished_messages

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the chunks that have one."""
        return self._unfinished_bytes

    def has_room(self, window: Window, fill: float = 1.0) -> bool:
        """Tells whether to pull: every figure is below `fill` of the window."""
        return (
            self._unfinished_messages < window.messages * fill
            and self._unfinished_bytes < window.bytes * fill
            and (not self._chunks or self.pull_offset - self.commit_point < window.span)
        )
