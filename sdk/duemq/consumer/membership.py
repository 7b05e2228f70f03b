"""A consumer's place in its group: one stream to the group's coordinator, renewed for ever.

    connect ──Hello(what I own)──► Assignment … Assignment …      HeartbeatAck …
       ▲                                │                              │ none for a session timeout
       └──── backoff ◄── stream broke ──┴── NOT_COORDINATOR: ask that one ── FENCED_MEMBER: let
       go, rejoin

A broken stream costs nothing as long as the member is back within its session timeout.  The
coordinator is computed from the brokers' names; where brokers and client see different clusters
for a moment, the answer NOT_COORDINATOR names the right one.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import grpc.aio

from duemq import balance
from duemq.balance import MessageQueue
from duemq.client import Client
from duemq.errors import DuemqError, FencedMember, NotCoordinator, Rejected, Timeout, Unavailable
from duemq.rpc import status, streams
from duemq.rpc.backoff import Backoff
from duemq.v1 import group_pb2, group_pb2_grpc, message_pb2

log = logging.getLogger(__name__)

HEARTBEATS_PER_SESSION = 4
REJOIN_WAIT_S_MIN = 0.05
REJOIN_WAIT_S_MAX = 2.0

Stream = grpc.aio.StreamStreamCall[group_pb2.MemberEvent, group_pb2.CoordinatorEvent]


class Owner(Protocol):
    """Who lives by the assignments.  Called in the event loop."""

    def claim(self) -> Iterable[MessageQueue]:
        """A hello is sent: answers what is not released yet.  Nothing else is ours from now on."""
        ...

    def assigned(self, generation: int, queues: frozenset[MessageQueue]) -> None:
        """The whole of what shall be owned from now on."""
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
        *,
        group: str,
        subscriptions: Mapping[str, str],
        session_timeout_s: float,
        strategy: str,
    ) -> None:
        self.member_id = new_member_id()
        self.generation = 0
        """Of the last assignment."""
        self._client = client
        self._owner = owner
        self._group = group
        self._subscriptions = dict(subscriptions)
        self._session_timeout_s = session_timeout_s
        self._strategy = strategy
        self._stream: Stream | None = None
        self._hint = ""  # coordinator as the last NOT_COORDINATOR named it
        self._acked = asyncio.Event()
        self._rejoin = asyncio.Event()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._leaving = False
        self._members: list[str] = []  # of the last assignment
        self._floor = 0  # a generation that a broker has seen

    async def run(self) -> None:
        """Stays a member until `leave` or cancelled.

        Raises Rejected if the group does not take this member.
        """
        backoff = Backoff(REJOIN_WAIT_S_MIN, REJOIN_WAIT_S_MAX)
        while not self._leaving:
            before = self.generation
            try:
                await self._session()
            except Rejected:
                raise
            except NotCoordinator as error:
                self._hint = error.limit
                log.debug("group %s: %s", self._group, error)
            except FencedMember as error:
                log.warning("group %s: %s", self._group, error)
                await self._owner.fenced()
            except DuemqError as error:
                if self._leaving:
                    return
                self._log_interruption(error, first=backoff.attempts == 0)
            if self.generation > before:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def rejoin(self, seen_generation: int = 0) -> None:
        """Asks for the assignment anew: a broker says that a newer one is out."""
        self._floor = max(self._floor, seen_generation)
        self._rejoin.set()

    async def released(self, generation: int, queues: Iterable[MessageQueue]) -> None:
        """Tells the coordinator; if that fails, the next Hello will."""
        event = group_pb2.Released(generation=generation, queues=[ref(q) for q in queues])
        await self._send(group_pb2.MemberEvent(released=event))

    async def leave(self) -> None:
        """Says goodbye; `run` returns when the coordinator has heard it, or the stream is lost."""
        self._leaving = True
        stream = self._stream
        await self._send(group_pb2.MemberEvent(leave=group_pb2.Leave()))
        if stream is not None:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                await stream.done_writing()

    async def _session(self) -> None:
        name = self._coordinator()
        channel = self._client.channel(self._client.broker(name).address)
        stub = group_pb2_grpc.GroupCoordinatorStub(channel)
        stream: Stream = stub.Join()
        self._rejoin.clear()
        try:
            await streams.write(stream, self._hello(), name)
            self._stream = stream
            await streams.first_of(self._read(stream, name), self._beat(), self._rejoin.wait())
        finally:
            self._stream = None
            stream.cancel()

    def _log_interruption(self, error: DuemqError, *, first: bool) -> None:
        if not first:
            log.debug("group %s: still without its coordinator: %s", self._group, error)
        elif self.generation:
            log.warning("group %s: lost its coordinator: %s", self._group, error)
        else:
            log.info("group %s: not joined yet: %s", self._group, error)

    def _coordinator(self) -> str:
        hint, self._hint = self._hint, ""
        brokers = [broker.name for broker in self._client.routes.brokers]
        name = hint if hint in brokers else balance.coordinator(self._group, brokers)
        if name is None:
            raise Unavailable("no broker is known")
        return name

    def _hello(self) -> group_pb2.MemberEvent:
        hello = group_pb2.Hello(
            group=self._group,
            member_id=self.member_id,
            subscriptions=[
                group_pb2.Subscription(topic=topic, filter=each)
                for topic, each in self._subscriptions.items()
            ],
            session_timeout_ms=round(self._session_timeout_s * 1000),
            strategy=self._strategy,
            generation=max(self.generation, self._floor),
            owned=[ref(queue) for queue in self._owner.claim()],
            client=f"{socket.gethostname()} pid {os.getpid()}",
            members=self._members,
        )
        return group_pb2.MemberEvent(hello=hello)

    async def _read(self, stream: Stream, name: str) -> None:
        while True:
            event = await streams.read(stream, name)
            self._acked.set()
            kind = event.WhichOneof("event")
            if kind == "assignment":
                self.generation = event.assignment.generation
                self._members = list(event.assignment.members)
                queues = (
                    MessageQueue(q.topic, q.broker, q.queue_id) for q in event.assignment.queues
                )
                self._owner.assigned(self.generation, frozenset(queues))
            elif kind == "error":
                error = status.from_proto(event.error)
                if isinstance(error, NotCoordinator):
                    error.limit = event.coordinator  # as where the call itself fails
                raise error

    async def _beat(self) -> None:
        """Raises Timeout when the coordinator is silent; write failures show in `_read`."""
        interval_s = self._session_timeout_s / HEARTBEATS_PER_SESSION
        while True:
            self._acked.clear()
            heartbeat = group_pb2.Heartbeat(generation=self.generation)
            await self._send(group_pb2.MemberEvent(heartbeat=heartbeat))
            await asyncio.sleep(interval_s)
            if not self._acked.is_set():
                raise Timeout(f"no heartbeat answer within {interval_s:g} s")

    async def _send(self, event: group_pb2.MemberEvent) -> None:
        """Writes to the stream, if there is one; its failure shows in `_read`."""
        async with self._writing:
            if self._stream is not None:
                with suppress(grpc.RpcError, asyncio.InvalidStateError):
                    await self._stream.write(event)
