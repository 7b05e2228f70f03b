"""A consumer's place in its group: one stream to the group's coordinator, renewed for ever.

How it breaks and is taken up again: README.md, "A queue's way through a rebalance".
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Protocol, cast

import grpc.aio

from duemq.consumer.delivery.lease import Lease
from duemq.consumer.fetching.subscription import Filter
from duemq.consumer.group.standing import After, Standing
from duemq.errors import DuemqError, FencedMember, NotCoordinator, Timeout, Unavailable
from duemq.protocol.balance import MessageQueue
from duemq.transport import status, streams
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff
from duemq.v1 import broker_pb2, group_pb2, message_pb2, stubs

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0
LEAVE = group_pb2.MemberEvent(leave=group_pb2.Leave())

Stream = grpc.aio.StreamStreamCall[group_pb2.MemberEvent, group_pb2.CoordinatorEvent]


class Owner(Protocol):
    """Who lives by the assignments.  Called in the event loop."""

    def claim(self) -> Iterable[MessageQueue]:
        """A hello is sent: answers what is not released yet.  Nothing else is ours from now on."""
        ...

    def assigned(
        self, generation: int, queues: frozenset[MessageQueue], reads_for_ms: Mapping[str, int]
    ) -> None:
        """The whole of what shall be owned from now on.

        `reads_for_ms`: for how long the group has read each topic, as far as that is known.
        """
        ...

    async def fenced(self) -> None:
        """The session is over: let go of everything at once, without `released`."""
        ...


def new_member_id() -> str:
    """Answers an id that no other member has."""
    return f"{socket.gethostname()[:200]}-{os.getpid()}-{secrets.token_hex(4)}"


def ref(queue: MessageQueue) -> message_pb2.QueueRef:
    """Answers the queue as it travels."""
    return message_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


class Membership:
    """One member of one group."""

    def __init__(
        self,
        client: Client,
        owner: Owner,
        lease: Lease | None,
        *,
        group: str,
        subscriptions: Mapping[str, Filter],
        session_timeout_s: float,
        strategy: str,
        member_name: str | None = None,
    ) -> None:
        """`lease`: is kept up to date; while it is over, a hello claims nothing."""
        self.member_id = member_name or new_member_id()
        self._client = client
        self._owner = owner
        self._lease = lease
        # Newer processes have greater ones, also when they begin in the same millisecond.
        incarnation = time.time_ns() if member_name else 0
        self._standing = Standing(group, session_timeout_s * 1000, incarnation)
        self._group = group
        self._subscriptions = dict(subscriptions)
        self._session_timeout_s = session_timeout_s
        self._strategy = strategy
        self._stream: Stream | None = None
        self._rejoin = asyncio.Event()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._left = asyncio.Event()  # ends the wait between two sessions

    @property
    def coordinator(self) -> str:
        """That made the last assignment."""
        return self._standing.coordinator

    @property
    def trouble(self) -> str:
        """What the last attempt to join ended with, for people."""
        return self._standing.trouble

    async def run(self) -> None:
        """Stays a member until `leave` or cancelled.

        Raises Rejected if the group does not take this member, FencedMember if a newer process has
        the name of this static member.
        """
        standing = self._standing
        backoff = Backoff()
        while not standing.left:
            before, told = standing.generation, standing.members
            try:
                await self._session()
            except DuemqError as error:
                if standing.members is not told:  # it was a member until now
                    backoff.reset()
                after = standing.failed(error, time.time_ns())
                if after is After.GIVE_UP:
                    raise
                if after is After.LET_GO:
                    log.warning("group %s: %s", self._group, error)
                    await self._owner.fenced()
                elif not standing.left:
                    self._log_interruption(error, first=backoff.attempts == 0)
            if standing.generation > before:
                backoff.reset()
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._left.wait()
        await self._say_goodbye()

    def rejoin(self, seen_generation: int = 0) -> None:
        """Asks for the assignment anew: a broker says that a newer one is out."""
        self._standing.seen(seen_generation)
        self._rejoin.set()

    def doubt(self, coordinator: str) -> None:
        """A queue's broker does not follow the coordinator: asks for the one that this sees."""
        if self._standing.disagrees(coordinator, self._brokers()):
            self._rejoin.set()

    async def released(self, generation: int, queues: Iterable[MessageQueue]) -> None:
        """Tells the coordinator; if that fails, the next Hello will."""
        event = group_pb2.Released(generation=generation, queues=[ref(q) for q in queues])
        await self._send(group_pb2.MemberEvent(released=event))

    async def retire(self) -> None:
        """Asks for no queue any more; what it has is released as work ends.

        A static member's queues wait for its return.  A coordinator of an older release takes no
        notice: it hears of the end by `leave`.
        """
        if not self._standing.incarnation:
            self._standing.leaving = True
            await self._say_heartbeat()

    async def leave(self, *, silently: bool = False) -> None:
        """Says goodbye, so that others get the queues at once; `run` returns when it is heard.

        `silently`, and if it is static, the member only stops: its queues wait for the end of its
        session, but for those that it is just telling to have released.
        """
        standing = self._standing
        standing.leave(silently=silently)
        self._left.set()
        stream = self._stream
        if stream is None or standing.incarnation:
            self._rejoin.set()  # ends the session
            return
        if standing.owes_goodbye:
            await self._send(LEAVE)
        else:
            await asyncio.sleep(0)  # who is about to tell something asks for its turn
        async with self._writing:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                await stream.done_writing()

    async def _say_goodbye(self) -> None:
        """To whoever coordinates now, where the stream was lost before the Leave was heard."""
        if not self._standing.may_say_goodbye(_now_ms()):
            return
        backoff = Backoff()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while self._standing.owes_goodbye:
                    try:
                        await self._goodbye()
                    except NotCoordinator as error:
                        self._standing.redirected(error.limit)
                    except Unavailable as error:
                        log.debug("group %s: not left yet: %s", self._group, error)
                    except DuemqError as error:
                        log.debug("group %s: not left: %s", self._group, error)
                        return
                    else:
                        return
                    await asyncio.sleep(backoff.next_s())

    async def _goodbye(self) -> None:
        name = self._standing.ask(self._brokers())
        stream = self._join(name)
        try:
            await streams.write(stream, self._hello(()), name)
            await streams.write(stream, LEAVE, name)
            await status.answer(stream.done_writing(), name)
            while (event := await _next_event(stream, name)) is not None:
                self._raise_error_of(event)
        finally:
            stream.cancel()

    def _join(self, name: str) -> Stream:
        channel = self._client.channel(self._client.broker(name).address)
        stream: Stream = stubs.GroupCoordinatorStub(channel).Join()
        return stream

    async def _session(self) -> None:
        name = self._standing.ask(self._brokers())
        stream = self._join(name)
        self._rejoin.clear()
        self._standing.begin()
        if self._lease is not None:
            self._lease.begin()
            self._lease.sent()  # before the look: this process may be stopped after it
            if self._lease.over:
                await self._owner.fenced()
        owned = tuple(self._owner.claim())
        try:
            reading = self._read(stream, name, claimed=bool(owned))
            talking = self._talk(stream, name, owned)
            await streams.first_of(reading, talking, self._rejoin.wait())
        finally:
            self._stream = None
            stream.cancel()

    async def _talk(self, stream: Stream, name: str, owned: Iterable[MessageQueue]) -> None:
        """The hello, then heartbeats.

        gRPC's write may wait for ever for a call whose channel is closed while it begins.  The
        hello has half of the session: in the other half the member can come back.
        """
        wait_s = self._session_timeout_s / 2
        try:
            async with asyncio.timeout(wait_s):
                await streams.write(stream, self._hello(owned), name)
        except TimeoutError:
            raise Timeout(f"{name}: the stream did not begin within {wait_s:g} s") from None
        self._stream = stream
        await self._beat()

    def _log_interruption(self, error: DuemqError, *, first: bool) -> None:
        if not first or isinstance(error, NotCoordinator):
            log.debug("group %s: still without its coordinator: %s", self._group, error)
        elif self._standing.generation:
            log.warning("group %s: lost its coordinator: %s", self._group, error)
        else:
            log.info("group %s: not joined yet: %s", self._group, error)

    def _brokers(self) -> list[str]:
        return [broker.name for broker in self._client.routes.brokers]

    def _hello(self, owned: Iterable[MessageQueue]) -> group_pb2.MemberEvent:
        hello = group_pb2.Hello(
            group=self._group,
            member_id=self.member_id,
            subscriptions=[
                group_pb2.Subscription(
                    topic=topic,
                    filter=each.text,
                    filter_type=cast(broker_pb2.FilterType, each.filter_type),
                )
                for topic, each in self._subscriptions.items()
            ],
            session_timeout_ms=round(self._session_timeout_s * 1000),
            strategy=self._strategy,
            generation=self._standing.hello_generation,
            owned=[ref(queue) for queue in owned],
            client=f"{socket.gethostname()} pid {os.getpid()}",
            members=self._standing.members,
            incarnation=self._standing.incarnation,
            leaving=self._standing.leaving,
        )
        return group_pb2.MemberEvent(hello=hello)

    async def _read(self, stream: Stream, name: str, *, claimed: bool) -> None:
        """Ends with the stream, if a Leave was its last word; else the end is an error.

        `claimed`: the hello did claim queues.
        """
        lease = self._lease
        while True:
            event = await _next_event(stream, name)
            if event is None:
                if self._standing.stream_ended():
                    return
                raise Unavailable(f"{name} ended the stream")
            self._standing.heard(_now_ms())
            try:
                self._raise_error_of(event)
            except FencedMember:  # which the end of the stream will say, too
                await self._owner.fenced()  # before others hear that they may have the queues
                await self._send(LEAVE)
                continue
            if claimed and lease is not None and lease.over:
                # Others may have had the queues between the hello's sending and its arrival.
                raise FencedMember("the session was over before the coordinator answered")
            claimed = False
            kind = event.WhichOneof("event")
            if kind == "assignment":
                self._assigned(event.assignment, name)
            if lease is not None:
                lease.heard(acknowledgement=kind == "heartbeat_ack")

    def _assigned(self, assignment: group_pb2.Assignment, coordinator: str) -> None:
        for broker in assignment.brokers:
            self._client.learn(broker.name, broker.address)
        self._standing.assigned(assignment.generation, coordinator, assignment.members)
        if assignment.waits_ms and not assignment.queues:
            log.warning(
                "group %s: its queues wait %.1f s at most for members that may still have them",
                self._group,
                assignment.waits_ms / 1000,
            )
        queues = (MessageQueue(q.topic, q.broker, q.queue_id) for q in assignment.queues)
        reads_for_ms = dict(assignment.reads_for_ms)
        self._owner.assigned(assignment.generation, frozenset(queues), reads_for_ms)

    async def _beat(self) -> None:
        """Raises Timeout when the coordinator is silent; write failures show in `_read`."""
        while True:
            self._standing.beat()
            await self._say_heartbeat()
            await asyncio.sleep(self._standing.heartbeat_ms / 1000)

    async def _say_heartbeat(self) -> None:
        if self._stream is None:
            return  # the next hello says it all
        if self._lease is not None:
            self._lease.sent()
        standing = self._standing
        heartbeat = group_pb2.Heartbeat(generation=standing.generation, leaving=standing.leaving)
        await self._send(group_pb2.MemberEvent(heartbeat=heartbeat))

    def _raise_error_of(self, event: group_pb2.CoordinatorEvent) -> None:
        if event.WhichOneof("event") == "error":
            error = status.from_proto(event.error)
            if isinstance(error, NotCoordinator):
                error.limit = event.coordinator  # as where the call itself fails
                if event.coordinator_address:
                    self._client.learn(event.coordinator, event.coordinator_address)
            raise error

    async def _send(self, event: group_pb2.MemberEvent) -> None:
        """Writes to the stream, if there is one; its failure shows in `_read`."""
        async with self._writing:
            if self._stream is not None:
                with suppress(DuemqError, asyncio.InvalidStateError):
                    await status.answer(self._stream.write(event))


def _now_ms() -> float:
    return monotonic() * 1000


async def _next_event(stream: Stream, peer: str) -> group_pb2.CoordinatorEvent | None:
    """None: the stream has ended well.  Raises a DuemqError where it failed."""
    event = await status.answer(stream.read(), peer)
    return event if isinstance(event, group_pb2.CoordinatorEvent) else None
