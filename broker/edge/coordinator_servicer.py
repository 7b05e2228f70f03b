"""Serves GroupCoordinator: a stream a member, in front of the coordinator core.

    Join stream ──events──► Rebalancer ──► Coordinator ──told──► Telling ──(changes saved)──►
    sessions' outboxes ──► streams

What members are told leaves only after the generation and members behind it are kept
(members/telling.py), so that a restarted coordinator knows every member that may hold a queue.

One event loop.  The clock is the wall clock at start plus the monotonic clock since, so that
setting the clock ends no sessions.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from duemq.errors import GroupNotFound, NotCoordinator, Unavailable
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import parts
from duemq.protocol.route import RouteCache
from duemq.transport.streams import first_of
from duemq.v1 import group_pb2
from duemq_server.broker.edge.members import messages
from duemq_server.broker.edge.members.sessions import Session, first_event, speak
from duemq_server.broker.edge.members.telling import GroupStore, Key, Telling, Told
from duemq_server.broker.groups.coordinator import Coordinator
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.rebalancer import Rebalancer
from duemq_server.broker.slices import Slices
from duemq_server.broker.store.offsets import Offsets

LAST_WORDS_S = 1.0  # at a stop: for assignments to be saved and told
GATHER_S = 0.05
# So many queues may always be named as released: those that a group had before it lost a topic.
RELEASED_MIN = 1_024


class _Readable(Mapping[str, list[MessageQueue]]):
    """The readable queues of each topic: listed for who asks, as nobody reads all topics."""

    def __init__(self, routes: RouteCache) -> None:
        self._routes = routes

    def __getitem__(self, topic: str) -> list[MessageQueue]:
        route = self._routes.route(topic)
        if route is None:
            raise KeyError(topic)
        return [MessageQueue(topic, each.broker, each.queue_id) for each in route.readable]

    def __iter__(self) -> Iterator[str]:
        return iter(self._routes.topics)

    def __len__(self) -> int:
        return len(self._routes.topics)


class CoordinatorServicer:
    """The methods of duemq.v1.GroupCoordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        routes: RouteCache,
        offsets: Offsets,
        group_store: GroupStore,
        draining: asyncio.Event,
        clock: Callable[[], int] | None = None,
        *,
        put_groups: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`draining`: streams must end.  `put_groups` names the groups that have settings here."""
        self._coordinator = coordinator
        self._routes = routes
        self._offsets = offsets
        self._draining = draining
        self._put_groups = put_groups
        self._clock = clock or steady_clock()
        self._sessions: dict[Key, Session] = {}
        self._stale = False  # the coordinator is still to be told of newer routes
        self._telling = Telling(
            coordinator.table, group_store, routes, self._sessions.get, self._clock
        )
        self._rebalancer = Rebalancer(coordinator, self._clock, self._publish)
        self._earlier = asyncio.Event()  # `next_ms` may have become earlier

    # --- background ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Watches sessions and tells members; until cancelled."""
        await first_of(self._rebalancer.run(), self._tick(), self._telling.run())

    def routes_changed(self) -> None:
        """To be called after every change of the route cache."""
        if not self._stale:
            self._stale = True
            self._rebalancer.post(self._set_routes)

    async def _set_routes(self, _slices: Slices) -> None:
        self._stale = False
        brokers = [broker.name for broker in self._routes.brokers]
        self._publish(self._coordinator.set_routes(_Readable(self._routes), brokers, self._clock()))

    def forget(self, group: str) -> None:
        """The group is deleted.  Raises InvalidArgument while it has members."""
        self._coordinator.forget(group)
        self._telling.save()

    async def _tick(self) -> None:
        awake_ms = 0
        while True:
            self._earlier.clear()
            next_ms, awake_ms = self._coordinator.next_ms(awake_ms), 0
            wait_s = None if next_ms is None else max(0, next_ms - self._clock()) / 1000
            try:
                async with asyncio.timeout(wait_s):
                    await self._earlier.wait()
            except TimeoutError:
                # As of now: that others have their turn before it is no sleep of this broker.
                await self._rebalancer.done(partial(self._expire, self._clock()))
                awake_ms = self._clock()
            else:  # one look at all groups for many changes; no deadline is as near as that
                await asyncio.sleep(GATHER_S)

    async def _expire(self, now_ms: int, _slices: Slices) -> None:
        self._coordinator.expire(now_ms)

    def _publish(self, everything: Sequence[Told]) -> None:
        self._telling.publish(everything)
        self._earlier.set()

    # --- Join ---------------------------------------------------------------------------------

    async def Join(self, requests: AsyncIterator[group_pb2.MemberEvent], context: Any) -> None:
        """A member's life, or the part of it that goes over one stream."""
        await self.join(requests, context, outside=False)

    async def join(
        self, requests: AsyncIterator[group_pb2.MemberEvent], context: Any, *, outside: bool
    ) -> None:
        """As Join; `outside`: through the external port, whose members are told its addresses."""
        hello = await messages.hello_of(await first_event(requests))
        key = (hello.group, hello.member_id)
        session = Session(hello.incarnation, outside=outside)
        try:
            await self._joined(hello, session, context)
            # They end the stream through the outbox: a write under way must not be cancelled.
            others = [
                asyncio.create_task(self._hear(requests, key, session)),
                asyncio.create_task(self._drained(session)),
            ]
            try:
                await speak(session, context)
            finally:
                for task in others:
                    task.cancel()
        finally:
            if self._sessions.get(key) is session and not session.said_goodbye:
                del self._sessions[key]
            self._telling.drop(session)

    async def _joined(self, hello: Hello, session: Session, context: Any) -> None:
        try:
            await self._rebalancer.done(lambda _: self._enter(hello, session), hello.group)
        except NotCoordinator as error:
            moved = messages.elsewhere(error, error.limit, self._routes, outside=session.outside)
            await context.write(moved)
            raise

    async def _enter(self, hello: Hello, session: Session) -> None:
        known_generation = self._offsets.generation_of(hello.group)
        key = (hello.group, hello.member_id)
        before = self._sessions.get(key)
        turned_out = self._coordinator.enter(
            hello,
            self._clock(),
            known_generation,
            replaces_connected=before is not None
            and not before.said_goodbye
            and before.incarnation < hello.incarnation,
        )
        if before is not None:
            before.replace(session)
        self._sessions[key] = session
        self._publish(turned_out)

    async def _hear(
        self, requests: AsyncIterator[group_pb2.MemberEvent], key: Key, session: Session
    ) -> None:
        try:
            await self._hear_all(requests, key, session)
        except Exception as error:
            session.tell(error)
        else:
            session.tell(None)

    async def _hear_all(
        self, requests: AsyncIterator[group_pb2.MemberEvent], key: Key, session: Session
    ) -> None:
        retired = False
        async for event in requests:
            if session.fence is not None:
                if event.WhichOneof("event") != "leave":
                    continue  # it has not read that yet
                self._rebalancer.post(partial(self._gone, key, session.incarnation))
                return
            if self._sessions.get(key) is not session or session.overrun:
                return  # the member speaks over another stream now, or is to come again
            kind = event.WhichOneof("event")
            if kind == "heartbeat":
                generation = self._coordinator.heartbeat(*key, self._clock())
                ack = group_pb2.HeartbeatAck(generation=generation)
                session.tell(group_pb2.CoordinatorEvent(heartbeat_ack=ack))
                if event.heartbeat.leaving and not retired:  # which may wait: it is answered before
                    retired = True
                    await self._rebalancer.done(partial(self._retire, key, session), key[0])
            elif kind == "released":
                self._check_released(key[0], len(event.released.queues))
                self._coordinator.heartbeat(*key, self._clock())  # it may have to wait
                let_go = partial(self._let_go, key, session, event.released)
                await self._rebalancer.done(let_go, key[0])
            elif kind == "leave":
                session.said_goodbye = True
                await self._rebalancer.done_for_sure(lambda _: self._quit(key, session), key[0])
                return
            else:
                raise checks.wrong("event", kind, "heartbeat, released or leave after a hello")

    async def _let_go(
        self, key: Key, session: Session, released: group_pb2.Released, slices: Slices
    ) -> None:
        for part in parts(released.queues, messages.EVENT_QUEUES_AT_ONCE):
            if self._sessions.get(key) is not session:
                return  # the member speaks over another stream now
            queues = map(messages.queue_of, part)
            self._coordinator.let_go(*key, released.generation, queues, self._clock())
            await slices.pause()

    async def _retire(self, key: Key, session: Session, _slices: Slices) -> None:
        if self._sessions.get(key) is session:
            self._coordinator.retire(*key, self._clock())

    async def _gone(self, key: Key, incarnation: int, _slices: Slices) -> None:
        self._coordinator.gone(*key, incarnation)

    async def _quit(self, key: Key, session: Session) -> None:
        if self._sessions.get(key) is session:
            del self._sessions[key]
            self._coordinator.quit(*key, self._clock())

    def _check_released(self, group_name: str, queues: int) -> None:
        """Raises InvalidArgument for more queues than anybody of the group can have."""
        try:
            group = self._coordinator.group(group_name)
        except GroupNotFound:
            most = 0
        else:
            most = max(len(group.holdings), len(group.target))
        checks.count("released.queues", queues, 0, max(most, RELEASED_MIN))

    async def _drained(self, session: Session) -> None:
        """When the broker stops: what is on its way to the member, then the end."""
        await self._draining.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._rebalancer.idle.wait()
                await self._telling.idle.wait()
        session.tell(Unavailable("this broker is stopping"))

    # --- looking inside -----------------------------------------------------------------------

    async def ListGroups(
        self, request: group_pb2.ListGroupsRequest, context: Any
    ) -> group_pb2.ListGroupsResponse:
        """Groups that are coordinated here, or have offsets or settings here."""
        coordinated = {group.name: group for group in self._coordinator.groups()}
        return group_pb2.ListGroupsResponse(
            groups=[
                messages.summary(name, coordinated.get(name))
                for name in sorted({*coordinated, *self._known()})
            ]
        )

    async def DescribeGroup(
        self, request: group_pb2.DescribeGroupRequest, context: Any
    ) -> group_pb2.GroupDescription:
        """One group as this broker sees it."""
        try:
            return await messages.description(self._coordinator.group(request.group))
        except GroupNotFound:
            if request.group not in self._known():
                raise
            return group_pb2.GroupDescription(
                group=request.group, generation=self._offsets.generation_of(request.group)
            )

    def _known(self) -> set[str]:
        return {*self._offsets.groups(), *self._put_groups()}


class FromOutside:
    """The same GroupCoordinator, for members that come through the external port."""

    def __init__(self, groups: CoordinatorServicer) -> None:
        self._groups = groups
        self.ListGroups = groups.ListGroups
        self.DescribeGroup = groups.DescribeGroup

    async def Join(self, requests: AsyncIterator[group_pb2.MemberEvent], context: Any) -> None:
        """A member's life, or the part of it that goes over one stream."""
        await self._groups.join(requests, context, outside=True)


def steady_clock() -> Callable[[], int]:
    """Answers a clock in epoch ms that nobody sets."""
    base_s = time.time() - time.monotonic()
    return lambda: int((base_s + time.monotonic()) * 1000)
