"""A member's share of its group's queues: taken over, consumed, given up.

    Membership ──assigned──► GroupShare ──acquire──► Holding ──pull──► Dispatcher ──► callback
                               │                                      │  │ failed
                               └── release: stop, wait, commit, tell ◄┘  └──► SendBacks

Which queue is in which state, and what is to be done next, holdings.py knows; here it is done.
Everything happens in one event loop; only callbacks may run in threads.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from duemq.consumer.delivery.concurrent import ConcurrentDispatcher
from duemq.consumer.delivery.in_place import InPlaceDispatcher
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.seams import Dispatcher, DispatchOptions, Spawn
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.fetcher import Fetcher, Source
from duemq.consumer.fetching.offset_client import OffsetClient, Start
from duemq.consumer.fetching.subscription import ALL, Filter
from duemq.consumer.group.committing import Committer, Lost
from duemq.consumer.group.holdings import Holding, Holdings, HoldingStep
from duemq.consumer.group.membership import Membership
from duemq.consumer.group.send_backs import SendBacks
from duemq.consumer.settings import ConsumerSettings, Order
from duemq.errors import (
    DuemqError,
    FencedMember,
    NotCoordinator,
    OffsetOutOfRange,
    TopicReplaced,
)
from duemq.message import Message
from duemq.protocol.balance import MessageQueue
from duemq.protocol.names import retry_topic
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

FENCED_COMMIT_TIMEOUT_S = 1.0
WARN_S = 1.0  # between warnings, while a release waits for callbacks
RETIRE_AFTER_S = 0.2  # most callbacks have ended by then, and one goodbye says it all
STOP_TIMEOUT_S = 5.0  # for workers that have nothing to do any more
BEGIN_TIMEOUT_S = 2.0  # a start waits so long for its first queues


class Beginning:
    """Waits for the first try to take over what the first assignment names.

    With "latest" a queue without an offset begins at its end as its broker is first asked.  Who
    starts a consumer and then sends must not be quicker than that.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: brokers that do not answer are waited for no longer."""
        self.over = asyncio.Event()
        """The group has answered, and the first queues are taken over, or not to be had at once."""
        self._limit_s = limit_s
        self._asked: set[str] | None = None

    def assigned(self, brokers: Iterable[str]) -> None:
        """These are asked for queues; only those of the first assignment count."""
        if self._asked is None:
            self._asked = set(brokers)
            asyncio.get_running_loop().call_later(self._limit_s, self.over.set)
            self.tried("")

    def tried(self, broker: str) -> None:
        """It has answered, or could not, or nothing of it is wanted any more."""
        if self._asked is not None:
            self._asked.discard(broker)
            if not self._asked:
                self.over.set()


class GroupShare:
    """What one member does about assignments (membership.Owner) and pulls (fetcher.PulledSink)."""

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
        self._beginning = Beginning(min(BEGIN_TIMEOUT_S, settings.start_timeout_s / 2))
        self.joined = self._beginning.over
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
        calling = DispatchOptions(
            batch=batch,
            settings=settings,
            settler=settler,
            progressed=self._progressed,
            spawn=spawn,
            group=group,
            client_id=member_id,
        )
        self._dispatcher: Dispatcher[Any] = (
            ConcurrentDispatcher(callback, **calling)
            if order is None
            else InPlaceDispatcher(callback, lanes=order, lease=lease, **calling)
        )
        older = (
            MessageQueue(topic, queue.broker, queue.queue_id)
            for topic in self._filters
            if (route := client.routes.route(topic)) is not None
            for queue in route.readable
        )
        now_ms = int(time.time() * 1000)
        self._holdings = Holdings(
            settings.start_from, older, now_ms, client.routes.topic_id, in_order=self._in_order
        )
        self._by_source: dict[Source, Holding] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._hanging = False  # callbacks that did not end before the close

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now.  From any thread."""
        return self._holdings.active

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
        """As `Membership.run`."""
        await self._membership.run()

    async def close(self) -> None:
        """Stops, waits for callbacks and send-backs, commits; nothing is taken over any more.

        If they last, others get each queue as soon as its own have ended.
        """
        holdings = self._holdings.close()
        for holding in holdings:
            self._stop(holding)
        limit_s = self._settings.close_timeout_s
        soon_s = min(limit_s, RETIRE_AFTER_S)
        if not await self._quiet(holdings, soon_s):
            self._spawn(self._membership.retire())
            brokers: defaultdict[str, list[Holding]] = defaultdict(list)
            for holding in holdings:
                brokers[holding.queue.broker].append(holding)
            # Broker by broker: one that is away holds up nobody's queues but its own.
            giving = (self._give_up(each, limit_s - soon_s) for each in brokers.values())
            busy = [each for some in await asyncio.gather(*giving) for each in some]
            self._hanging = bool(busy)
            if busy:
                self._warn_of_callbacks(limit_s)
        await self._committer.commit(holdings)  # once more what no broker has saved
        if self._hanging and self._in_order:  # no goodbye gives away what has ended meanwhile
            self._hanging = bool(await self._give_up(busy, 0.0))
        self._holdings.drop_all()

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
            self._lose(await self._committer.commit(self._holdings.all))

    # --- what the group wants (membership.Owner) ----------------------------------------------

    def claim(self) -> Iterable[MessageQueue]:
        """What a hello says is ours."""
        return self._holdings.claim()

    def assigned(
        self, generation: int, queues: frozenset[MessageQueue], reads_for_ms: Mapping[str, int]
    ) -> None:
        """A new assignment."""
        now_ms = int(time.time() * 1000)
        self._holdings.reads({topic: now_ms - for_ms for topic, for_ms in reads_for_ms.items()})
        step = self._holdings.assigned(generation, queues)
        self._beginning.assigned(step.acquire)
        self._carry_out(step)

    async def fenced(self) -> None:
        """The session is over: stops at once, then saves what was done, which may outlast this."""
        step = self._holdings.fenced()
        self._carry_out(step)
        saving = self._spawn(self._given_up(step.dropped))
        await asyncio.wait({saving}, timeout=FENCED_COMMIT_TIMEOUT_S)

    def drop_all(self) -> None:
        """Lets go of everything without telling."""
        self._carry_out(self._holdings.drop_all())

    def _carry_out(self, step: HoldingStep) -> None:
        for holding in step.dropped:
            self._stop(holding)
        if step.rejoin is not None:
            self._membership.rejoin(step.rejoin)
        if step.released is not None:
            self._spawn(self._membership.released(*step.released))
        for holdings in step.release:
            self._spawn(self._release(holdings))
        for broker, holdings in step.acquire.items():
            self._spawn(self._acquire(broker, holdings))

    # --- taking over --------------------------------------------------------------------------

    async def _acquire(self, broker: str, holdings: list[Holding]) -> None:
        """Asks where to begin, until the broker answers or the queues are no longer wanted."""
        backoff = Backoff()
        while todo := {h.queue: h for h in holdings if self._holdings.is_acquiring(h)}:
            generation, coordinator = self._holdings.generation, self._membership.coordinator
            try:
                answers: dict[MessageQueue, Start | DuemqError] = {}
                starts = self._holdings.starts(todo)
                for start_from, queues in starts.items():
                    answers |= await self._offsets.acquire(
                        broker, queues, generation, start_from, coordinator
                    )
            except DuemqError as error:
                if isinstance(error, NotCoordinator):
                    self._membership.doubt(coordinator)
                self._log_first(backoff, f"taking over queues of {broker}", error)
            else:
                for queue, answer in answers.items():
                    if queue in todo and self._holdings.is_acquiring(todo[queue]):
                        self._acquired(todo[queue], generation, answer, backoff)
            self._beginning.tried(broker)
            if any(map(self._holdings.is_acquiring, holdings)):
                await self._client.pause(broker, backoff)
        self._beginning.tried(broker)

    def _acquired(
        self, holding: Holding, generation: int, answer: Start | DuemqError, backoff: Backoff
    ) -> None:
        if isinstance(answer, FencedMember):
            self._lose([(holding, answer)])
        elif isinstance(answer, DuemqError):
            self._log_first(backoff, f"taking over {holding.queue}", answer)
        else:
            wanted = self._filters[holding.queue.topic]
            source = Source(holding.queue, wanted, generation, answer.offset, answer.topic_id)
            if self._holdings.acquired(holding, source, answer.settled):
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
        limit_s = max(self._settings.release_timeout_s, WARN_S if self._in_order else 0.0)
        while busy := await self._give_up(holdings, limit_s):
            self._warn_of_callbacks(limit_s)
            if not self._in_order:
                # The new owner may get the messages that are being processed here.
                await self._given_up(busy)
                break
            holdings = busy

    async def _give_up(self, holdings: list[Holding], limit_s: float) -> list[Holding]:
        """Gives up each as its callbacks end; answers where some still run."""
        deadline = time.monotonic() + limit_s
        ending = {asyncio.create_task(self._ended(each)): each for each in holdings}
        try:
            late = False
            while ending and not late:
                left_s = deadline - time.monotonic()
                late = left_s <= 0  # one look more: it may be a commit that lasted
                ended, _ = await asyncio.wait(
                    ending, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if ended:
                    await self._given_up([ending.pop(each) for each in ended])
        finally:
            for task in ending:
                task.cancel()
        return list(ending.values())

    def _warn_of_callbacks(self, after_s: float) -> None:
        log.warning("group %s: a callback still runs after %g s", self._group, after_s)

    async def _given_up(self, holdings: list[Holding]) -> None:
        self._lose(await self._committer.commit(holdings))
        self._carry_out(self._holdings.released(holdings))

    def _taken_over(self, source: Source, error: FencedMember | TopicReplaced) -> None:
        """A send-back was refused."""
        if (holding := self._by_source.get(source)) is not None:
            self._lose([(holding, error)])

    def _lose(self, losses: Iterable[Lost]) -> None:
        """Others have taken queues over: drops them, asks the coordinator what is true.

        Of a topic that is another one now: drops what is known of the old one, and begins anew.
        """
        for holding, error in losses:
            if not self._holdings.holds(holding):
                continue
            log.warning("group %s: lost %s: %s", self._group, holding.queue, error)
            if isinstance(error, TopicReplaced):
                self._carry_out(self._holdings.begin_anew(holding))
            else:
                self._carry_out(self._holdings.lost(holding, error))

    def _stop(self, holding: Holding) -> None:
        """No pull and no callback begins any more."""
        source = holding.source
        if source is not None:
            source.pending.drop()
            self._by_source.pop(source, None)
            self._fetcher(holding.queue.broker).remove(source)

    async def _quiet(self, holdings: Iterable[Holding], limit_s: float) -> bool:
        """Waits for running callbacks and send-backs; False: some still run."""
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(self._ended, holdings))
        except TimeoutError:
            return False
        return True

    async def _ended(self, holding: Holding) -> None:
        if holding.source is not None:
            await self._dispatcher.quiet(holding.source)

    # --- pulled (fetcher.PulledSink) -----------------------------------------------------------

    def pulled(
        self, source: Source, messages: list[Message], records: view_pb2.QueueRecordsView
    ) -> None:
        """Hands the messages that the subscription takes to the workers."""
        if settled := self._by_source[source].settled:
            messages = [message for message in messages if message.offset not in settled]
        if messages:
            size_bytes = len(records.records)
            self._dispatcher.dispatch(source, messages, records.next_offset, size_bytes)
        else:
            source.pending.skip_to(records.next_offset)

    def refused(self, source: Source, error: DuemqError) -> None:
        """Fenced: drops the queue.  Replaced, out of range: goes on where the broker can."""
        holding = self._by_source[source]
        if isinstance(error, FencedMember | TopicReplaced):
            self._lose([(holding, error)])
            return
        log.warning("group %s: %s: %s", self._group, source.queue, error)
        if isinstance(error, OffsetOutOfRange):
            self._carry_out(self._holdings.begin_anew(holding))
        else:
            self._fetcher(source.queue.broker).rest(source)

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
            self._spawn(self._fetch(fetcher))
        return fetcher

    async def _fetch(self, fetcher: Fetcher) -> None:
        await self.joined.wait()  # no callback begins before the start is over
        await fetcher.run()
