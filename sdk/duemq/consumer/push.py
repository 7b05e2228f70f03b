"""The asyncio push consumer: its life.  What it consumes is group_share.py's."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Literal, Unpack, overload

from duemq.consumer.broadcast.broadcast_share import BroadcastShare
from duemq.consumer.delivery.workers import Callback, OnEither, OnMessage, OnMessages
from duemq.consumer.fetching.offset_client import check_filters
from duemq.consumer.fetching.subscription import Topics, subscriptions_of
from duemq.consumer.group.group_share import GroupShare
from duemq.consumer.group.membership import LEAVE_TIMEOUT_S
from duemq.consumer.settings import (
    ConsumerSettings,
    Order,
    PushOptions,
    StartFrom,
    check_choices,
)
from duemq.errors import Closed, FencedMember, MissingBroker, Rejected, Timeout
from duemq.protocol.balance import MessageQueue, strategy_named
from duemq.settings import Addresses
from duemq.transport.closing import AsyncClient
from duemq.transport.cluster_client import Client
from duemq.transport.streams import first_of

log = logging.getLogger(__name__)


class PushConsumer(AsyncClient):
    """Receives a group's messages and calls `callback` with each, or with lists of them.

    As `duemq.PushConsumer`: `await start()` (or `async with`) joins the group, `await run()`
    consumes until closed.
    """

    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnMessage,
        *,
        batch: Literal[False] = False,
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnMessages,
        *,
        batch: Literal[True],
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: OnEither,
        *,
        batch: bool,
        nameserver: Addresses | None = None,
        **options: Unpack[PushOptions],
    ) -> None: ...
    def __init__(
        self,
        group: str,
        topics: Topics,
        callback: Callback,
        *,
        batch: bool = False,
        order: Order | None = None,
        broadcast: bool = False,
        member_name: str | None = None,
        start_from: StartFrom | None = None,
        threads: int | None = None,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None:
        """`topics`: a name, several, or {name: filter}; a filter is tags like "a || b", or Sql.

        The callback runs in up to `threads` threads at a time.  (In `duemq.aio` a coroutine
        function is awaited in the loop, up to `threads` at a time.)

        `batch`: it gets lists of one queue's messages.  `order`: "queue", one message of a queue at
        a time, or "key", one of an ordering key at a time.  `broadcast`: this consumer gets all
        messages, whatever others of the group get; how far it is stands in a file here.
        `member_name`: a name that is this consumer's alone, for as long as it runs; who comes back
        under it within `session_timeout_s` goes on with the same queues, and an older process of
        that name ends with FencedMember.  (Broadcast: names the file; by default the host's name.)
        `start_from`: where the group begins in queues that it has no offset for: "earliest",
        "latest", an aware datetime, ms since the epoch, or "-1h".  `start_from` and `threads`
        override `settings`.  Raises InvalidArgument.
        """
        check_choices(
            group=group,
            callback=callback,
            order=order,
            member_name=member_name,
            settings=settings,
            batch=batch,
            broadcast=broadcast,
        )
        self.group = group
        self.settings = (settings or ConsumerSettings()).changed(
            start_from=start_from, threads=threads
        )
        strategy_named(self.settings.strategy)
        self._filters = subscriptions_of(topics)
        self._callback = callback
        self._batch = batch
        self._order = order
        self._broadcast = broadcast
        self._member_name = member_name
        self._client = Client(nameserver, self.settings.client)
        self._share: GroupShare | BroadcastShare | None = None
        self._member: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None  # not None: started
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Joins the group; returns when it has answered, and the first queues are taken over.

        Queues whose broker does not answer at once are taken over later.

        Raises Unavailable or Timeout when it cannot be reached in time, Rejected when it refuses,
        FencedMember when a newer process has this `member_name`.
        """
        if self._ended is not None:
            raise Closed("a consumer is started once")
        ended = self._ended = asyncio.get_running_loop().create_future()
        limit_s = self.settings.start_timeout_s
        try:
            await self._client.start()
            if self._broadcast:  # there is no group that would refuse them
                await check_filters(self._client, self.group, self._filters)
            if self._closing is not None:
                return  # nobody would end what begins now
            share = self._share = self._new_share()
            share.start()
            self._member = self._spawn(self._stay_member(share, ended))
            async with asyncio.timeout(limit_s):
                await first_of(share.joined.wait(), _outcome(ended))
        except BaseException as error:
            text = self._not_joined(limit_s)
            if not ended.done():  # else `run` raises that
                ended.set_exception(Closed("the consumer was not started: make another one"))
            await self.close()
            if isinstance(error, TimeoutError):
                raise Timeout(text, limit=limit_s) from None
            raise

    def _not_joined(self, limit_s: float) -> str:
        trouble = self._share.trouble if self._share is not None else ""
        return (
            f"group {self.group} could not be joined in {limit_s:g} s"
            + (f": {trouble}" if trouble else "")
            + f"; nameservers: {self._client.story()}"
        )

    async def run(self) -> None:
        """Starts, if need be, and consumes until closed.  Raises what ended the membership."""
        if self._ended is None:
            await self.start()
        assert self._ended is not None
        self._client.check_loop()
        await _outcome(self._ended)

    async def close(self) -> None:
        """Stops, waits for running callbacks, commits, leaves the group.  Idempotent.

        What just failed is sent back first.  With a `member_name` the queues are not given to
        others before `session_timeout_s` is over.  From within the callback it only begins to:
        `run` returns when all is done.
        """
        self._client.check_loop()
        if self._ended is None:  # whoever starts it is too late
            self._ended = asyncio.get_running_loop().create_future()
            self._ended.set_result(None)
        self.begin_close()
        if self._closing is not None and not self.in_callback():
            await asyncio.shield(self._closing)

    def begin_close(self) -> None:
        """Starts to close, in the loop; `run` returns when all is done."""
        if self._ended is not None and self._closing is None:
            self._closing = asyncio.create_task(self._close(self._ended))

    def in_callback(self) -> bool:
        """Tells whether the caller is this consumer's callback, which `close` would wait for."""
        return self._share is not None and self._share.in_callback()

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now."""
        return self._share.queues if self._share is not None else frozenset()

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that are away: what they store comes when they are back."""
        return self._client.missing

    def _new_share(self) -> GroupShare | BroadcastShare:
        kind = BroadcastShare if self._broadcast else GroupShare
        return kind(
            self._client,
            self._callback,
            self.settings,
            self._spawn,
            group=self.group,
            filters=self._filters,
            batch=self._batch,
            order=self._order,
            member_name=self._member_name,
        )

    async def _stay_member(
        self, share: GroupShare | BroadcastShare, ended: asyncio.Future[None]
    ) -> None:
        try:
            await share.run()
        except (Rejected, FencedMember) as error:
            if share.joined.is_set():  # else `start` raises it
                log.error("group %s: no longer consuming: %s", self.group, error)
            share.drop_all()
            if not ended.done():
                ended.set_exception(error)

    async def _close(self, ended: asyncio.Future[None]) -> None:
        try:
            if self._share is not None:
                if self._member is not None:
                    await self._share.close()
                    await self._share.leave()  # before `stop`: the others wait for the queues
                    await asyncio.wait({self._member}, timeout=LEAVE_TIMEOUT_S)
                await self._share.stop()
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
        if self._share is None or self._share.joined.is_set():  # else `start` raises it
            log.error("group %s: no longer consuming", self.group, exc_info=error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


async def _outcome(ended: asyncio.Future[None]) -> None:
    """Waits for the end without ending it when the waiter is cancelled."""
    await asyncio.shield(ended)
