"""Sends trace batches to the %TRACE% topic: blocking calls, one batch at a time.

Not the SDK's producer: it lives inside brokers and timer services, too (see BlockingClient).

Stored once: a batch keeps its lane (producer id, queue) and sequence while it is sent again.  When
its time is over nobody knows whether it was stored; it is dropped, the epoch is raised, so that
the lanes begin anew, and its broker is avoided for a while.

Owned by: the thread that exports.
"""

import math
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from duemq.errors import DuemqError, NotReady, TopicNotFound, Unavailable
from duemq.protocol.route import Broker, Queue
from duemq.settings import Tls
from duemq.transport import retrying, status
from duemq.transport.blocking_client import BlockingClient
from duemq.v1 import admin_pb2, broker_pb2, nameserver_pb2
from duemq.v1.stubs import BrokerAdminStub, BrokerStub, NameserverStub

CALL_TIMEOUT_S = 3.0
"""Of one attempt."""

ROUTE_AGE_S_MAX = 30.0
"""After that, new queues are asked for; where nobody tells, the known ones stay."""

AVOID_S = 30.0
"""How long a broker that let a batch down gets no new one, if there is another."""


class TraceQueue(NamedTuple):
    """A queue on a broker, and where that is."""

    broker: Broker
    key: Queue
    """The broker numbers by it, wherever it is reached: also another process of its group."""


class TraceSink:
    """A connection for trace batches."""

    def __init__(
        self, nameservers: str, topic: str, timeout_s: float, tls: Tls | None = None
    ) -> None:
        """`nameservers`: host:port, several separated by commas.  Connects with the first batch."""
        self._client = BlockingClient(nameservers, CALL_TIMEOUT_S, tls)
        self._topic = topic
        self._timeout_s = timeout_s
        self._lanes: list[TraceQueue] = []
        self._lanes_at = -math.inf
        self._avoided: dict[str, float] = {}
        self._turn = secrets.randbelow(1 << 16)  # processes begin at different queues
        self._producer_id = secrets.randbits(63)
        self._epoch = 0
        self._sequences: dict[Queue, int] = {}
        self._message_ids = f"{secrets.token_hex(8)}-"
        self._messages = 0

    def send(self, *bodies: bytes) -> None:
        """Returns when they are stored.  Raises DuemqError: none is, or nobody knows."""
        stop_at = time.monotonic() + self._timeout_s
        lane = self._choose(stop_at)
        request = self._request(lane, bodies)
        try:
            retrying.until_blocking(stop_at, lambda: self._send(lane.broker, request))
        except DuemqError:
            self._epoch += 1
            self._sequences.clear()
            self._avoided[lane.key.broker] = time.monotonic() + AVOID_S
            self._lanes_at = -math.inf
            raise
        self._sequences[lane.key] = self._sequences.get(lane.key, 0) + 1

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _request(self, lane: TraceQueue, bodies: Sequence[bytes]) -> broker_pb2.SendRequest:
        request = broker_pb2.SendRequest()
        batch = request.batches.add(
            topic=self._topic,
            queue_id=lane.key.queue_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._sequences.get(lane.key, 0),
            untraced=True,
        )
        born_ms = time.time_ns() // 1_000_000
        for body in bodies:
            self._messages += 1
            # In its place: a record that is made first would be copied with all that holds it.
            record = batch.records.records.add()
            record.body = body
            record.message_id = f"{self._message_ids}{self._messages:08x}"
            record.born_ms = born_ms
        return request

    def _send(self, broker: Broker, request: broker_pb2.SendRequest) -> None:
        answer: broker_pb2.SendResponse = self._client.call(
            broker.address, lambda to: partial(BrokerStub(to).Send, metadata=broker.meant), request
        )
        for result in answer.results:
            if result.HasField("error"):
                raise status.from_proto(result.error)

    def _choose(self, stop_at: float) -> TraceQueue:
        """The next lane in turn, of brokers that did not fail lately as far as there are any."""
        now = time.monotonic()
        if now - self._lanes_at > ROUTE_AGE_S_MAX:
            try:  # once, if there is where else to go: spans wait
                self._lanes = retrying.until_blocking(now if self._lanes else stop_at, self._find)
            except DuemqError:
                if not self._lanes:
                    raise
            self._lanes_at = now
        good = [lane for lane in self._lanes if self._avoided.get(lane.key.broker, 0.0) <= now]
        lanes = good or self._lanes
        self._turn += 1
        return lanes[self._turn % len(lanes)]

    def _find(self) -> list[TraceQueue]:
        try:
            route: nameserver_pb2.TopicRoute = self._client.ask(
                lambda to: NameserverStub(to).GetRoute,
                nameserver_pb2.GetRouteRequest(topic=self._topic),
            )
        except TopicNotFound:
            self._create()
            raise NotReady(f"topic {self._topic} was just made", field="topic") from None
        lanes = [
            TraceQueue(
                Broker(served.broker, served.address, store_id=served.store_id),
                Queue(served.broker, queue),
            )
            for served in route.brokers
            if served.writable
            for queue in range(served.queues)
        ]
        if not lanes:
            raise Unavailable(f"no broker takes messages for {self._topic} now", field="topic")
        return lanes

    def _create(self) -> None:
        """Makes the topic on every broker that can, so that all take traces."""
        cluster: nameserver_pb2.Cluster = self._client.ask(
            lambda to: NameserverStub(to).GetCluster, nameserver_pb2.GetClusterRequest()
        )
        request = admin_pb2.CreateTopicRequest(
            topic=admin_pb2.TopicConfig(name=self._topic), if_missing=True
        )
        refused: list[DuemqError] = []
        for broker in cluster.brokers:
            try:
                self._client.call(
                    broker.address, lambda to: BrokerAdminStub(to).CreateTopic, request
                )
            except DuemqError as error:
                refused.append(error)
        if refused and len(refused) == len(cluster.brokers):
            raise refused[0]
