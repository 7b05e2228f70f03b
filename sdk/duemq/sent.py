"""What is known of a message that was sent: on its way, and stored.  Views of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import current_thread, main_thread
from typing import Protocol, Self

__all__ = ["PendingSend", "Receipt"]

log = logging.getLogger("duemq.producer")


class _Batch(Protocol):
    """What is seen here of producing.batch.Batch."""

    topic: str
    broker: str
    queue_id: int
    base_offset: int
    store_ms: int
    done: bool

    @property
    def timed(self) -> bool: ...
    def message_id(self, index: int) -> str: ...
    def place_of(self, index: int) -> int: ...
    def handle_of(self, index: int) -> str: ...
    def due_ms_of(self, index: int) -> int: ...
    def replaced_of(self, index: int) -> str | None: ...
    def tell(self, first: int, count: int = 1) -> None: ...
    def check_callback(self, callback: object) -> None: ...
    def on_done(self, wake: Callable[[], None]) -> bool: ...


class Receipt:
    """A message is stored, durably.  Equal to another of the same message.

    A message without due time: `queue`, `offset`.  A delayed one: `handle`, `due_ms`; with a timer
    key, `replaced` if there was something to replace.  The others of these are None.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Batch, index: int) -> None:
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
        """The broker that stored it; of a message with a timer key the timer shard."""
        return self._batch.broker

    @property
    def queue(self) -> int | None:
        """The number of its queue."""
        return None if self._batch.timed else self._batch.queue_id

    @property
    def offset(self) -> int | None:
        """Its place in the queue."""
        batch = self._batch
        return None if batch.timed else batch.base_offset + batch.place_of(self._index)

    @property
    def store_ms(self) -> int:
        """When it was stored there, ms since the epoch, by the clock there."""
        return self._batch.store_ms

    @property
    def handle(self) -> str | None:
        """What `cancel` takes."""
        return self._batch.handle_of(self._index) if self._batch.timed else None

    @property
    def due_ms(self) -> int | None:
        """When it will be delivered, ms since the epoch, as the broker resolved it."""
        return self._batch.due_ms_of(self._index) if self._batch.timed else None

    @property
    def replaced(self) -> str | None:
        """The handle of what waited under the message's timer key and is never delivered."""
        return self._batch.replaced_of(self._index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Receipt):
            return NotImplemented
        return self.message_id == other.message_id

    def __hash__(self) -> int:
        return hash(self.message_id)

    def __repr__(self) -> str:
        where = (
            f"due_ms={self.due_ms} handle={self.handle}"
            if self._batch.timed
            else f"{self.broker}/{self.queue}@{self.offset}"
        )
        return f"<Receipt {self.message_id} {self.topic} {where}>"


class PendingSend:
    """A message on its way."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Batch, index: int) -> None:
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
        must not hold up: no blocking call of a client in it.  What it raises is logged.  Raises
        InvalidArgument for a coroutine function: nobody would await it.
        """
        self._batch.check_callback(callback)
        self._batch.tell(self._index)
        once = [callback]

        def tell() -> None:
            with suppress(IndexError):
                call("the callback of a receipt failed", once.pop(), self)

        if not self._batch.on_done(tell):
            tell()


def call(failed: str, callback: Callable[..., object], *given: object) -> None:
    """What the application's callback raises is logged, as `failed`."""
    try:
        callback(*given)
    except BaseException as error:  # would end the producer's event loop, or part of it
        if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
            raise
        log.exception(failed)
