"""The synchronous admin client: a face of the asyncio one."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from duemq import aio
from duemq.client import Addresses
from duemq.descriptions import (
    ClusterDescription,
    GroupDescription,
    GroupSummary,
    TimerStats,
    TopicDescription,
    TopicSummary,
)
from duemq.errors import Closed
from duemq.loop_thread import LoopThread
from duemq.settings import DEFAULT_NAMESERVER, ClientSettings
from duemq.timers import CancelOutcome

T = TypeVar("T")


class Admin:
    """Topics, groups, timers and the state of the cluster.

    Connects when it is made.  Where brokers have to answer together and one does not in
    `request_timeout_s`, calls raise Unavailable.
    """

    def __init__(
        self,
        nameserver: Addresses = DEFAULT_NAMESERVER,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas.

        Raises Unavailable if none answers in `settings.connect_timeout_s`.
        """
        self._core = aio.Admin(nameserver, settings=settings)
        self._closed = False
        self._closing = threading.Lock()  # guards _closed
        self._thread = LoopThread.acquire()
        try:
            self._thread.run(self._core.start())
        except BaseException:
            self._thread.release()
            raise

    def close(self) -> None:
        """Ends the connections.  Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._thread.foreign:
            return
        try:
            self._thread.run(self._core.close())
        finally:
            self._thread.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def create_topic(
        self, name: str, *, queues: int = 0, message_bytes_max: int = 0
    ) -> TopicSummary:
        """Makes a topic on every live broker and waits until it can be used.

        `queues`: on each broker; 0: the broker's default.  `message_bytes_max`: of a body; 0: the
        broker's.  Raises InvalidArgument, TopicExists if no broker lacks it.
        """
        return self._run(
            self._core.create_topic(name, queues=queues, message_bytes_max=message_bytes_max)
        )

    def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.  Raises TopicNotFound."""
        self._run(self._core.delete_topic(name))

    def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself."""
        return self._run(self._core.topics(system=system))

    def describe_topic(self, name: str) -> TopicDescription:
        """A topic, queue by queue.  Raises TopicNotFound."""
        return self._run(self._core.describe_topic(name))

    def groups(self) -> list[GroupSummary]:
        """All consumer groups with members or offsets, sorted by name."""
        return self._run(self._core.groups())

    def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.  Raises GroupNotFound."""
        return self._run(self._core.describe_group(name))

    def cluster(self) -> ClusterDescription:
        """What runs.  Who does not answer is listed with the error."""
        return self._run(self._core.cluster())

    def timer_stats(self) -> list[TimerStats]:
        """The timer shards, sorted.  One that does not answer is listed with the error."""
        return self._run(self._core.timer_stats())

    @overload
    def cancel(self, handle: str) -> CancelOutcome: ...
    @overload
    def cancel(self, handle: list[str] | tuple[str, ...]) -> list[CancelOutcome]: ...
    def cancel(
        self, handle: str | list[str] | tuple[str, ...]
    ) -> CancelOutcome | list[CancelOutcome]:
        """Cancels delayed messages.  As `duemq.Producer.cancel`."""
        if isinstance(handle, str):
            return self._run(self._core.cancel(handle))
        return self._run(self._core.cancel(handle))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise Closed("the admin client is closed")
        return self._thread.run(coroutine)
