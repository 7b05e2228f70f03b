"""What a broken or hostile client may send a nameserver: nothing of it stays."""

from collections.abc import AsyncIterator

import pytest

from duemq.errors import InvalidArgument, Overloaded
from duemq.transport import channel, status
from duemq.v1 import nameserver_pb2 as pb
from duemq.v1 import stubs
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.registry import GONE_MAX, Registry
from duemq_server.nameserver.reports import BrokerReport, TopicQueues, Version
from duemq_server.nameserver.settings import Settings
from duemq_server.serving.server import Server


@pytest.fixture
async def stub() -> AsyncIterator[stubs.NameserverStub]:
    server = Server(Settings(listen="127.0.0.1:0", drain_timeout=1.0))
    registry = Registry(ready_at_ms=0)
    server.add(SERVICE, NameserverServicer(registry, lambda: 0, 10, server.unsent), OVERRIDES)
    await server.start(announced=False)
    async with channel.connect(server.address) as connection:
        yield stubs.NameserverStub(connection)
    await server.stop()


def test_the_names_of_those_who_left_are_bounded() -> None:
    registry = Registry(ready_at_ms=0)
    for number in range(GONE_MAX + 10):
        registry.deregister(BrokerReport, f"b{number}", Version(1, 0), 0)
    assert len(registry._gone) == GONE_MAX
    latest = BrokerReport(f"b{GONE_MAX + 9}", "a:1")
    assert not registry.register(Version(1, 0), latest, 0)  # the newest are known


@pytest.mark.parametrize("name", ["x" * 128, "x" * (1 << 20), "a b", "\0", "../x"])
async def test_an_illegal_name_is_refused_everywhere(stub: stubs.NameserverStub, name: str) -> None:
    for call in (
        stub.Register(pb.RegisterRequest(broker=pb.BrokerReport(name=name, address="a:1"))),
        stub.Deregister(pb.DeregisterRequest(broker=name)),
        stub.Deregister(pb.DeregisterRequest(timer=name)),
    ):
        with pytest.raises(InvalidArgument):
            await status.answer(call)


@pytest.mark.parametrize(
    "address", ["x" * 254 + ":1", "a:" + "9" * 5_000, "a", ":1", "a:0", "a\n:1"]
)
async def test_an_illegal_address_is_refused(stub: stubs.NameserverStub, address: str) -> None:
    report = pb.BrokerReport(name="b", address=address)
    with pytest.raises(InvalidArgument) as refused:
        await status.answer(stub.Register(pb.RegisterRequest(broker=report)))
    assert refused.value.field == "broker.address"


async def test_a_broker_that_names_a_topic_twice_serves_it_once(
    stub: stubs.NameserverStub,
) -> None:
    topics = [pb.TopicQueues(topic="t", queues=1, readable=True) for _ in range(2)]
    report = pb.BrokerReport(name="b", address="a:1", topics=topics)
    await status.answer(stub.Register(pb.RegisterRequest(broker=report, expiry_ms=60_000)))
    route = await status.answer(stub.GetRoute(pb.GetRouteRequest(topic="t")))
    assert [served.broker for served in route.brokers] == ["b"]


@pytest.mark.parametrize("topic", ["a\nERROR forged", "\x1b[31m", "a b", "ä"])
async def test_a_topic_that_no_broker_can_have_is_refused(
    stub: stubs.NameserverStub, topic: str
) -> None:
    report = pb.BrokerReport(name="b", address="a:1", topics=[pb.TopicQueues(topic=topic)])
    with pytest.raises(InvalidArgument) as refused:
        await status.answer(stub.Register(pb.RegisterRequest(broker=report)))
    assert refused.value.field == "broker.topics.topic"


def report_of(name: str, topics: int) -> BrokerReport:
    return BrokerReport(
        name, "a:1", tuple(TopicQueues(f"{name}-{number:04}", 4) for number in range(topics))
    )


def test_routes_that_nobody_could_be_told_of_are_refused_and_no_heartbeat_is() -> None:
    registry = Registry(ready_at_ms=0, expiry_ms=100, routes_bytes_max=4_000)
    assert registry.register(Version(1, 1), report_of("honest", 50), 0)
    with pytest.raises(Overloaded) as refused:
        registry.register(Version(1, 1), report_of("greedy", 100), 0)
    assert refused.value.field == "broker.topics"
    with pytest.raises(Overloaded):  # alive all the same, with what it had
        registry.register(Version(1, 2), report_of("honest", 100), 90)
    registry.expire(150)
    assert len(registry.topics) == 50
    assert registry.register(Version(1, 1), report_of("honest", 50), 160)
    assert registry.register(Version(1, 3), report_of("honest", 10), 170)
    assert registry.register(Version(1, 1), report_of("greedy", 80), 170)
    registry.expire(1_000)
    assert registry._routes._bytes == 0
