"""Reads a topic's whole log, for audits.

By plain pulls of every queue at every broker, without a group and without the consumers of the
SDK: what audits them must not be them.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from duemq.administering.asking import refuse_missing
from duemq.errors import MissingBroker, TopicNotFound
from duemq.message import Message, Origin
from duemq.transport.channel import OPTIONS
from duemq.transport.status import from_proto, from_rpc_error
from duemq.v1 import broker_pb2, broker_pb2_grpc, nameserver_pb2, nameserver_pb2_grpc

RPC_TIMEOUT_S = 10.0
PULL_BYTES = 4 << 20
PULL_RECORDS = 10_000


def read_topic(nameserver: str, topic: str) -> Iterator[Message]:
    """Every message of the topic that is stored now, queue by queue.

    Raises DuemqErrors; PartialAnswer before the first, if a broker is away that may have others.
    """
    for part in _route(nameserver, topic).brokers:
        with grpc.insecure_channel(part.address, options=list(OPTIONS)) as channel:
            stub = broker_pb2_grpc.BrokerStub(channel)
            for queue in range(part.queues):
                yield from _read_queue(stub, Origin(topic, part.broker, queue))


def _route(nameserver: str, topic: str) -> nameserver_pb2.TopicRoute:
    """From the first nameserver that answers."""
    request = nameserver_pb2.GetRouteRequest(topic=topic)
    addresses = nameserver.split(",")
    for address in addresses:
        with grpc.insecure_channel(address, options=list(OPTIONS)) as channel:
            stub = nameserver_pb2_grpc.NameserverStub(channel)
            try:
                cluster = stub.GetCluster(nameserver_pb2.GetClusterRequest(), timeout=RPC_TIMEOUT_S)
                refuse_missing(
                    [
                        MissingBroker(each.name, "it is lost")
                        for each in cluster.lost_brokers
                        if not each.forgotten
                    ],
                    f"not all of topic {topic} can be read",
                )
                return stub.GetRoute(request, timeout=RPC_TIMEOUT_S)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, address)
                if isinstance(failure, TopicNotFound) or address == addresses[-1]:
                    raise failure from error
    raise TopicNotFound(f"no nameserver was named for topic {topic!r}", field="nameserver")


def _read_queue(stub: broker_pb2_grpc.BrokerStub, origin: Origin) -> Iterator[Message]:
    offset = 0
    while True:
        pulled = _pull(stub, origin, offset)
        if pulled is None:
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


def _pull(
    stub: broker_pb2_grpc.BrokerStub, origin: Origin, offset: int
) -> broker_pb2.QueueRecords | None:
    """The next records; None at the end."""
    request = broker_pb2.PullRequest(
        queues=[broker_pb2.QueuePull(topic=origin.topic, queue_id=origin.queue, offset=offset)],
        max_bytes=PULL_BYTES,
        max_records=PULL_RECORDS,
    )
    try:
        answer = stub.Pull(request, timeout=RPC_TIMEOUT_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error, origin.broker) from error
    for pulled in answer.queues:
        if pulled.HasField("error"):
            raise from_proto(pulled.error)
        if pulled.run_counts:
            return pulled
    return None
