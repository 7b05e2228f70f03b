"""Serves GroupCoordinator: a stream a member, in front of the coordinator core.

    Join stream ──events──► Coordinator ──Step──► _unsent ──(snapshot saved)──► sessions' outboxes
    ──► streams

What members are told leaves only after the generation and members behind it are on disk, so that a
restarted coordinator knows every member that may hold a queue.  If the disk refuses, groups go on
without: fencing keeps the offsets right, and the error is logged.

One event loop.  The clock is the wall clock at start plus the monotonic clock since, so that
setting the clock ends no sessions.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from duemq.errors import (
    FencedMember,
    GroupNotFound,
    InvalidArgument,
    NotCoordinator,
    Overloaded,
    Unavailable,
)
from duemq.protocol.balance import MessageQueue
from duemq.protocol.route import RouteCache
from duemq.transport import status
from duemq.transport.streams import first_of
from duemq.v1 import broker_pb2, group_pb2, message_pb2
from duemq_server.broker.filtering.filters import Expressions, check_filter
from duemq_server.broker.groups.coordinator import Assignment, Coordinator, Moved, Step, TurnedOut
from duemq_server.broker.groups.members import Group, Hello, check_owned
from duemq_server.broker.groups.subscriptions import TopicFilter, check_count
from duemq_server.broker.store.offsets import Offsets

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0  # at a stop: for assignments to be saved and told
OUTBOX_EVENTS_MAX = 256  # to one member; one that does not read them loses its stream

GATHER_S = 0.05
LONG_TURN_S = 0.005
EVENT_QUEUES_AT_ONCE = 1_000  # of an assignment: about two milliseconds' work
# So many queues may always be named as released: those that a group had before it lost a topic.
RELEASED_MIN = 1_024

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


class Session:
    """One Join stream."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.outbox: asyncio.Queue[group_pb2.CoordinatorEvent | Exception | None] = asyncio.Queue(
            OUTBOX_EVENTS_MAX
        )

    def tell(self, event: group_pb2.CoordinatorEvent | Exception | None) -> None:
        """Queues an event; an error, or None, is the last one."""
        if self.outbox.full():
            while not self.outbox.empty():
                self.outbox.get_nowait()
            event = Overloaded("this member does not read what it is told")
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


class GroupServicer:
    """The methods of duemq.v1.GroupCoordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        routes: RouteCache,
        offsets: Offsets,
        save: Callable[[bytes], None],
        draining: asyncio.Event,
        clock: Callable[[], int] | None = None,
        *,
        put_groups: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`save` stores a snapshot durably; called in a thread.  `draining`: streams must end.

        `put_groups` names the groups that have settings here.
        """
        self._coordinator = coordinator
        self._routes = routes
        self._offsets = offsets
        self._save = save
        self._draining = draining
        self._put_groups = put_groups
        self._clock = clock or steady_clock()
        self._sessions: dict[Key, Session] = {}
        self._unsent: list[tuple[Session, Told]] = []
        self._to_send = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is to be sent or being saved
        self._idle.set()
        self._rebalancing = asyncio.Lock()  # guards the order of turns, see `_turn`
        self._earlier = asyncio.Event()  # `next_ms` may have become earlier

    # --- background ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Watches sessions and tells members; until cancelled."""
        await first_of(self._tick(), self._deliver())

    def routes_changed(self) -> None:
        """To be called after every change of the route cache."""
        brokers = [broker.name for broker in self._routes.brokers]
        queues = _Readable(self._routes)
        self._publish(self._coordinator.routes_changed(queues, brokers, self._clock()))

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
                self._publish(self._coordinator.tick(self._clock()))
            else:  # one look at all groups for many changes; no deadline is as near as that
                await asyncio.sleep(GATHER_S)

    async def _deliver(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            unsent, self._unsent = self._unsent, []
            if self._coordinator.changed:
                await self._persist(self._coordinator.snapshot())
            for session, told in unsent:
                session.tell(told.error if isinstance(told, TurnedOut) else await self._event(told))
            if not self._unsent:
                self._idle.set()

    async def _persist(self, snapshot: bytes) -> None:
        try:
            await asyncio.to_thread(self._save, snapshot)
        except Exception:
            log.exception("the groups' generations and members could not be saved")

    def _publish(self, step: Step) -> None:
        """To the streams as they are now: over a later one its hello is answered, nothing older."""
        everything: list[Told] = [*step.turned_out, *step.moved, *step.assignments]
        for told in everything:
            session = self._sessions.get((told.group, told.member_id))
            if session is not None:
                self._unsent.append((session, told))
        self._idle.clear()
        self._to_send.set()
        self._earlier.set()

    # --- Join ---------------------------------------------------------------------------------

    async def Join(self, requests: AsyncIterator[group_pb2.MemberEvent], context: Any) -> None:
        """A member's life, or the part of it that goes over one stream."""
        hello = hello_of(await _first_event(requests))
        key = (hello.group, hello.member_id)
        session = Session(hello.incarnation)
        try:
            async with self._turn():
                known_generation = self._offsets.generation_of(hello.group)
                step = self._coordinator.join(hello, self._clock(), known_generation)
                if (before := self._sessions.get(key)) is not None:
                    before.replace(session)
                self._sessions[key] = session
                self._publish(step)
        except NotCoordinator as error:
            await context.write(self._elsewhere(error, error.limit))
            raise
        # They end the stream through the outbox: a write that is under way must not be cancelled.
        others = [
            asyncio.create_task(self._hear(requests, key, session)),
            asyncio.create_task(self._drained(session)),
        ]
        try:
            await _speak(session, context)
        finally:
            for task in others:
                task.cancel()
            if self._sessions.get(key) is session:
                del self._sessions[key]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One rebalance after the other; after a long one, others have the loop for as long."""
        async with self._rebalancing:
            began = time.perf_counter()
            yield
            took_s = time.perf_counter() - began
            if took_s > LONG_TURN_S:
                await asyncio.sleep(took_s)

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
            if self._sessions.get(key) is not session:
                return  # the member speaks over another stream now
            kind = event.WhichOneof("event")
            if kind == "heartbeat":
                generation = self._coordinator.heartbeat(*key, self._clock())
                ack = group_pb2.HeartbeatAck(generation=generation)
                session.tell(group_pb2.CoordinatorEvent(heartbeat_ack=ack))
            elif kind == "released":
                self._check_released(key[0], len(event.released.queues))
                queues = map(queue_of, event.released.queues)
                generation = event.released.generation
                async with self._turn():
                    step = self._coordinator.released(*key, generation, queues, self._clock())
                    self._publish(step)
            elif kind == "leave":
                async with self._turn():
                    self._publish(self._coordinator.leave(*key, self._clock()))
                return
            else:
                raise InvalidArgument(
                    f"event: {kind} cannot follow hello", field="event", value=kind
                )

    async def _event(self, told: Assignment | Moved) -> group_pb2.CoordinatorEvent:
        if isinstance(told, Moved):
            error = NotCoordinator(
                f"group {told.group!r} is now coordinated by {told.coordinator!r}"
            )
            return self._elsewhere(error, told.coordinator)
        assignment = group_pb2.Assignment(generation=told.generation, members=told.members)
        names: set[str] = set()
        for start in range(0, len(told.queues), EVENT_QUEUES_AT_ONCE):
            part = told.queues[start : start + EVENT_QUEUES_AT_ONCE]
            names.update(queue.broker for queue in part)
            assignment.queues.extend(
                message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
                for topic, broker, queue_id in part
            )
            await asyncio.sleep(0)  # let others have a turn
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
        if queues > max(most, RELEASED_MIN):
            raise InvalidArgument(
                f"released.queues: {queues}, group {group_name!r} has {most}",
                field="released.queues",
                value=queues,
                limit=most,
            )

    async def _drained(self, session: Session) -> None:
        """When the broker stops: what is on its way to the member, then the end."""
        await self._draining.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
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
            return _description(self._coordinator.group(request.group))
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


def hello_of(event: group_pb2.MemberEvent) -> Hello:
    """Raises InvalidArgument if the event is no hello or has an illegal filter."""
    if event.WhichOneof("event") != "hello":
        raise InvalidArgument(
            "event: a member's first event is hello", field="event", value=event.WhichOneof("event")
        )
    hello = event.hello
    check_owned("owned", len(hello.owned))
    return Hello(
        group=hello.group,
        member_id=hello.member_id,
        subscriptions=_subscriptions_of(hello.subscriptions),
        session_timeout_ms=hello.session_timeout_ms,
        strategy=hello.strategy,
        generation=hello.generation,
        owned=tuple(map(queue_of, hello.owned)),
        client=hello.client,
        members=tuple(hello.members),
        incarnation=hello.incarnation,
    )


def _subscriptions_of(said: Sequence[group_pb2.Subscription]) -> dict[str, TopicFilter]:
    found: dict[str, TopicFilter] = {}
    if said:  # none: said below, of the whole hello
        check_count(len(said))
    expressions = Expressions()
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
        raise InvalidArgument("event: a member's first event is hello", field="event") from None
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


def _description(group: Group) -> group_pb2.GroupDescription:
    description = group_pb2.GroupDescription(
        group=group.name, coordinator=True, generation=group.generation, strategy=group.strategy
    )
    for member in sorted(group.members.values(), key=lambda each: each.member_id):
        description.members.add(
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
            queues=[
                message_pb2.QueueRef(**queue._asdict()) for queue in group.held_by(member.member_id)
            ],
            last_heartbeat_ms=member.last_heard_ms,
            session_timeout_ms=member.session_timeout_ms,
            incarnation=member.incarnation,
        )
    return description
