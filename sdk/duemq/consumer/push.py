"""The asyncio push consumer: its life.  What it consumes is share.py's."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from duemq.balance import MessageQueue, strategy_named
from duemq.client import Addresses, Client
from duemq.consumer.settings import ConsumerSettings, StartFrom
from duemq.consumer.share import Share
from duemq.consumer.subscription import Topics, subscriptions_of
from duemq.consumer.workers import Callback
from duemq.errors import Closed, Rejected, Timeout
from duemq.rpc.streams import first_of
from duemq.settings import DEFAULT_NAMESERVER

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0


class PushConsumer:
    """Receives a group's messages and calls `callback` with each, or with lists of them.

    Members of one group share the queues of its topics; every group receives everything.  At least
    once: what was not committed when a consumer died comes again.  A callback that raises is called
    again with the same message, after a backoff, without holding up others; nothing is skipped.
    """

    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: Callback,
        *,
        batch: bool = False,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses = DEFAULT_NAMESERVER,
        settings: ConsumerSettings | None = None,
    ) -> None:
        """`topics`: a name, several, or {name: filter} with filters like "a || b".

        A coroutine function as callback is awaited in the loop, any other runs in threads; up to
        `threads` at a time.  `batch`: it gets lists of one queue's messages.  `start_from`: where
        the group begins in queues that it has no offset for.  Both override `settings`.  Raises
        InvalidArgument.
        """
        self.group = group
        self.settings = (settings or ConsumerSettings()).changed(
            start_from=start_from, threads=threads
        )
        strategy_named(self.settings.strategy)
        self._filters = subscriptions_of(topics)
        self._callback = callback
        self._batch = batch
        self._client = Client(nameserver)
        self._share: Share | None = None
        self._member: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None  # not None: started
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Joins the group; returns when the group has answered.

        Raises Unavailable or Timeout when it cannot be reached in time, Rejected when it refuses.
        """
        if self._ended is not None:
            raise Closed("a consumer is started once")
        ended = self._ended = asyncio.get_running_loop().create_future()
        await self._client.start()
        share = self._share = Share(
            self._client,
            self._callback,
            self.settings,
            self._spawn,
            group=self.group,
            filters=self._filters,
            batch=self._batch,
        )
        share.dispatcher.start()
        self._member = self._spawn(self._stay_member(share, ended))
        self._spawn(share.commit_often())
        limit_s = self.settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await first_of(share.joined.wait(), _outcome(ended))
        except TimeoutError:
            await self.close()
            raise Timeout(
                f"group {self.group} could not be joined in {limit_s:g} s", limit=limit_s
            ) from None
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Starts, if need be, and consumes until closed.  Raises what ended the membership."""
        if self._ended is None:
            await self.start()
        assert self._ended is not None
        await _outcome(self._ended)

    async def close(self) -> None:
        """Stops, waits for running callbacks, commits, leaves the group.  Idempotent.

        From within the callback it only begins to: `run` returns when all is done.
        """
        self.begin_close()
        if self._closing is not None and not self.in_callback():
            await asyncio.shield(self._closing)

    def begin_close(self) -> None:
        """Starts to close, in the loop; `run` returns when all is done."""
        if self._ended is not None and self._closing is None:
            self._closing = asyncio.create_task(self._close(self._ended))

    def in_callback(self) -> bool:
        """Tells whether the caller is this consumer's callback, which `close` would wait for."""
        return self._share is not None and self._share.dispatcher.in_callback()

    async def __aenter__(self) -> "PushConsumer":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now."""
        return self._share.queues if self._share is not None else frozenset()

    async def _stay_member(self, share: Share, ended: asyncio.Future[None]) -> None:
        try:
            await share.membership.run()
        except Rejected as error:
            log.error("group %s: no longer consuming: %s", self.group, error)
            share.drop_all()
            if not ended.done():
                ended.set_exception(error)

    async def _close(self, ended: asyncio.Future[None]) -> None:
        try:
            if self._share is not None and self._member is not None:
                await self._share.close()
                await self._share.membership.leave()
                await asyncio.wait({self._member}, timeout=LEAVE_TIMEOUT_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()
            if not ended.done():
                ended.set_result(None)
            ended.exception()  # was raised by start or run, or is of no interest any more

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("group %s: no longer consuming", self.group, exc_info=error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


async def _outcome(ended: asyncio.Future[None]) -> None:
    """Waits for the end without ending it when the waiter is cancelled."""
    await asyncio.shield(ended)
