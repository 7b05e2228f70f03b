"""A member's share of its group's queues: taken over, consumed, given up.

    Membership ──assigned──► Share ──acquire──► Holding ──pull──► Dispatcher ──► callback
                               │                                      │  │ failed
                               └── release: stop, wait, commit, tell ◄┘  └──► SendBacks

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
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from duemq.consumer.delivery.concurrent import ConcurrentDispatcher
from duemq.consumer.delivery.in_order import OrderedDispatcher
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.seams import Dispatcher, Spawn
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.fetcher import Fetcher, Source
from duemq.consumer.fetching.offset_client import OffsetClient, Start
from duemq.consumer.fetching.receiving import received
from duemq.consumer.fetching.subscription import ALL, Filter
from duemq.consumer.group.holding import Committer, Holding, HoldingState, Lost
from duemq.consumer.group.membership import Membership
from duemq.consumer.group.send_backs import SendBacks
from duemq.consumer.settings import ConsumerSettings, Order, StartFrom, resolved
from duemq.errors import DuemqError, FencedMember, NotCoordinator, OffsetOutOfRange
from duemq.protocol.balance import MessageQueue
from duemq.protocol.names import retry_topic
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

# A broker's clock may be so far behind ours.
CLOCK_BEHIND_MS_MAX = 60_000

ACQUIRE_WAIT_S_MIN = 0.05
ACQUIRE_WAIT_S_MAX = 2.0
FENCED_COMMIT_TIMEOUT_S = 1.0
REFUSED_WAIT_S = 1.0  # before a queue is pulled again that its broker refused
WARN_S = 1.0  # between warnings, while a release waits for callbacks
STOP_TIMEOUT_S = 5.0  # for workers that have nothing to do any more


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
        filters: Mapping[str, Filter],
        batch: bool,
        order: Order | None = None,
        member_name: str | None = None,
    ) -> None:
        """`member_name`: of a static member."""
        self.joined = asyncio.Event()
        """The group has answered."""
        self._client = client
        self._settings = settings
        self._spawn = spawn
        self._group = group
        # What the group sends back comes again on a topic of its own.
        self._filters = {**filters, retry_topic(group): ALL}
        self._in_order = order is not None
        lease = Lease.of_session(settings.session_timeout_s)
        self._membership = Membership(
            client,
            self,
            lease if order is not None else None,
            group=group,
            subscriptions=self._filters,
            session_timeout_s=settings.session_timeout_s,
            strategy=settings.strategy,
            member_name=member_name,
        )
        member_id = self._membership.member_id
        self._offsets = OffsetClient(client, group, member_id)
        self._committer = Committer(self._offsets, group)
        settler = SendBacks(
            self._offsets, spawn, self._taken_over, group=group, client_id=member_id
        )
        self._dispatcher: Dispatcher
        if order is None:
            self._dispatcher = ConcurrentDispatcher(
                callback,
                batch=batch,
                settings=settings,
                settler=settler,
                progressed=self._progressed,
                spawn=spawn,
                group=group,
                client_id=member_id,
            )
        else:
            self._dispatcher = OrderedDispatcher(
                callback,
                order=order,
                batch=batch,
                settings=settings,
                settler=settler,
                lease=lease,
                progressed=self._progressed,
                spawn=spawn,
                group=group,
                client_id=member_id,
            )
        # What was there before this member: only there "latest" means the end of the queue.
        self._began_ms = int(time.time() * 1000)
        self._older = {
            MessageQueue(topic, queue.broker, queue.queue_id)
            for topic in self._filters
            if (route := client.routes.route(topic)) is not None
            for queue in route.readable
        }
        self._generation = 0
        self._wanted: frozenset[MessageQueue] = frozenset()
        self._answered = False  # the last claim
        self._untold: set[MessageQueue] = set()  # given up since then
        self._holdings: dict[MessageQueue, Holding] = {}
        self._by_source: dict[Source, Holding] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._closing = False
        self._hanging = False  # callbacks that did not end before the close

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now.  From any thread."""
        holdings = tuple(self._holdings.values())
        return frozenset(h.queue for h in holdings if h.state is HoldingState.ACTIVE)

    @property
    def trouble(self) -> str:
        """Why the group has not answered yet, for people."""
        return self._membership.trouble

    def in_callback(self) -> bool:
        """Tells whether the caller is the callback.  From any thread."""
        return self._dispatcher.in_callback()

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts what works beside `run`."""
        self._dispatcher.start()
        self._spawn(self._commit_often())

    async def run(self) -> None:
        """Stays a member until `leave` or cancelled.

        Raises Rejected if the group does not take this member, FencedMember if a newer process has
        taken this static member's place.
        """
        await self._membership.run()

    async def close(self) -> None:
        """Stops, waits for callbacks and send-backs, commits; no assignment counts any more."""
        self._closing = True
        holdings = list(self._holdings.values())
        for holding in holdings:
            self._stop(holding)
        self._hanging = not await self._quiet(holdings, self._settings.close_timeout_s)
        await self._committer.commit(holdings)
        self._holdings.clear()

    async def leave(self) -> None:
        """Gives the queues to the others, after `close`; a static member's wait for its return.

        In order, a callback that still runs keeps the others off until the session is over.
        """
        await self._membership.leave(silently=self._hanging and self._in_order)

    async def stop(self) -> None:
        """Ends the workers; `close` has waited for what they do."""
        await self._dispatcher.stop(0.0 if self._hanging else STOP_TIMEOUT_S)

    async def _commit_often(self) -> None:
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
        self._answered, self._untold = False, set()
        return tuple(self._holdings)

    def assigned(self, generation: int, queues: frozenset[MessageQueue]) -> None:
        """A new assignment."""
        self._generation, self._wanted = generation, queues
        self._answered = True
        untold, self._untold = self._untold - queues, set()
        if untold:
            self._spawn(self._membership.released(generation, untold))
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
        going: defaultdict[object, list[Holding]] = defaultdict(list)
        for queue, holding in self._holdings.items():
            if queue not in self._wanted and holding.state is not HoldingState.RELEASING:
                holding.state = HoldingState.RELEASING
                # In order each waits for its callbacks without limit: not for those of others.
                going[queue if self._in_order else queue.broker].append(holding)
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
            generation, coordinator = self._generation, self._membership.coordinator
            try:
                answers: dict[MessageQueue, Start | DuemqError] = {}
                for start_from, queues in self._starts(todo).items():
                    answers |= await self._offsets.acquire(
                        broker, queues, generation, start_from, coordinator
                    )
            except DuemqError as error:
                if isinstance(error, NotCoordinator):
                    self._membership.doubt(coordinator)
                self._log_first(backoff, f"taking over queues of {broker}", error)
            else:
                for queue, answer in answers.items():
                    if queue in todo and self._is_acquiring(todo[queue]):
                        self._acquired(todo[queue], generation, answer, backoff)
            if any(map(self._is_acquiring, holdings)):
                await asyncio.sleep(backoff.next_s())

    def _starts(self, queues: Iterable[MessageQueue]) -> Mapping[StartFrom, list[MessageQueue]]:
        """Where the group begins in queues that it has no offset for.

        With "latest" a queue that came while this member was there (a new topic, queue or broker)
        begins when the member did: what was sent into it before it is taken over would be left out
        otherwise.  Not at its beginning: it may be an old broker that was away for a moment.
        """
        since_start = max(0, self._began_ms - CLOCK_BEHIND_MS_MAX)
        starts: defaultdict[StartFrom, list[MessageQueue]] = defaultdict(list)
        chosen = resolved(self._settings.start_from, self._began_ms)
        for queue in queues:
            new = chosen == "latest" and queue not in self._older
            starts[since_start if new else chosen].append(queue)
        return starts

    def _is_acquiring(self, holding: Holding) -> bool:
        return self._holds(holding) and holding.state is HoldingState.ACQUIRING

    def _holds(self, holding: Holding) -> bool:
        return self._holdings.get(holding.queue) is holding

    def _acquired(
        self, holding: Holding, generation: int, answer: Start | DuemqError, backoff: Backoff
    ) -> None:
        if isinstance(answer, FencedMember):
            self._lose([(holding, answer)])
        elif isinstance(answer, DuemqError):
            self._log_first(backoff, f"taking over {holding.queue}", answer)
        elif not self._closing:
            wanted = self._filters[holding.queue.topic]
            source = Source(holding.queue, wanted, generation, answer.offset)
            holding.source, holding.committed = source, answer.offset
            holding.settled = answer.settled
            holding.state = HoldingState.ACTIVE
            self._older.discard(holding.queue)  # has an offset now, unless its topic is made anew
            self._by_source[source] = holding
            self._fetcher(holding.queue.broker).add(source)

    def _log_first(self, backoff: Backoff, what: str, error: DuemqError) -> None:
        level = logging.WARNING if backoff.attempts == 0 else logging.DEBUG
        log.log(level, "group %s: %s: %s", self._group, what, error)

    # --- giving up ----------------------------------------------------------------------------

    async def _release(self, holdings: list[Holding]) -> None:
        """Stops, lets running callbacks end, commits, and only then tells the coordinator."""
        for holding in holdings:
            self._stop(holding)
        limit_s = self._settings.release_timeout_s
        while not await self._quiet(holdings, max(limit_s, WARN_S) if self._in_order else limit_s):
            if not self._in_order:
                break  # the new owner may get the message that is being processed here
        self._lose(await self._committer.commit(holdings))
        gone = {holding.queue for holding in holdings if self._holds(holding)}
        for queue in gone:
            del self._holdings[queue]
        if told := gone - self._wanted:  # the others were assigned again meanwhile: still ours
            if self._answered:
                await self._membership.released(self._generation, told)
            else:
                self._untold |= told  # it was claimed: only a newer assignment can be answered
        self._reconcile()

    def _taken_over(self, source: Source, error: FencedMember) -> None:
        """A send-back was refused."""
        if (holding := self._by_source.get(source)) is not None:
            self._lose([(holding, error)])

    def _lose(self, losses: Iterable[Lost]) -> None:
        """Others have taken queues over: drops them, asks the coordinator what is true."""
        for holding, error in losses:
            if not self._holds(holding):
                continue
            log.warning("group %s: lost %s: %s", self._group, holding.queue, error)
            self._drop(holding)
            self._wanted -= {holding.queue}
            self._membership.rejoin(int(error.limit) if error.limit.isdecimal() else 0)

    def _drop(self, holding: Holding) -> None:
        self._stop(holding)
        del self._holdings[holding.queue]

    def _stop(self, holding: Holding) -> None:
        """No pull and no callback begins any more."""
        source = holding.source
        if source is not None:
            source.pending.drop()
            self._by_source.pop(source, None)
            self._fetcher(holding.queue.broker).remove(source)

    async def _quiet(self, holdings: Iterable[Holding], limit_s: float) -> bool:
        """Waits for running callbacks and send-backs; False, with a warning, if some still run."""
        sources = [holding.source for holding in holdings if holding.source is not None]
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(self._dispatcher.quiet, sources))
        except TimeoutError:
            log.warning("group %s: a callback still runs after %g s", self._group, limit_s)
            return False
        return True

    # --- pulled (fetcher.Sink) ----------------------------------------------------------------

    def pulled(self, source: Source, records: view_pb2.QueueRecordsView) -> None:
        """Hands the messages that the subscription takes to the workers."""
        messages = received(records, source.queue.broker, source.filter)
        if settled := self._by_source[source].settled:
            messages = [message for message in messages if message.offset not in settled]
        if messages:
            size_bytes = len(records.records)
            self._dispatcher.dispatch(source, messages, records.next_offset, size_bytes)
        else:
            source.pending.skip_to(records.next_offset)

    def refused(self, source: Source, error: DuemqError) -> None:
        """Fenced: drops the queue.  Out of range: goes on where the broker can."""
        holding = self._by_source[source]
        if isinstance(error, FencedMember):
            self._lose([(holding, error)])
            return
        log.warning("group %s: %s: %s", self._group, source.queue, error)
        if isinstance(error, OffsetOutOfRange):
            self._drop(holding)
            self._reconcile()  # acquires it anew: the broker answers an offset that it has
        else:
            self._fetcher(source.queue.broker).rest(source, REFUSED_WAIT_S)

    def _progressed(self, source: Source) -> None:
        if not source.pending.dropped:
            self._fetcher(source.queue.broker).refill(source)

    def _fetcher(self, broker: str) -> Fetcher:
        fetcher = self._fetchers.get(broker)
        if fetcher is None:
            fetcher = self._fetchers[broker] = Fetcher(
                self._client,
                broker,
                self,
                self._settings,
                group=self._group,
                member_id=self._membership.member_id,
            )
            self._spawn(fetcher.run())
        return fetcher
