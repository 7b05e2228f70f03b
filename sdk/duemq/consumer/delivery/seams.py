"""The seam between a member's queues and its callback.

group_share.py owns the queues and asks one `Dispatcher` to run the callback over what it pulled:
`concurrent.ConcurrentDispatcher`, or `in_place.InPlaceDispatcher` with `order=`.  Both finish
messages in the queue's ProcessQueue (from which group_share.py commits) and give what failed for
good to one `Settler`.  Everything here is called in the consumer's event loop, but for
`in_callback`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypedDict

from duemq.consumer.delivery.failure_log import FailureLog
from duemq.consumer.delivery.workers import (
    Callback,
    Calls,
    Pool,
    T,
    TaskWorkers,
    ThreadWorkers,
    is_async,
)
from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.settings import ConsumerSettings
from duemq.message import Message
from duemq.outcomes import Outcome

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine as a task that ends with the consumer."""

Progressed = Callable[[Source], None]
"""To be called whenever messages of a queue were finished: there may be room for a pull."""


class Settler(Protocol):
    """Gives messages back to the broker that they were pulled from."""

    async def send_back(
        self, source: Source, message: Message, outcome: Outcome, deliveries: int
    ) -> bool:
        """True: it is stored, for its retry or as a dead letter, and settled: finish it.

        False (logged): the broker did not take it, within SEND_BACK_TIMEOUT_S; it is still ours,
        unless `source.pending.dropped`.  `deliveries`: how often the group was given it by now.
        Many calls at a time share requests.
        """
        ...


class DispatchOptions(TypedDict):
    """What every dispatcher is given."""

    batch: bool
    settings: ConsumerSettings
    settler: Settler
    progressed: Progressed
    spawn: Spawn
    group: str
    client_id: str


class Dispatcher(ABC, Generic[T]):
    """Runs the callback over what was pulled."""

    def __init__(
        self,
        callback: Callback,
        *,
        batch: bool,
        settings: ConsumerSettings,
        settler: Settler,
        progressed: Progressed,
        spawn: Spawn,
        group: str = "",
        client_id: str = "",
    ) -> None:
        self._batch = batch
        self._settings = settings
        self._settler = settler
        self._progressed = progressed
        self._spawn = spawn
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._failure_log = FailureLog()
        caller = self._caller(callback, client_id)
        pool = TaskWorkers[T] if is_async(callback) else ThreadWorkers[T]
        self._workers: Pool[T] = pool(caller, settings.threads, self._ended)

    @abstractmethod
    def _caller(self, callback: Callback, client_id: str) -> Calls[T]:
        """What workers do."""

    @abstractmethod
    def _ended(self, work: T) -> None:
        """A worker has ended it."""

    def start(self) -> None:
        """Starts the workers."""
        self._workers.start()

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Ends the workers after what they are doing; what they have not begun stays undone."""

    def in_callback(self) -> bool:
        """Tells whether the caller is one of the workers.  From any thread."""
        return self._workers.inside()

    @abstractmethod
    def dispatch(
        self, source: Source, messages: Sequence[Message], next_offset: int, size_bytes: int
    ) -> None:
        """Takes messages of one queue over: adds them to `source.pending`, has them processed."""

    @abstractmethod
    async def quiet(self, source: Source) -> None:
        """Returns when no callback and no send-back of a dropped queue is under way.

        After this its offsets are committed, and others may get the queue.
        """
