"""What a producer answers: a receipt a message, now or to come."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

from duemq.errors import DuemqError, InvariantError, NotAllSent, Timeout
from duemq.sent import PendingSend, Receipt
from duemq.transport.loop_thread import refuse_inside, shut_gate

if TYPE_CHECKING:
    from duemq.producing.batch import Batch

__all__ = ["AwaitableReceipt", "PendingReceipt", "Receipts"]


class PendingReceipt(PendingSend):
    """A message on its way (synchronous clients)."""

    __slots__ = ()
    _batch: Batch

    def result(self, timeout: float | None = None) -> Receipt:
        """Waits until the message is stored, `timeout` seconds at most.

        Raises the DuemqError that the sending ended with, or Timeout when the wait was over first:
        the message is still on its way then, until the producer's send timeout.
        """
        batch, index = self._batch, self._index
        if not batch.done:
            batch.tell(index)
            try:
                wait(batch, timeout)
            except Timeout:
                batch.untell(index)
                if not batch.done:
                    raise
        return receipt(batch, index)


class AwaitableReceipt(PendingSend):
    """A message on its way (asyncio): `await` it for its Receipt, or the error."""

    __slots__ = ()
    _batch: Batch

    def __await__(self) -> Generator[Any, None, Receipt]:
        batch, index = self._batch, self._index
        if not batch.done:
            batch.tell(index)
            try:
                yield from until_done(batch).__await__()
            except asyncio.CancelledError:
                batch.untell(index)
                if not batch.done or batch.error_of(index) is None:
                    raise  # else nobody was told of that
        return receipt(batch, index)


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
        for batch, first, count in self._pieces:
            if batch.error is not None:
                errors = [batch.error_of(index) for index in range(first, first + count)]
                failed |= {position + at: error for at, error in enumerate(errors) if error}
            position += count
        return failed

    def checked(self) -> Receipts:
        """Itself, if all were stored.  Raises NotAllSent otherwise."""
        if all(batch.error is None for batch, _, _ in self._pieces):
            return self
        failures = self.failures()
        if not failures:  # others' messages of these batches failed
            return self
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
    if error is not None and (error := batch.error_of(index)) is not None:
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


def wait(batch: Batch, timeout_s: float | None) -> None:
    """Blocks until the batch is done.  Raises Timeout; RuntimeError in the event loop's thread."""
    refuse_inside()
    gate = shut_gate()
    if batch.on_done(gate.release) and not gate.acquire(
        timeout=-1 if timeout_s is None else max(0.0, timeout_s)
    ):
        raise Timeout(f"no answer within {timeout_s} s yet", limit=timeout_s or 0)


async def until_done(batch: Batch) -> None:
    """Returns when the batch is stored or given up; also in another thread's loop."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    waiter: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake() -> None:
        if threading.get_ident() == thread:
            end()
        else:
            with suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end)

    if batch.on_done(wake):
        await waiter
