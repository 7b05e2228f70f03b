"""A nameserver and a broker in memory for blocking clients: real gRPC on a free port.

Readers find made-up contents; the trace sink finds a broker that loses answers and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc

from duemq.errors import DuemqError, OffsetOutOfRange, TopicNotFound
from duemq.protocol.route import STORE_ID
from duemq.transport import status
from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    nameserver_pb2,
)
from duemq.v1.message_pb2 import Record
from tests.service.playing import PINGS, play

STORE_MS = 1_700_000_000_000
ANSWER_RECORDS_MAX = 7


class FakeQueue:
    """Records from offset `first` on, stored in runs of three."""

    def __init__(self, records: Sequence[Record], first: int = 0) -> None:
        self.records = list(records)
        self.first = first

    @property
    def past(self) -> int:
        return self.first + len(self.records)


class FakeCluster:
    """One server that plays every part; all brokers share its address and are told by queues."""

    def __init__(self, broker: str = "broker-0") -> None:
        self.broker = broker
        self.topics: dict[str, list[FakeQueue]] = {}
        self.address = ""
        self.lost: list[nameserver_pb2.BrokerInstance] = []
        """Other brokers, of which the nameserver says that they are lost."""
        self.before: list[nameserver_pb2.BrokerInstance] = []
        """Further brokers, which are listed in front of it."""
        self.topic_id = self.store_id = 0
        """Of all topics, and of the broker; 0: not told, as by older servers."""
        self.unavailable_calls = 0
        """So many calls fail before they do anything."""
        self.lost_answers = 0
        """So many batches are stored and not answered."""
        self.refusals: list[DuemqError] = []
        self.batches: list[broker_pb2.Batch] = []
        """As stored."""
        self.meant: set[str] = set()
        """Stores that batches were said to be for."""
        self._lanes: dict[tuple[int, int], tuple[int, int]] = {}

    def WatchRoutes(self, request, context):
        self._stumble(context)
        yield nameserver_pb2.RouteUpdate(
            whole=True,
            routes=[self._route(topic) for topic in request.topics if topic in self.topics],
            brokers=[
                nameserver_pb2.BrokerInstance(
                    name=self.broker, address=self.address, store_id=self.store_id
                )
            ],
            lost_brokers=self.lost,
        )

    def GetRoute(self, request, context):
        self._stumble(context)
        if request.topic not in self.topics:
            self._fail(context, TopicNotFound(f"topic {request.topic!r} does not exist"))
        return self._route(request.topic)

    def _route(self, topic):
        served = nameserver_pb2.BrokerQueues(
            broker=self.broker,
            address=self.address,
            queues=len(self.topics[topic]),
            readable=True,
            writable=True,
            store_id=self.store_id,
        )
        return nameserver_pb2.TopicRoute(topic=topic, brokers=[served])

    def DescribeTopic(self, request, context):
        queues = self.topics[request.name]
        return admin_pb2.TopicDescription(
            broker=self.broker,
            topic_id=self.topic_id,
            queues=[
                admin_pb2.QueueDescription(queue_id=i, min_offset=q.first, max_offset=q.past)
                for i, q in enumerate(queues)
            ],
        )

    def Pull(self, request, context):
        self._stumble(context)
        asked = request.queues[0]
        queue = self.topics[asked.topic][asked.queue_id]
        answer = broker_pb2.QueueRecords(topic=asked.topic, queue_id=asked.queue_id)
        if not queue.first <= asked.offset <= queue.past:
            answer.error.CopyFrom(status.to_proto(OffsetOutOfRange("gone", field="offset")))
            return broker_pb2.PullResponse(queues=[answer])
        start = asked.offset - queue.first
        found = queue.records[start : start + ANSWER_RECORDS_MAX]
        answer.records.records.extend(found)
        for at in range(0, len(found), 3):
            answer.run_offsets.append(asked.offset + at)
            answer.run_counts.append(len(found[at : at + 3]))
            answer.run_store_ms.append(STORE_MS + asked.offset + at)
        answer.next_offset = asked.offset + len(found)
        return broker_pb2.PullResponse(queues=[answer])

    def GetCluster(self, request, context):
        broker = nameserver_pb2.BrokerInstance(name=self.broker, address=self.address)
        return nameserver_pb2.Cluster(brokers=[*self.before, broker])

    def CreateTopic(self, request, context):
        self.topics.setdefault(request.topic.name, [FakeQueue([]), FakeQueue([])])
        return admin_pb2.TopicDescription(broker=self.broker)

    def Send(self, request, context):
        self._stumble(context)
        told = context.invocation_metadata()
        self.meant.update(value for name, value in told if name == STORE_ID)
        (batch,) = request.batches
        if self.refusals:
            error = status.to_proto(self.refusals.pop())
            return broker_pb2.SendResponse(results=[broker_pb2.BatchResult(error=error)])
        lane = (batch.producer_id, batch.queue_id)
        epoch, following = self._lanes.get(lane, (batch.producer_epoch, batch.sequence))
        if batch.producer_epoch > epoch:
            epoch, following = batch.producer_epoch, batch.sequence
        assert (batch.producer_epoch, batch.sequence) <= (epoch, following)
        if batch.sequence == following:
            self.batches.append(batch)
            self.topics[batch.topic][batch.queue_id].records.extend(batch.records.records)
            self._lanes[lane] = (epoch, following + 1)
        if self.lost_answers:
            self.lost_answers -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return broker_pb2.SendResponse(results=[broker_pb2.BatchResult(store_ms=STORE_MS)])

    def _stumble(self, context):
        if self.unavailable_calls:
            self.unavailable_calls -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "stumbled")

    def _fail(self, context, error):
        context.set_trailing_metadata(status.trailer(error))
        context.abort(status.status_of(error), error.message)


@contextmanager
def serving(cluster: FakeCluster) -> Iterator[FakeCluster]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=PINGS)
    files = (nameserver_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, broker_pb2.DESCRIPTOR)
    play(cluster, server, *files)
    cluster.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield cluster
    finally:
        server.stop(grace=None).wait()
