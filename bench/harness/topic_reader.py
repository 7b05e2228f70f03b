"""Reads a topic's whole log, for audits.

By plain pulls of every queue at every broker, without a group and without the consumers of the
SDK: what audits them must not be them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from duemq.administering.asking import refuse_missing
from duemq.errors import MissingBroker
from duemq.message import Message, Origin
from duemq.protocol.route import Broker
from duemq.transport import status
from duemq.transport.blocking_client import BlockingClient
from duemq.v1 import broker_pb2, nameserver_pb2
from duemq.v1.stubs import BrokerStub, NameserverStub

RPC_TIMEOUT_S = 10.0
PULL_BYTES = 4 << 20
PULL_RECORDS = 10_000


def read_topic(nameserver: str, topic: str) -> Iterator[Message]:
    """Every message of the topic that is stored now, queue by queue.

    Raises DuemqErrors; PartialAnswer before the first, if a broker is away that may have others.
    """
    with BlockingClient(nameserver, RPC_TIMEOUT_S) as client:
        for part in _route(client, topic).brokers:
            broker = Broker(part.broker, part.address, store_id=part.store_id)
            for queue in range(part.queues):
                yield from _read_queue(client, broker, Origin(topic, part.broker, queue))


def _route(client: BlockingClient, topic: str) -> nameserver_pb2.TopicRoute:
    cluster: nameserver_pb2.Cluster = client.ask(
        lambda to: NameserverStub(to).GetCluster, nameserver_pb2.GetClusterRequest()
    )
    refuse_missing(
        [
            MissingBroker(each.name, "it is lost")
            for each in cluster.lost_brokers
            if not each.forgotten
        ],
        f"not all of topic {topic} can be read",
    )
    return client.ask(
        lambda to: NameserverStub(to).GetRoute, nameserver_pb2.GetRouteRequest(topic=topic)
    )


def _read_queue(client: BlockingClient, broker: Broker, origin: Origin) -> Iterator[Message]:
    offset = 0
    while True:
        request = broker_pb2.PullRequest(
            queues=[broker_pb2.QueuePull(topic=origin.topic, queue_id=origin.queue, offset=offset)],
            max_bytes=PULL_BYTES,
            max_records=PULL_RECORDS,
        )
        answer: broker_pb2.PullResponse = client.call(
            broker.address, lambda to: partial(BrokerStub(to).Pull, metadata=broker.meant), request
        )
        if not answer.queues:
            return
        pulled = answer.queues[0]
        if pulled.HasField("error"):
            raise status.from_proto(pulled.error)
        if not pulled.run_counts:
            return
        offsets = (
            (start + step, store_ms)
            for start, count, store_ms in zip(
                pulled.run_offsets, pulled.run_counts, pulled.run_store_ms, strict=True
            )
            for step in range(count)
        )
        for record, (place, store_ms) in zip(pulled.records.records, offsets, strict=True):
            yield Message(record, origin, place, store_ms)
        offset = pulled.next_offset
