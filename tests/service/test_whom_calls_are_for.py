"""Where a broker was, another one may be: calls say whom they are for, and it takes none."""

import asyncio
from dataclasses import replace
from importlib import import_module

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from duemq import aio
from duemq.errors import InvalidArgument, Unavailable
from duemq.protocol.route import STORE_ID, RouteCache
from duemq.transport import channel, status
from duemq.transport.cluster_client import Client
from duemq.v1 import admin_pb2, broker_pb2
from duemq_analytics.options import Options
from duemq_analytics.source import plan
from duemq_analytics.source.client import QueueClient
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.broker.edge.timer_admin_servicer import TimerAdminServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.timer_service.edge.fire_stream import FireStream
from tests.service.running_broker import batch, running_broker, topic_name
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster, until
from tests.service.test_timer_service import TOPIC, bodies_of, delivered, running_shard, send

GROUP = "g"
PULL = broker_pb2.PullRequest(request_id=1, queues=[broker_pb2.QueuePull(topic="t")])
UNARY = {
    "FetchFrames": broker_pb2.FetchFramesRequest(topic="t"),
    "ClaimTimerQueues": broker_pb2.ClaimTimerQueuesRequest(),
    "Send": broker_pb2.SendRequest(request_id=1, batches=[batch("t", [b"x"])]),
    "Pull": PULL,
    "AcquireQueues": broker_pb2.AcquireQueuesRequest(group=GROUP),
    "CommitOffsets": broker_pb2.CommitOffsetsRequest(group=GROUP),
    "GetOffsets": broker_pb2.GetOffsetsRequest(group=GROUP),
    "SendBack": broker_pb2.SendBackRequest(group=GROUP),
}
STREAMS = {"SendStream": UNARY["Send"], "PullStream": PULL}


async def first(call):
    """The answer, or first answer, of a call."""
    try:
        return await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        raise status.from_rpc_error(error) from None


@pytest.mark.parametrize("method", [*UNARY, *STREAMS])
async def test_a_call_for_another_broker_is_refused(method, tmp_path) -> None:
    async with running_broker(tmp_path, auto_create_topics=True) as (broker, client):
        own = broker._opened.store_id
        call = getattr(client.broker, method)

        def ask(metadata):
            if method in UNARY:
                return first(call(UNARY[method], metadata=metadata))
            return first(call(iter([STREAMS[method]]), metadata=metadata))

        with pytest.raises(Unavailable, match=f"{own:016x}, not {own ^ 1:016x}"):
            await ask(((STORE_ID, str(own ^ 1)),))
        for rubbish in ("b1", "-1", "", "9" * 5_000):
            with pytest.raises(InvalidArgument, match=f"{STORE_ID}: '{rubbish[:20]}"):
                await ask(((STORE_ID, rubbish),))
        assert broker.store.messages_in == 0
        if method in ("Send", "SendStream"):
            await ask(((STORE_ID, str(own)),))
            assert broker.store.messages_in == 1


async def test_nothing_is_administered_at_another_broker(tmp_path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        other = ((STORE_ID, str(broker._opened.store_id ^ 1)),)
        stubs = client.admin, client.group_admin, client.message_admin, client.timer_admin
        for stub in (*stubs, client.groups):
            module, name = stub.service
            service = import_module(module).DESCRIPTOR.services_by_name[name]
            for method in service.methods:
                request = GetMessageClass(method.input_type)()
                if method.client_streaming:
                    request = iter([request])
                with pytest.raises(Unavailable, match="this broker has"):
                    await first(getattr(stub, method.name)(request, metadata=other))
        own = ((STORE_ID, str(broker._opened.store_id)),)
        await first(client.admin.DescribeBroker(admin_pb2.DescribeBrokerRequest(), metadata=own))


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


def b0_where_b1_was(cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
    """As clients see it whose nameservers have not heard of it yet."""
    known = Client.broker
    address = cluster.brokers["b0"].server.advertised

    def broker(self, name):
        found = known(self, name)
        return replace(found, address=address) if name == "b1" else found

    patch.setattr(Client, "broker", broker)


@pytest.fixture
async def refused(monkeypatch):
    """The store ids that brokers were asked for and do not have."""
    asked: list[int] = []
    check = TimerAdminServicer.check_meant

    def noted(self, store_id):
        try:
            check(self, store_id)
        except Unavailable:
            asked.append(store_id)
            raise

    monkeypatch.setattr(TimerAdminServicer, "check_meant", noted)
    return asked


def ends(cluster: Cluster, topic: str) -> dict[str, int]:
    return {
        name: sum(queue.max_offset for queue in broker.store.queues_of(topic))
        for name, broker in cluster.brokers.items()
    }


async def test_a_producer_leaves_nothing_at_another_broker(cluster, refused, monkeypatch) -> None:
    topic = topic_name()
    await cluster.create_topic(topic, queues=1)
    async with aio.Producer(cluster.nameserver) as producer:
        keys: dict[str, str] = {}
        while len(keys) < 2:
            key = f"k{sum(ends(cluster, topic).values())}"
            keys[(await producer.send(topic, b"probe", ordering_key=key)).broker] = key
        before = ends(cluster, topic)
        with monkeypatch.context() as patch:
            b0_where_b1_was(cluster, patch)
            producer._sender._links["b1"].reset(Unavailable("it is away"))
            waiting = producer.submit(topic, b"for b1", ordering_key=keys["b1"])
            await until(lambda: bool(refused))
            await producer.send(topic, b"for b0", ordering_key=keys["b0"])
        assert (await waiting).broker == "b1"
    assert ends(cluster, topic) == {name: end + 1 for name, end in before.items()}


async def test_a_reader_hears_nothing_of_another_broker(cluster, refused, monkeypatch) -> None:
    topic = topic_name()
    await cluster.create_topic(topic, queues=1)
    found = []

    async def read(count):
        while len(found) < count:
            found.extend(await reader.poll(1.0))

    async with aio.PullConsumer("readers", nameserver=cluster.nameserver) as reader:
        await reader.assign(topic, start_from="earliest")
        await cluster.send(topic, [b"b0"] * 3, broker="b0")
        await read(3)
        await cluster.stop_broker("b1")
        with monkeypatch.context() as patch:
            b0_where_b1_was(cluster, patch)
            await cluster.start_broker("b1")
            await cluster.send(topic, [b"b1"] * 3, broker="b1")
            async with asyncio.timeout(WAIT_S):
                while not refused:
                    found += await reader.poll(0.1)
            with pytest.raises(Unavailable):
                await reader.commit()
        async with asyncio.timeout(WAIT_S):
            await read(6)
        await reader.commit()
    assert sorted((each.broker, each.body) for each in found) == [
        *[("b0", b"b0")] * 3,
        *[("b1", b"b1")] * 3,
    ]


async def test_a_timer_service_leaves_nothing_at_another_broker(
    cluster, refused, monkeypatch, tmp_path
) -> None:
    """Which has the address since the shard asked who is there."""
    await cluster.create_topic(TOPIC, queues=2)
    streamed = FireStream._stream

    async def to_b1(self, connection):
        async with channel.connect(cluster.brokers["b1"].server.address) as b1:
            await streamed(self, b1 if self.broker == "b0" else connection)

    with monkeypatch.context() as patch:
        patch.setattr(FireStream, "_stream", to_b1)
        async with running_shard(cluster, tmp_path) as shard:
            await send(cluster, [b"for b0"], [0], queue_id=0)
            await until(lambda: bool(refused or ends(cluster, TOPIC)["b1"]))
            patch.undo()
            await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
    assert bodies_of(await delivered(cluster)) == [b"for b0"]
    assert ends(cluster, TOPIC) == {"b0": 1, "b1": 0}


async def test_a_reader_of_ranges_takes_no_broker_for_another(cluster, refused, monkeypatch):
    """As tasks of Spark read: planned, then read."""
    topic = topic_name()
    await cluster.create_topic(topic, queues=1)
    for name in ("b0", "b1"):
        await cluster.send(topic, [name.encode()] * 3, broker=name)
    options = Options(topic, nameservers=(cluster.nameserver,))

    def planned(timeout_s=WAIT_S):
        with QueueClient(options.nameservers, timeout_s) as client:
            return plan.ranges(client.queues(options), options)

    def read(piece, timeout_s=WAIT_S):
        with QueueClient(options.nameservers, timeout_s) as client:
            return [r.body for run in client.read(topic, piece) for r in run.records]

    of_b0, of_b1 = await asyncio.to_thread(planned)
    moved = replace(of_b1, address=of_b0.address, topic_id=0)  # 0: as of a broker without ids
    with monkeypatch.context() as patch:
        known = RouteCache.broker
        patch.setattr(
            RouteCache,
            "broker",
            lambda self, name: replace(known(self, name), address=of_b0.address),
        )
        with pytest.raises(Unavailable, match=f"not {of_b1.store_id:016x}"):
            await asyncio.to_thread(planned, 0.1)
        with pytest.raises(Unavailable, match=f"not {of_b1.store_id:016x}"):
            await asyncio.to_thread(read, moved, 0.1)
    assert refused
    assert await asyncio.to_thread(read, of_b1) == [b"b1"] * 3


async def test_an_audit_counts_nothing_twice(cluster, refused, monkeypatch) -> None:
    topic = topic_name()
    await cluster.create_topic(topic, queues=1)
    await cluster.send(topic, [b"b0"] * 3)
    told, address = Registry.route, cluster.brokers["b0"].server.advertised
    monkeypatch.setattr(
        Registry,
        "route",
        lambda *asked: tuple(replace(served, address=address) for served in told(*asked)),
    )
    with pytest.raises(Unavailable, match="this broker has"):
        await asyncio.to_thread(lambda: [*read_topic(cluster.nameserver, topic)])
