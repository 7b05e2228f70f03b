"""Serves GroupCoordinator: a stream a member, in front of the coordinator core.

    Join stream ──events──► Rebalancer ──► Coordinator ──told──► _unsent ──(changes saved)──►
    sessions' outboxes ──► streams

What members are told leaves only after the generation and members behind it are kept
(group_store.py), so that a restarted coordinator knows every member that may hold a queue.

One event loop.  The clock is the wall clock at start plus the monotonic clock since, so that
setting the clock ends no sessions.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from duemq.errors import (
    FencedMember,
    GroupNotFound,
    InvalidArgument,
    NotCoordinator,
    Overloaded,
    Unavailable,
)
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import parts
from duemq.protocol.route import RouteCache
from duemq.transport import status
from duemq.transport.streams import first_of
from duemq.v1 import broker_pb2, group_pb2, message_pb2
from duemq_server.broker.filtering.filters import Expressions, check_filter
from duemq_server.broker.groups.coordinator import Assignment, Coordinator, Moved, TurnedOut
from duemq_server.broker.groups.group_table import GroupTable
from duemq_server.broker.groups.members import Group, Hello, check_owned
from duemq_server.broker.groups.subscriptions import TopicFilter, check_count
from duemq_server.broker.rebalancer import Rebalancer
from duemq_server.broker.slices import Slices, compiled
from duemq_server.broker.store.offsets import Offsets

HELLO_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0  # at a stop: for assignments to be saved and told
OUTBOX_EVENTS_MAX = 256  # to one member; one that does not read them loses its stream

SAVE_AGAIN_S = 5.0  # after a disk has refused groups whose members were told
GATHER_S = 0.05
EVENT_QUEUES_AT_ONCE = 512  # of an assignment or a hello: about a millisecond's work
# So many queues may always be named as released: those that a group had before it lost a topic.
RELEASED_MIN = 1_024

HELLO_FIRST = "hello, a member's first event"

Key = tuple[str, str]  # group, member id
Told = Assignment | Moved | TurnedOut


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


class GroupStore(Protocol):
    """Where groups are kept.  Called by the event loop, one call at a time."""

    async def save(self, groups: GroupTable) -> Collection[str]:
        """What has changed is kept when this returns.

        Answers the groups whose members may not be told of it; these are saved with the next
        change.
        """
        ...


class Session:
    """One Join stream."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.leaving = False
        """It said goodbye, which counts also if the stream ends before its turn comes."""
        self.overrun = False
        """It does not read: what it says does not count any more, so that others get its queues."""
        self.outbox: asyncio.Queue[group_pb2.CoordinatorEvent | Exception | None] = asyncio.Queue(
            OUTBOX_EVENTS_MAX
        )

    def tell(self, event: group_pb2.CoordinatorEvent | Exception | None) -> None:
        """Queues an event; an error, or None, is the last one."""
        if self.outbox.full():
            while not self.outbox.empty():
                self.outbox.get_nowait()
            event = Overloaded("this member does not read what it is told")
            self.overrun = True
        self.outbox.put_nowait(event)

    def replace(self, newer: "Session") -> None:
        """The member speaks over another stream now; this one ends."""
        if newer.incarnation == self.incarnation:
            self.tell(FencedMember("this member has come back over another stream"))
            return
        self.tell(
            FencedMember(
                "this member is another process now, started later",
                field="incarnation",
                value=self.incarnation,
                limit=newer.incarnation,
            )
        )


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
        self._group_store = group_store
        self._draining = draining
        self._put_groups = put_groups
        self._clock = clock or steady_clock()
        self._sessions: dict[Key, Session] = {}
        self._unsent: dict[Session, list[Told]] = {}
        self._to_send = asyncio.Event()
        self._stale = False  # the coordinator is still to be told of newer routes
        self._idle = asyncio.Event()  # nothing is to be sent or being saved
        self._idle.set()
        self._rebalancer = Rebalancer(coordinator, self._clock, self._publish)
        self._earlier = asyncio.Event()  # `next_ms` may have become earlier

    # --- background ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Watches sessions and tells members; until cancelled."""
        await first_of(self._rebalancer.run(), self._tick(), self._deliver())

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
        self._to_send.set()  # so that it is saved

    async def _tick(self) -> None:
        while True:
            self._earlier.clear()
            next_ms = self._coordinator.next_ms()
            wait_s = None if next_ms is None else max(0, next_ms - self._clock()) / 1000
            try:
                async with asyncio.timeout(wait_s):
                    await self._earlier.wait()
            except TimeoutError:
                await self._rebalancer.done(self._expire)
            else:  # one look at all groups for many changes; no deadline is as near as that
                await asyncio.sleep(GATHER_S)

    async def _expire(self, _slices: Slices) -> None:
        self._coordinator.expire(self._clock())

    async def _deliver(self) -> None:
        unsaved: Collection[str] = ()
        while True:
            # Who was refused comes again, and that is an event.
            behind = self._coordinator.table.changed and not unsaved
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_AGAIN_S if behind else None):
                    await self._to_send.wait()
            self._to_send.clear()
            unsent, self._unsent = self._unsent, {}
            unsaved = ()
            if self._coordinator.table.changed:
                unsaved = await self._group_store.save(self._coordinator.table)
            await self._tell(unsent, unsaved)
            if not self._unsent:
                self._idle.set()

    async def _tell(
        self, unsent: Mapping[Session, Sequence[Told]], unsaved: Collection[str]
    ) -> None:
        slices = Slices()
        for session, everything in unsent.items():
            for told in everything:
                if told.group in unsaved:
                    session.tell(Unavailable("what this member is to hear could not be stored"))
                    break
                if isinstance(told, TurnedOut):
                    session.tell(told.error)
                elif self._sessions.get((told.group, told.member_id)) is session:
                    session.tell(await self._event(told, slices))

    def _publish(self, everything: Sequence[Told]) -> None:
        """To the streams as they are now: over a later one its hello is answered, nothing older."""
        for told in everything:
            session = self._sessions.get((told.group, told.member_id))
            if session is not None:
                self._put(session, told)
        self._idle.clear()
        self._to_send.set()
        self._earlier.set()

    def _put(self, session: Session, told: Told) -> None:
        """Within a generation an assignment only grows: the newest says it all."""
        unsent = self._unsent.setdefault(session, [])
        before = unsent[-1] if unsent else None
        if (
            isinstance(told, Assignment)
            and isinstance(before, Assignment)
            and before.generation == told.generation
        ):
            unsent[-1] = told
        elif len(unsent) < OUTBOX_EVENTS_MAX:
            unsent.append(told)
        else:
            session.tell(Overloaded("what this member is to hear is not stored as fast"))

    # --- Join ---------------------------------------------------------------------------------

    async def Join(self, requests: AsyncIterator[group_pb2.MemberEvent], context: Any) -> None:
        """A member's life, or the part of it that goes over one stream."""
        hello = await hello_of(await _first_event(requests))
        key = (hello.group, hello.member_id)
        session = Session(hello.incarnation)
        try:
            await self._joined(hello, session, context)
            # They end the stream through the outbox: a write under way must not be cancelled.
            others = [
                asyncio.create_task(self._hear(requests, key, session)),
                asyncio.create_task(self._drained(session)),
            ]
            try:
                await _speak(session, context)
            finally:
                for task in others:
                    task.cancel()
        finally:
            if self._sessions.get(key) is session and not session.leaving:
                del self._sessions[key]
            self._unsent.pop(session, None)

    async def _joined(self, hello: Hello, session: Session, context: Any) -> None:
        try:
            await self._rebalancer.done(lambda _: self._enter(hello, session), hello.group)
        except NotCoordinator as error:
            await context.write(self._elsewhere(error, error.limit))
            raise

    async def _enter(self, hello: Hello, session: Session) -> None:
        known_generation = self._offsets.generation_of(hello.group)
        turned_out = self._coordinator.enter(hello, self._clock(), known_generation)
        key = (hello.group, hello.member_id)
        if (before := self._sessions.get(key)) is not None:
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
        async for event in requests:
            if self._sessions.get(key) is not session or session.overrun:
                return  # the member speaks over another stream now, or is to come again
            kind = event.WhichOneof("event")
            if kind == "heartbeat":
                generation = self._coordinator.heartbeat(*key, self._clock())
                ack = group_pb2.HeartbeatAck(generation=generation)
                session.tell(group_pb2.CoordinatorEvent(heartbeat_ack=ack))
            elif kind == "released":
                self._check_released(key[0], len(event.released.queues))
                self._coordinator.heartbeat(*key, self._clock())  # it may have to wait
                let_go = partial(self._let_go, key, session, event.released)
                await self._rebalancer.done(let_go, key[0])
            elif kind == "leave":
                session.leaving = True
                await self._rebalancer.done_for_sure(lambda _: self._quit(key, session), key[0])
                return
            else:
                raise checks.wrong("event", kind, "heartbeat, released or leave after a hello")

    async def _let_go(
        self, key: Key, session: Session, released: group_pb2.Released, slices: Slices
    ) -> None:
        for part in parts(released.queues, EVENT_QUEUES_AT_ONCE):
            if self._sessions.get(key) is not session:
                return  # the member speaks over another stream now
            queues = map(queue_of, part)
            self._coordinator.let_go(*key, released.generation, queues, self._clock())
            await slices.pause()

    async def _quit(self, key: Key, session: Session) -> None:
        if self._sessions.get(key) is session:
            del self._sessions[key]
            self._coordinator.quit(*key, self._clock())

    async def _event(self, told: Assignment | Moved, slices: Slices) -> group_pb2.CoordinatorEvent:
        if isinstance(told, Moved):
            error = NotCoordinator(
                f"group {told.group!r} is now coordinated by {told.coordinator!r}"
            )
            return self._elsewhere(error, told.coordinator)
        assignment = group_pb2.Assignment(
            generation=told.generation, members=told.members, waits_ms=told.waits_ms
        )
        names: set[str] = set()
        for part in parts(told.queues, EVENT_QUEUES_AT_ONCE):
            names.update(queue.broker for queue in part)
            assignment.queues.extend(
                message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
                for topic, broker, queue_id in part
            )
            await slices.pause()
        found = [broker for name in sorted(names) if (broker := self._routes.broker(name))]
        assignment.brokers.extend(
            group_pb2.BrokerAddress(name=b.name, address=b.address) for b in found
        )
        return group_pb2.CoordinatorEvent(assignment=assignment)

    def _elsewhere(self, error: NotCoordinator, name: str) -> group_pb2.CoordinatorEvent:
        found = self._routes.broker(name)
        return group_pb2.CoordinatorEvent(
            error=status.to_proto(error),
            coordinator=name,
            coordinator_address=found.address if found is not None else "",
        )

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
                await self._idle.wait()
        session.tell(Unavailable("this broker is stopping"))

    # --- looking inside -----------------------------------------------------------------------

    async def ListGroups(
        self, request: group_pb2.ListGroupsRequest, context: Any
    ) -> group_pb2.ListGroupsResponse:
        """Groups that are coordinated here, or have offsets or settings here."""
        coordinated = {group.name: group for group in self._coordinator.groups()}
        return group_pb2.ListGroupsResponse(
            groups=[
                _summary(name, coordinated.get(name))
                for name in sorted({*coordinated, *self._known()})
            ]
        )

    async def DescribeGroup(
        self, request: group_pb2.DescribeGroupRequest, context: Any
    ) -> group_pb2.GroupDescription:
        """One group as this broker sees it."""
        try:
            return await _description(self._coordinator.group(request.group))
        except GroupNotFound:
            if request.group not in self._known():
                raise
            return group_pb2.GroupDescription(
                group=request.group, generation=self._offsets.generation_of(request.group)
            )

    def _known(self) -> set[str]:
        return {*self._offsets.groups(), *self._put_groups()}


def steady_clock() -> Callable[[], int]:
    """Answers a clock in epoch ms that nobody sets."""
    base_s = time.time() - time.monotonic()
    return lambda: int((base_s + time.monotonic()) * 1000)


async def hello_of(event: group_pb2.MemberEvent) -> Hello:
    """Raises InvalidArgument if the event is no hello or has an illegal filter."""
    if event.WhichOneof("event") != "hello":
        raise checks.wrong("event", event.WhichOneof("event"), HELLO_FIRST)
    hello = event.hello
    check_owned("owned", len(hello.owned))
    slices = Slices()
    owned: list[MessageQueue] = []
    for part in parts(hello.owned, EVENT_QUEUES_AT_ONCE):
        owned += map(queue_of, part)
        await slices.pause()
    return Hello(
        group=hello.group,
        member_id=hello.member_id,
        subscriptions=_subscriptions_of(hello.subscriptions, await compiled(hello.subscriptions)),
        session_timeout_ms=hello.session_timeout_ms,
        strategy=hello.strategy,
        generation=hello.generation,
        owned=tuple(owned),
        client=hello.client,
        members=tuple(hello.members),
        incarnation=hello.incarnation,
    )


def _subscriptions_of(
    said: Sequence[group_pb2.Subscription], expressions: Expressions
) -> dict[str, TopicFilter]:
    found: dict[str, TopicFilter] = {}
    if said:  # none: said below, of the whole hello
        check_count(len(said))
    for each in said:
        check_filter(each.filter, each.filter_type, expressions)
        if each.topic in found:
            raise InvalidArgument(
                f"subscriptions: topic {each.topic!r} is named twice",
                field="subscriptions",
                value=each.topic,
                limit="a topic once",
            )
        found[each.topic] = TopicFilter(each.filter, each.filter_type)
    return found


def queue_of(ref: message_pb2.QueueRef) -> MessageQueue:
    """A queue in plain types."""
    return MessageQueue(ref.topic, ref.broker, ref.queue_id)


async def _first_event(requests: AsyncIterator[group_pb2.MemberEvent]) -> group_pb2.MemberEvent:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise checks.wrong("event", None, HELLO_FIRST) from None
    except TimeoutError:
        raise InvalidArgument(
            f"event: no hello within {HELLO_TIMEOUT_S:g} s", field="event"
        ) from None


async def _speak(session: Session, context: Any) -> None:
    while True:
        event = await session.outbox.get()
        if event is None:
            return
        if isinstance(event, Exception):
            raise event
        await context.write(event)
        if event.WhichOneof("event") == "error":
            return


def _summary(name: str, group: Group | None) -> group_pb2.GroupSummary:
    if group is None:
        return group_pb2.GroupSummary(group=name)
    return group_pb2.GroupSummary(
        group=name, coordinator=True, members=len(group.members), generation=group.generation
    )


async def _description(group: Group) -> group_pb2.GroupDescription:
    description = group_pb2.GroupDescription(
        group=group.name,
        coordinator=True,
        generation=group.generation,
        strategy=group.strategy,
        waits_until_ms=group.hold_until_ms or 0,
    )
    members = sorted(group.members.values(), key=lambda each: each.member_id)
    slices = Slices()
    held = await slices.work(group.held())
    for member in members:
        described = description.members.add(
            member_id=member.member_id,
            client=member.client,
            subscriptions=[
                group_pb2.Subscription(
                    topic=topic,
                    filter=wanted.text,
                    filter_type=broker_pb2.FilterType.Name(wanted.filter_type),
                )
                for topic, wanted in member.subscriptions.items()
            ],
            last_heartbeat_ms=member.last_heard_ms,
            session_timeout_ms=member.session_timeout_ms,
            incarnation=member.incarnation,
        )
        for part in parts(held.get(member.member_id, ()), EVENT_QUEUES_AT_ONCE):
            described.queues.extend(
                message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
                for topic, broker, queue_id in part
            )
            await slices.pause()
    return description
