"""A member's share of its group's queues: taken over, consumed, given up.

    Membership ──assigned──► Share ──acquire──► Holding ──pull──► Dispatcher ──► callback
                               │                                      │
                               └── release: stop, wait, commit, tell ◄┘ commit point

A queue's life here (HoldingState):

    ACQUIRING ──offset known──► ACTIVE ──no longer assigned──► RELEASING ──committed──► gone, told
        └──── no longer assigned ─────────────────────────────────────────────────────► gone, told
    any ──fenced: another member has it, or the session is over──► gone

A queue that is assigned again while it is RELEASING is acquired anew once it is gone.  Queues
that stay assigned are never touched.  Everything happens in one event loop; only callbacks may
run in threads.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from time import monotonic
from typing import Any

from duemq.balance import MessageQueue
from duemq.client import Client
from duemq.consumer.dispatcher import Dispatcher
from duemq.consumer.fetcher import Fetcher, Source
from duemq.consumer.holding import Committer, Holding, HoldingState, Lost
from duemq.consumer.membership import Membership
from duemq.consumer.offsets import OffsetClient
from duemq.consumer.receiving import received
from duemq.consumer.settings import ConsumerSettings
from duemq.consumer.workers import Callback
from duemq.errors import DuemqError, FencedMember, OffsetOutOfRange
from duemq.message import Message
from duemq.process_queue import ProcessQueue
from duemq.rpc.backoff import Backoff
from duemq.tag_filter import TagFilter
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

ACQUIRE_WAIT_S_MIN = 0.05
ACQUIRE_WAIT_S_MAX = 2.0
FENCED_COMMIT_TIMEOUT_S = 1.0
REFUSED_WAIT_S = 1.0  # before a queue is pulled again that its broker refused

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Share:
    """What one member does about assignments (membership.Owner) and pulls (fetcher.Sink)."""

    def __init__(
        self,
        client: Client,
        callback: Callback,
        settings: ConsumerSettings,
        spawn: Spawn,
        *,
        group: str,
        filters: Mapping[str, tuple[str, TagFilter]],
        batch: bool,
    ) -> None:
        """`spawn` runs a coroutine as a task that ends with the consumer."""
        self.joined = asyncio.Event()
        """The group has answered."""
        self.membership = Membership(
            client,
            self,
            group=group,
            subscriptions={topic: text for topic, (text, _) in filters.items()},
            session_timeout_s=settings.session_timeout_s,
            strategy=settings.strategy,
        )
        member_id = self.membership.member_id
        self.dispatcher = Dispatcher(
            callback,
            batch=batch,
            settings=settings,
            progressed=self._progressed,
            group=group,
            client_id=member_id,
        )
        self._client = client
        self._settings = settings
        self._spawn = spawn
        self._group = group
        self._filters = filters
        self._offsets = OffsetClient(client, group, member_id)
        self._committer = Committer(self._offsets, group)
        self._generation = 0
        self._wanted: frozenset[MessageQueue] = frozenset()
        self._holdings: dict[MessageQueue, Holding] = {}
        self._by_pending: dict[ProcessQueue[Message], Holding] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._closing = False

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now.  From any thread."""
        holdings = tuple(self._holdings.values())
        return frozenset(h.queue for h in holdings if h.state is HoldingState.ACTIVE)

    async def close(self) -> None:
        """Stops, waits for running callbacks, commits; what comes from the group is ignored."""
        self._closing = True
        deadline = monotonic() + self._settings.close_timeout_s
        holdings = list(self._holdings.values())
        for holding in holdings:
            self._stop(holding)
        await self._quiet(holdings, self._settings.close_timeout_s)
        await self._committer.commit(holdings)
        self._holdings.clear()
        await self.dispatcher.stop(max(0.0, deadline - monotonic()))

    async def commit_often(self) -> None:
        """Commits every `commit_interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.commit_interval_s)
            self._lose(await self._committer.commit(self._holdings.values()))

    # --- what the group wants (membership.Owner) ----------------------------------------------

    def claim(self) -> Iterable[MessageQueue]:
        """What is consumed or still being released; all else must be assigned anew.

        So nothing is taken over under an assignment of a session that may be over.
        """
        for holding in tuple(self._holdings.values()):
            if holding.state is HoldingState.ACQUIRING:
                self._drop(holding)
        self._wanted = self._wanted & self.queues
        return tuple(self._holdings)

    def assigned(self, generation: int, queues: frozenset[MessageQueue]) -> None:
        """A new assignment."""
        self._generation, self._wanted = generation, queues
        self.joined.set()
        self._reconcile()

    async def fenced(self) -> None:
        """The session is over: stops at once; what was done is saved where no other took over."""
        self._wanted = frozenset()
        await self._committer.commit(self.drop_all(), FENCED_COMMIT_TIMEOUT_S)

    def drop_all(self) -> list[Holding]:
        """Lets go of everything without telling; answers what was held."""
        holdings = list(self._holdings.values())
        for holding in holdings:
            self._drop(holding)
        return holdings

    def _reconcile(self) -> None:
        """Starts what leads from what is held to what is wanted."""
        if self._closing:
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

    # --- taking over --------------------------------------------------------------------------

    async def _acquire(self, broker: str, holdings: list[Holding]) -> None:
        """Asks where to begin, until the broker answers or the queues are no longer wanted."""
        backoff = Backoff(ACQUIRE_WAIT_S_MIN, ACQUIRE_WAIT_S_MAX)
        while todo := {h.queue: h for h in holdings if self._is_acquiring(h)}:
            generation = self._generation
            try:
                answers = await self._offsets.acquire(
                    broker, todo, generation, self._settings.start_from
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
        return self._holds(holding) and holding.state is HoldingState.ACQUIRING

    def _holds(self, holding: Holding) -> bool:
        return self._holdings.get(holding.queue) is holding

    def _acquired(
        self, holding: Holding, generation: int, answer: int | DuemqError, backoff: Backoff
    ) -> None:
        if isinstance(answer, FencedMember):
            self._lose([(holding, answer)])
        elif isinstance(answer, DuemqError):
            self._log_first(backoff, f"taking over {holding.queue}", answer)
        elif not self._closing:
            filter_text = self._filters[holding.queue.topic][0]
            source = Source(holding.queue, filter_text, generation, answer)
            holding.source, holding.committed = source, answer
            holding.state = HoldingState.ACTIVE
            self._by_pending[source.pending] = holding
            self._fetcher(holding.queue.broker).add(source)

    def _log_first(self, backoff: Backoff, what: str, error: DuemqError) -> None:
        level = logging.WARNING if backoff.attempts == 0 else logging.DEBUG
        log.log(level, "group %s: %s: %s", self._group, what, error)

    # --- giving up ----------------------------------------------------------------------------

    async def _release(self, holdings: list[Holding]) -> None:
        """Stops, lets running callbacks end, commits, and only then tells the coordinator."""
        for holding in holdings:
            self._stop(holding)
        await self._quiet(holdings, self._settings.release_timeout_s)
        self._lose(await self._committer.commit(holdings))
        gone = {holding.queue for holding in holdings if self._holds(holding)}
        for queue in gone:
            del self._holdings[queue]
        if told := gone - self._wanted:  # the others were assigned again meanwhile: still ours
            await self.membership.released(self._generation, told)
        self._reconcile()

    def _lose(self, losses: Iterable[Lost]) -> None:
        """Others have taken queues over: drops them, asks the coordinator what is true."""
        for holding, error in losses:
            if not self._holds(holding):
                continue
            log.warning("group %s: lost %s: %s", self._group, holding.queue, error)
            self._drop(holding)
            self._wanted -= {holding.queue}
            self.membership.rejoin(int(error.limit) if error.limit.isdecimal() else 0)

    def _drop(self, holding: Holding) -> None:
        self._stop(holding)
        del self._holdings[holding.queue]

    def _stop(self, holding: Holding) -> None:
        """No pull and no callback begins any more."""
        if holding.source is not None:
            holding.source.pending.dropped = True
            self._by_pending.pop(holding.source.pending, None)
            self._fetcher(holding.queue.broker).remove(holding.source)

    async def _quiet(self, holdings: Iterable[Holding], limit_s: float) -> None:
        """Waits for running callbacks."""
        sources = [holding.source for holding in holdings if holding.source is not None]
        waits = [self.dispatcher.quiet(source.pending) for source in sources]
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            log.warning("group %s: a callback still runs after %g s", self._group, limit_s)

    # --- pulled (fetcher.Sink) ----------------------------------------------------------------

    def pulled(self, source: Source, records: view_pb2.QueueRecordsView) -> None:
        """Hands the messages that the subscription takes to the workers."""
        pending = source.pending
        messages = received(records, source.queue.broker, self._filters[source.queue.topic][1])
        if messages:
            self.dispatcher.dispatch(pending, messages, records.next_offset, len(records.records))
        else:
            pending.skip_to(records.next_offset)

    def refused(self, source: Source, error: DuemqError) -> None:
        """Fenced: drops the queue.  Out of range: goes on where the broker can."""
        holding = self._by_pending[source.pending]
        if isinstance(error, FencedMember):
            self._lose([(holding, error)])
            return
        log.warning("group %s: %s: %s", self._group, source.queue, error)
        if isinstance(error, OffsetOutOfRange):
            self._drop(holding)
            self._reconcile()  # acquires it anew: the broker answers an offset that it has
        else:
            self._fetcher(source.queue.broker).rest(source, REFUSED_WAIT_S)

    def _progressed(self, pending: ProcessQueue[Message]) -> None:
        holding = self._by_pending.get(pending)
        if holding is not None and holding.source is not None:
            self._fetcher(holding.queue.broker).refill(holding.source)

    def _fetcher(self, broker: str) -> Fetcher:
        fetcher = self._fetchers.get(broker)
        if fetcher is None:
            fetcher = self._fetchers[broker] = Fetcher(
                self._client,
                broker,
                self,
                self._settings,
                group=self._group,
                member_id=self.membership.member_id,
            )
            self._spawn(fetcher.run())
        return fetcher
