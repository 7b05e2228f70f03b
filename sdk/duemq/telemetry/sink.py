"""Sends trace batches to the %TRACE% topic: blocking calls, one batch at a time.

Not the SDK's producer, on purpose.  It lives inside brokers and timer services too, and a second
asyncio loop of gRPC in a process makes every event wake both loops.  One unary call for 512 spans
needs no pipeline.

Stored once: a batch keeps its lane (producer id, queue) and sequence while it is sent again.  When
its time is over nobody knows whether it was stored; it is dropped, the epoch is raised, so that
the lanes begin anew, and its broker is avoided for a while.

Owned by: the thread that exports.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from duemq.errors import DuemqError, NotReady, TopicNotFound, Unavailable
from duemq.transport import channel, status
from duemq.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    broker_pb2,
    broker_pb2_grpc,
    message_pb2,
    nameserver_pb2,
    nameserver_pb2_grpc,
)

CALL_TIMEOUT_S = 3.0
"""Of one attempt."""

RETRY_WAIT_S_MAX = 1.0
ROUTE_AGE_S_MAX = 30.0
"""After that, new brokers and queues are asked for."""

AVOID_S = 30.0
"""How long a broker that let a batch down gets no new one, if there is another."""

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """A queue on a broker."""

    broker: str
    address: str
    queue: int


class TraceSink:
    """A connection for trace batches."""

    def __init__(self, nameservers: str, topic: str, timeout_s: float) -> None:
        """`nameservers`: host:port, several separated by commas.  Connects with the first batch."""
        self._nameservers = [address.strip() for address in nameservers.split(",")]
        self._topic = topic
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.Channel] = {}
        self._lanes: list[Lane] = []
        self._lanes_at = 0.0
        self._avoided: dict[str, float] = {}
        self._turn = secrets.randbelow(1 << 16)  # processes begin at different queues
        self._producer_id = secrets.randbits(63)
        self._epoch = 0
        self._sequences: dict[Lane, int] = {}
        self._message_ids = f"{secrets.token_hex(8)}-"
        self._messages = 0

    def send(self, body: bytes) -> None:
        """Returns when the batch is stored.  Raises DuemqError: it is not, or nobody knows."""
        stop_at = time.monotonic() + self._timeout_s
        lane = self._choose(stop_at)
        request = broker_pb2.SendRequest(batches=[self._batch(lane, body)])
        stub = broker_pb2_grpc.BrokerStub(self._channel(lane.address))
        try:
            self._retried(partial(self._send, stub, request, lane.address), stop_at)
        except DuemqError:
            self._epoch += 1
            self._sequences.clear()
            self._avoided[lane.broker] = time.monotonic() + AVOID_S
            self._lanes = []
            raise
        self._sequences[lane] = self._sequences.get(lane, 0) + 1

    def close(self) -> None:
        """Closes the connections."""
        for opened in self._channels.values():
            opened.close()
        self._channels.clear()

    def _batch(self, lane: Lane, body: bytes) -> broker_pb2.Batch:
        self._messages += 1
        record = message_pb2.Record(
            body=body,
            message_id=f"{self._message_ids}{self._messages:08x}",
            born_ms=time.time_ns() // 1_000_000,
        )
        return broker_pb2.Batch(
            topic=self._topic,
            queue_id=lane.queue,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._sequences.get(lane, 0),
            records=message_pb2.RecordBatch(records=[record]),
        )

    def _send(
        self, stub: broker_pb2_grpc.BrokerStub, request: broker_pb2.SendRequest, address: str
    ) -> None:
        answer: broker_pb2.SendResponse = _call(
            address, partial(stub.Send, request, CALL_TIMEOUT_S)
        )
        for result in answer.results:
            if result.HasField("error"):
                raise status.from_proto(result.error)

    # ── routes ───────────────────────────────────────────────────────────────────────

    def _choose(self, stop_at: float) -> Lane:
        """The next lane in turn, of brokers that did not fail lately as far as there are any."""
        now = time.monotonic()
        if not self._lanes or now - self._lanes_at > ROUTE_AGE_S_MAX:
            self._lanes = self._retried(self._find, stop_at)
            self._lanes_at = now
        good = [lane for lane in self._lanes if self._avoided.get(lane.broker, 0.0) <= now]
        lanes = good or self._lanes
        self._turn += 1
        return lanes[self._turn % len(lanes)]

    def _find(self) -> list[Lane]:
        request = nameserver_pb2.GetRouteRequest(topic=self._topic)
        try:
            route: nameserver_pb2.TopicRoute = self._ask(
                lambda stub: stub.GetRoute(request, CALL_TIMEOUT_S)
            )
        except TopicNotFound:
            self._create()
            raise NotReady(f"topic {self._topic} was just made", field="topic") from None
        lanes = [
            Lane(served.broker, served.address, queue)
            for served in route.brokers
            if served.writable
            for queue in range(served.queues)
        ]
        if not lanes:
            raise Unavailable(f"no broker takes messages for {self._topic} now", field="topic")
        return lanes

    def _create(self) -> None:
        """Makes the topic on every broker, so that all can take traces."""
        everything = nameserver_pb2.GetClusterRequest()
        cluster: nameserver_pb2.Cluster = self._ask(
            lambda stub: stub.GetCluster(everything, CALL_TIMEOUT_S)
        )
        request = admin_pb2.CreateTopicRequest(
            topic=admin_pb2.TopicConfig(name=self._topic), if_missing=True
        )
        for broker in cluster.brokers:
            stub = admin_pb2_grpc.BrokerAdminStub(self._channel(broker.address))
            _call(broker.address, partial(stub.CreateTopic, request, CALL_TIMEOUT_S))

    def _ask(self, call: Callable[[nameserver_pb2_grpc.NameserverStub], T]) -> T:
        """Of the first nameserver that is there."""
        failure: DuemqError | None = None
        for address in self._nameservers:
            stub = nameserver_pb2_grpc.NameserverStub(self._channel(address))
            try:
                return _call(address, partial(call, stub))
            except DuemqError as error:
                if not error.retryable:
                    raise
                failure = error
        raise failure or Unavailable("no nameserver is named", field="nameserver")

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=channel.OPTIONS)
        return self._channels[address]

    def _retried(self, call: Callable[[], T], stop_at: float) -> T:
        retrying = Retrying(
            retry=retry_if_exception(lambda error: getattr(error, "retryable", False)),
            stop=stop_after_delay(max(0.0, stop_at - time.monotonic())),
            wait=wait_random_exponential(multiplier=0.05, max=RETRY_WAIT_S_MAX),
            reraise=True,
        )
        return retrying(call)


def _call(address: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        raise status.from_rpc_error(error, address) from error
