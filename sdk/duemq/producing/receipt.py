"""What a producer answers: a receipt a message, a view of the batch that carried it."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from duemq.errors import DuemqError, InvariantError, NotAllSent, Timeout

if TYPE_CHECKING:
    from duemq.producing.batch import Batch

__all__ = ["AwaitableReceipt", "PendingReceipt", "Receipt", "Receipts"]

log = logging.getLogger("duemq.producer")

T = TypeVar("T")


class Receipt:
    """A message is stored, durably.

    A message without due time: `queue`, `offset`.  A delayed one: `handle`, `due_ms`.  The others
    of these are None.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        """Made by producers."""
        self._batch = batch
        self._index = index

    @property
    def message_id(self) -> str:
        """Unique."""
        return self._batch.message_id(self._index)

    @property
    def topic(self) -> str:
        """Where it was sent."""
        return self._batch.topic

    @property
    def broker(self) -> str:
        """The broker that stored it."""
        return self._batch.broker

    @property
    def queue(self) -> int | None:
        """The number of its queue."""
        return None if self._batch.timed else self._batch.queue_id

    @property
    def offset(self) -> int | None:
        """Its place in the queue."""
        return None if self._batch.timed else self._batch.base_offset + self._index

    @property
    def store_ms(self) -> int:
        """When the broker stored it, ms since the epoch, by the broker's clock."""
        return self._batch.store_ms

    @property
    def handle(self) -> str | None:
        """What `cancel` takes."""
        return self._batch.handle_of(self._index) if self._batch.timed else None

    @property
    def due_ms(self) -> int | None:
        """When it will be delivered, ms since the epoch, as the broker resolved it."""
        return self._batch.due_ms_of(self._index) if self._batch.timed else None

    def __repr__(self) -> str:
        where = (
            f"due_ms={self.due_ms} handle={self.handle}"
            if self._batch.timed
            else f"{self.broker}/{self.queue}@{self.offset}"
        )
        return f"<Receipt {self.message_id} {self.topic} {where}>"


class _Pending:
    """A message on its way."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        """Made by producers."""
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """It is stored, or has failed: its result is there."""
        return self._batch.done

    @property
    def message_id(self) -> str:
        """Unique; known before the message is stored."""
        return self._batch.message_id(self._index)

    @property
    def topic(self) -> str:
        """Where it was sent."""
        return self._batch.topic

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Calls `callback` with this receipt once it is done; at once, and here, if it is.

        Else in the producer's event loop (of a blocking producer: the thread "duemq-io"), which it
        must not hold up: no blocking call of a client in it.  What it raises is logged.
        """
        self._batch.tell(self._index)
        once = [callback]

        def call() -> None:
            with suppress(IndexError):
                _call(once.pop(), self)

        if not self._batch.on_done(call):
            call()


class PendingReceipt(_Pending):
    """A message on its way (synchronous clients)."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Receipt:
        """Waits until the message is stored, `timeout` seconds at most.

        Raises the DuemqError that the sending ended with, or Timeout when the wait was over first:
        the message is still on its way then, until the producer's send timeout.
        """
        if not self._batch.done:
            self._batch.tell(self._index)
            wait(self._batch, timeout)
        return receipt(self._batch, self._index)


class AwaitableReceipt(_Pending):
    """A message on its way (asyncio): `await` it for its Receipt, or the error."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self._batch.done:
            self._batch.tell(self._index)
            yield from self._batch.until_done().__await__()
        return receipt(self._batch, self._index)


class Receipts(Sequence[Receipt]):
    """Of many messages, in the order they were given; made as they are asked for.

    The receipt of a message that was not stored raises that message's error.
    """

    def __init__(self, pieces: Sequence[tuple[Batch, int, int]]) -> None:
        """Made by producers.  `pieces`: (batch, first index, count)."""
        self._pieces = pieces
        self._ends = list(accumulate(count for _, _, count in pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Receipt]: ...
    def __getitem__(self, index: int | slice) -> Receipt | Sequence[Receipt]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"receipt {index} of {len(self)}")
        piece = bisect_right(self._ends, position)
        batch, first, count = self._pieces[piece]
        return receipt(batch, first + position - (self._ends[piece] - count))

    def __iter__(self) -> Iterator[Receipt]:
        for batch, first, count in self._pieces:
            for index in range(first, first + count):
                yield receipt(batch, index)

    def failures(self) -> dict[int, DuemqError]:
        """The messages that were not stored: position → error."""
        failed: dict[int, DuemqError] = {}
        position = 0
        for batch, _, count in self._pieces:
            if batch.error is not None:
                failed.update(dict.fromkeys(range(position, position + count), batch.error))
            position += count
        return failed

    def checked(self) -> Receipts:
        """Itself, if all were stored.  Raises NotAllSent otherwise."""
        if all(batch.error is None for batch, _, _ in self._pieces):
            return self
        failures = self.failures()
        first = min(failures)
        raise NotAllSent(
            f"{len(failures)} of {len(self)} messages not stored; the first is number {first}: "
            f"{failures[first]}",
            receipts=self,
            failures=failures,
        ) from failures[first]


def receipt(batch: Batch, index: int) -> Receipt:
    """Of a batch that is done.  Raises its error."""
    error = batch.error
    if error is not None:
        batch.tell(index)
        # A copy: one batch's error is raised for many messages, with a traceback each.
        raise _copied(error) from error
    if not batch.done:
        raise InvariantError("a receipt of a batch that is not done")
    return Receipt(batch, index)


def _copied(error: DuemqError) -> DuemqError:
    copy = type(error)(error.message)
    copy.__dict__.update(error.__dict__)
    return copy


def _call(callback: Callable[[T], object], pending: T) -> None:
    try:
        callback(pending)
    except Exception:
        log.exception("the callback of a receipt failed")


def wait(batch: Batch, timeout_s: float | None) -> None:
    """Blocks until the batch is done.  Raises Timeout.  Not in the event loop's thread."""
    gate = threading.Lock()  # guards nothing: released once by the event loop
    gate.acquire()
    if batch.on_done(gate.release) and not gate.acquire(
        timeout=-1 if timeout_s is None else max(0.0, timeout_s)
    ):
        raise Timeout(f"no answer within {timeout_s} s yet", limit=timeout_s or 0)
