"""The asyncio push consumer: a member of a group, whose queues are pulled and handed to a callback.

    Membership ──assigned──► PushConsumer ──acquire──► Holding ──pull──► Dispatcher ──► callback
                                  │                                         │
                                  └── release: stop, wait, commit, tell ◄───┘ commit point

A queue's life here (HoldingState):

    ACQUIRING ──offset known──► ACTIVE ──no longer assigned──► RELEASING ──committed──► gone, told
        └──── no longer assigned ─────────────────────────────────────────────────────► gone, told
    any ──fenced: another member has it, or the session is over──► gone

A queue that is assigned again while it is RELEASING is acquired anew once it is gone.  Everything
happens in one event loop; only callbacks may run in threads.
"""

import asyncio
import enum
import logging
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from time import monotonic
from types import TracebackType
from typing import Any

from duemq import retry
from duemq.balance import MessageQueue, strategy_named
from duemq.client import Addresses, Client
from duemq.consumer.dispatcher import Dispatcher
from duemq.consumer.fetcher import Fetcher, Source
from duemq.consumer.membership import Membership
from duemq.consumer.offsets import REQUEST_TIMEOUT_S, Commit, OffsetClient
from duemq.consumer.receiving import received
from duemq.consumer.settings import ConsumerSettings, StartFrom
from duemq.consumer.subscription import Topics, subscriptions_of
from duemq.consumer.workers import Callback
from duemq.errors import Closed, DuemqError, FencedMember, OffsetOutOfRange, Rejected, Timeout
from duemq.message import Message
from duemq.process_queue import ProcessQueue
from duemq.rpc.backoff import Backoff
from duemq.settings import DEFAULT_NAMESERVER
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

ACQUIRE_WAIT_S_MIN = 0.05
ACQUIRE_WAIT_S_MAX = 2.0
FENCED_COMMIT_TIMEOUT_S = 1.0
LEAVE_TIMEOUT_S = 2.0
REFUSED_WAIT_S = 1.0  # before a queue is pulled again that its broker refused


class HoldingState(enum.Enum):
    """See the module's drawing."""

    ACQUIRING = enum.auto()
    ACTIVE = enum.auto()
    RELEASING = enum.auto()


class Holding:
    """A queue that the coordinator thinks is ours."""

    __slots__ = ("committed", "queue", "source", "state")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.state = HoldingState.ACQUIRING
        self.source: Source | None = None
        """Once ACTIVE."""
        self.committed = -1
        """The last offset that the broker confirmed."""


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
        self._generation = 0
        self._wanted: frozenset[MessageQueue] = frozenset()
        self._holdings: dict[MessageQueue, Holding] = {}
        self._by_pending: dict[ProcessQueue[Message], Holding] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected = False  # there are a membership, offsets and a dispatcher
        self._joined: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Joins the group; returns when the group has answered.

        Raises Unavailable or Timeout when it cannot be reached in time, Rejected when it refuses.
        """
        if self._ended is not None:
            raise Closed("a consumer is started once")
        loop = asyncio.get_running_loop()
        self._joined, self._ended = loop.create_future(), loop.create_future()
        await self._client.start()
        self._membership = Membership(
            self._client,
            self,
            group=self.group,
            subscriptions={topic: text for topic, (text, _) in self._filters.items()},
            session_timeout_s=self.settings.session_timeout_s,
            strategy=self.settings.strategy,
        )
        self._offsets = OffsetClient(self._client, self.group, self._membership.member_id)
        self._dispatcher = Dispatcher(
            self._callback,
            batch=self._batch,
            settings=self.settings,
            progressed=self._progressed,
            group=self.group,
            client_id=self._membership.member_id,
        )
        self._dispatcher.start()
        self._connected = True
        self._member = self._spawn(self._stay_member())
        self._spawn(self._commit_often())
        try:
            await self._answered()
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Starts, if need be, and consumes until closed.  Raises what ended the membership."""
        if self._ended is None:
            await self.start()
        assert self._ended is not None
        await asyncio.shield(self._ended)

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
            self._closing = asyncio.create_task(self._close())

    def in_callback(self) -> bool:
        """Tells whether the caller is this consumer's callback, which `close` would wait for."""
        return self._connected and self._dispatcher.in_callback()

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
        return frozenset(q for q, h in self._holdings.items() if h.state is HoldingState.ACTIVE)

    async def _answered(self) -> None:
        assert self._joined is not None
        assert self._ended is not None
        limit_s = self.settings.start_timeout_s
        done, _ = await asyncio.wait(
            {self._joined, self._ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise Timeout(f"group {self.group} could not be joined in {limit_s:g} s", limit=limit_s)
        if self._ended in done:
            self._ended.result()

    async def _close(self) -> None:
        assert self._ended is not None
        try:
            if self._connected:
                await self._let_go_of_all()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()
            if not self._ended.done():
                self._ended.set_result(None)
            self._ended.exception()  # was raised by start or run, or is of no interest any more

    async def _let_go_of_all(self) -> None:
        deadline = monotonic() + self.settings.close_timeout_s
        self._wanted = frozenset()
        holdings = self._drop(self._holdings)
        await self._quiet(holdings, self.settings.close_timeout_s)
        await self._commit(holdings)
        await self._membership.leave()
        await asyncio.wait({self._member}, timeout=LEAVE_TIMEOUT_S)
        await self._dispatcher.stop(max(0.0, deadline - monotonic()))

    async def _stay_member(self) -> None:
        assert self._ended is not None
        try:
            await self._membership.run()
        except Rejected as error:
            log.error("group %s: no longer consuming: %s", self.group, error)
            self._drop(self._holdings)
            if not self._ended.done():
                self._ended.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("group %s: no longer consuming", self.group, exc_info=error)
            if self._ended is not None and not self._ended.done():
                self._ended.set_exception(error)

    # --- what the group wants (membership.Owner) ----------------------------------------------

    def owned(self) -> Iterable[MessageQueue]:
        """Everything that is not released yet."""
        return tuple(self._holdings)

    def assigned(self, generation: int, queues: frozenset[MessageQueue]) -> None:
        """A new assignment."""
        self._generation, self._wanted = generation, queues
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(None)
        self._reconcile()

    async def fenced(self) -> None:
        """The session is over: stops at once; what was done is saved where no other took over."""
        self._wanted = frozenset()
        await self._commit(self._drop(self._holdings), FENCED_COMMIT_TIMEOUT_S)

    def _reconcile(self) -> None:
        """Starts what leads from what is held to what is wanted."""
        if self._closing is not None:
            return
        going: defaultdict[str, list[Holding]] = defaultdict(list)
        for queue, holding in self._holdings.items():
            if queue not in self._wanted and holding.state is not HoldingState.RELEASING:
                holding.state = HoldingState.RELEASING
                going[queue.broker].append(holding)
        for holdings in going.values():
            self._spawn(self._release(holdings))
        coming: defaultdict[str, list[Holding]] = defaultdict(list)
        for queue in self._wanted - self._holdings.keys():
            holding = self._holdings[queue] = Holding(queue)
            coming[queue.broker].append(holding)
        for broker, holdings in coming.items():
            self._spawn(self._acquire(broker, holdings))

    # --- taking over and letting go -----------------------------------------------------------

    async def _acquire(self, broker: str, holdings: list[Holding]) -> None:
        """Asks where to begin, until the broker answers or the queues are no longer wanted."""
        backoff = Backoff(ACQUIRE_WAIT_S_MIN, ACQUIRE_WAIT_S_MAX)
        while todo := {h.queue: h for h in holdings if self._is_acquiring(h)}:
            generation = self._generation
            try:
                answers = await self._offsets.acquire(
                    broker, todo, generation, self.settings.start_from
                )
            except DuemqError as error:
                self._log_first(backoff, f"taking over queues of {broker}", error)
            else:
                for queue, answer in answers.items():
                    if queue in todo and self._is_acquiring(todo[queue]):
                        self._acquired(todo[queue], generation, answer, backoff)
            if any(map(self._is_acquiring, holdings)):
                await asyncio.sleep(backoff.next_s())

    def _is_acquiring(self, holding: Holding) -> bool:
        current = self._holdings.get(holding.queue) is holding
        return current and holding.state is HoldingState.ACQUIRING

    def _acquired(
        self, holding: Holding, generation: int, answer: int | DuemqError, backoff: Backoff
    ) -> None:
        if isinstance(answer, FencedMember):
            self._lost(holding, answer)
        elif isinstance(answer, DuemqError):
            self._log_first(backoff, f"taking over {holding.queue}", answer)
        else:
            filter_text = self._filters[holding.queue.topic][0]
            source = Source(holding.queue, filter_text, generation, answer)
            holding.source, holding.committed = source, answer
            holding.state = HoldingState.ACTIVE
            self._by_pending[source.pending] = holding
            self._fetcher(holding.queue.broker).add(source)

    async def _release(self, holdings: list[Holding]) -> None:
        """Stops, lets running callbacks end, commits, and only then tells the coordinator."""
        for holding in holdings:
            self._stop(holding)
        await self._quiet(holdings, self.settings.release_timeout_s)
        await self._commit(holdings)
        gone = {h.queue for h in holdings if self._holdings.get(h.queue) is h}
        for queue in gone:
            del self._holdings[queue]
        if told := gone - self._wanted:  # the others were assigned again meanwhile: still ours
            await self._membership.released(self._generation, told)
        self._reconcile()

    def _drop(self, queues: Iterable[MessageQueue]) -> list[Holding]:
        """Lets go without telling; answers what was held."""
        holdings = [self._holdings[queue] for queue in tuple(queues)]
        for holding in holdings:
            self._stop(holding)
            del self._holdings[holding.queue]
        return holdings

    def _stop(self, holding: Holding) -> None:
        """No pull and no callback begins any more."""
        if holding.source is not None:
            holding.source.pending.dropped = True
            self._by_pending.pop(holding.source.pending, None)
            self._fetcher(holding.queue.broker).remove(holding.source)

    async def _quiet(self, holdings: Iterable[Holding], limit_s: float) -> None:
        """Waits for running callbacks."""
        sources = [holding.source for holding in holdings if holding.source is not None]
        waits = [self._dispatcher.quiet(source.pending) for source in sources]
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            log.warning("group %s: a callback still runs after %g s", self.group, limit_s)

    def _lost(self, holding: Holding, error: FencedMember) -> None:
        """Another member has taken the queue over: drops it, asks the coordinator what is true."""
        if self._holdings.get(holding.queue) is not holding:
            return
        log.warning("group %s: lost %s: %s", self.group, holding.queue, error)
        self._drop([holding.queue])
        self._wanted -= {holding.queue}
        self._membership.rejoin(int(error.limit) if error.limit.isdecimal() else 0)

    # --- pulled (fetcher.Sink) ----------------------------------------------------------------

    def pulled(self, source: Source, records: view_pb2.QueueRecordsView) -> None:
        """Hands the messages that the subscription takes to the workers."""
        pending = source.pending
        messages = received(records, source.queue.broker, self._filters[source.queue.topic][1])
        if messages:
            self._dispatcher.dispatch(pending, messages, records.next_offset, len(records.records))
        else:
            pending.skip_to(records.next_offset)

    def refused(self, source: Source, error: DuemqError) -> None:
        """Fenced: drops the queue.  Out of range: goes on where the broker can."""
        holding = self._by_pending[source.pending]
        if isinstance(error, FencedMember):
            self._lost(holding, error)
            return
        log.warning("group %s: %s: %s", self.group, source.queue, error)
        if isinstance(error, OffsetOutOfRange):
            self._drop([source.queue])
            self._reconcile()  # acquires it anew: the broker answers an offset that it has
        else:
            self._fetcher(source.queue.broker).rest(source, REFUSED_WAIT_S)

    def _fetcher(self, broker: str) -> Fetcher:
        fetcher = self._fetchers.get(broker)
        if fetcher is None:
            fetcher = self._fetchers[broker] = Fetcher(
                self._client,
                broker,
                self,
                self.settings,
                group=self.group,
                member_id=self._membership.member_id,
            )
            self._spawn(fetcher.run())
        return fetcher

    # --- commits ------------------------------------------------------------------------------

    def _progressed(self, pending: ProcessQueue[Message]) -> None:
        holding = self._by_pending.get(pending)
        if holding is not None and holding.source is not None:
            self._fetcher(holding.queue.broker).refill(holding.source)

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(self.settings.commit_interval_s)
            await self._commit(list(self._holdings.values()))

    async def _commit(
        self, holdings: Iterable[Holding], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """Saves how far each queue is.  What fails until the timeout may be consumed again."""
        by_broker: defaultdict[str, list[tuple[Holding, Commit]]] = defaultdict(list)
        for holding in holdings:
            if holding.source is None:
                continue
            offset = holding.source.pending.commit_point
            if offset != holding.committed:
                commit = Commit(holding.queue, offset, holding.source.generation)
                by_broker[holding.queue.broker].append((holding, commit))
        await asyncio.gather(
            *(self._commit_at(broker, each, timeout_s) for broker, each in by_broker.items())
        )

    async def _commit_at(
        self, broker: str, commits: list[tuple[Holding, Commit]], timeout_s: float
    ) -> None:
        async def attempt(left_s: float) -> dict[MessageQueue, DuemqError]:
            return await self._offsets.commit(broker, [c for _, c in commits], left_s)

        try:
            refused = await retry.until(monotonic() + timeout_s, attempt)
        except DuemqError as error:
            log.warning("group %s: offsets at %s not committed: %s", self.group, broker, error)
            return
        for holding, commit in commits:
            error_of = refused.get(commit.queue)
            if error_of is None:
                holding.committed = commit.offset
            elif isinstance(error_of, FencedMember):
                self._lost(holding, error_of)
            else:
                log.warning("group %s: %s not committed: %s", self.group, commit, error_of)

    def _log_first(self, backoff: Backoff, what: str, error: DuemqError) -> None:
        level = logging.WARNING if backoff.attempts == 0 else logging.DEBUG
        log.log(level, "group %s: %s: %s", self.group, what, error)
