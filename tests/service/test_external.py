"""The external port: of a server, of a nameserver, of brokers; over real gRPC in one process."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from duemq import aio
from duemq.errors import (
    InstanceNotFound,
    InvalidArgument,
    NotCoordinator,
    PermissionDenied,
    Unavailable,
)
from duemq.protocol import balance
from duemq.transport import channel, status
from duemq.v1 import group_pb2, stubs
from duemq.v1 import nameserver_pb2 as pb
from duemq.v1.stubs import NameserverStub
from duemq_server.broker.process import Broker
from duemq_server.nameserver.edge.servicer import SERVICE as NAMESERVER
from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.process import Nameserver
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.settings import Settings as NameserverSettings
from duemq_server.replication.running.servicer import SERVICE as REPLICATION
from duemq_server.replication.running.servicer import ReplicationServicer
from duemq_server.replication.running.v1 import replication_pb2
from duemq_server.replication.running.v1.stubs import ReplicationStub
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.serving.server import Server
from duemq_server.serving.settings import MemberSettings
from tests.certificates import authority, certificate, needs_openssl
from tests.service.running_broker import running_broker, topic_name
from tests.service.running_cluster import HEARTBEAT_S, until

ANY = "127.0.0.1:0"


@asynccontextmanager
async def running_nameserver() -> AsyncIterator[Nameserver]:
    settings = NameserverSettings(
        listen=ANY, external_listen=ANY, ready_after=0.0, drain_timeout=0.0
    )
    nameserver = Nameserver(settings)
    await nameserver.start(announced=False)
    try:
        yield nameserver
    finally:
        await nameserver.stop()


@pytest.fixture
async def nameserver() -> AsyncIterator[Nameserver]:
    async with running_nameserver() as nameserver:
        yield nameserver


@pytest.fixture
async def inside(nameserver: Nameserver) -> AsyncIterator[Any]:
    async with channel.connect(nameserver.server.address) as connection:
        yield NameserverStub(connection)


@pytest.fixture
async def outside(nameserver: Nameserver) -> AsyncIterator[Any]:
    async with channel.connect(nameserver.server.external_address) as connection:
        yield NameserverStub(connection)


def register(external: str = "", counter: int = 1, **fields: Any) -> pb.RegisterRequest:
    topics = [pb.TopicQueues(topic="t", queues=1, readable=True, writable=True)]
    report = pb.BrokerReport(
        name="a", address="in:1", topics=topics, external_address=external, **fields
    )
    return pb.RegisterRequest(version=pb.Version(epoch=1, counter=counter), broker=report)


def addresses(answer: pb.Cluster | pb.RouteUpdate) -> set[str]:
    routes = (one.address for route in answer.routes for one in route.brokers)
    return {*routes, *(one.address for one in answer.brokers)}


async def test_each_port_tells_its_addresses(inside: Any, outside: Any) -> None:
    replicas = [pb.ReplicaReport(name="r", address="in:9")]
    await inside.Register(register("out:1", replicas=replicas))
    for stub, address in ((inside, "in:1"), (outside, "out:1")):
        route = await stub.GetRoute(pb.GetRouteRequest(topic="t"))
        assert [one.address for one in route.brokers] == [address]
        cluster = await stub.GetCluster(pb.GetClusterRequest())
        assert addresses(cluster) == {address}
        watch = stub.WatchRoutes(pb.WatchRoutesRequest())
        assert addresses(await watch.read()) == {address}
        watch.cancel()
    [seen] = (await inside.GetCluster(pb.GetClusterRequest())).brokers
    assert seen.external_address == "out:1"
    [told] = cluster.brokers
    assert (told.external_address, told.replicas[0].address) == ("", "")


async def test_a_watcher_outside_hears_of_another_external_address(
    inside: Any, outside: Any
) -> None:
    await inside.Register(register("out:1"))
    watch = outside.WatchRoutes(pb.WatchRoutesRequest())
    assert addresses(await watch.read()) == {"out:1"}
    await inside.Register(register("out:2", counter=2))
    assert addresses(await watch.read()) == {"out:2"}
    await inside.Register(register(counter=3))
    update = await watch.read()
    assert addresses(update) == set()
    assert list(update.removed_topics) == ["t"]
    assert [one.name for one in update.lost_brokers] == ["a"]
    watch.cancel()


async def test_who_has_told_no_external_address_is_named(
    nameserver: Nameserver, inside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def gauge(kind: str) -> float | None:
        name = "duemq_nameserver_without_external_address"
        return nameserver.server.registry.get_sample_value(name, {"kind": kind})

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await inside.Register(register())
    assert caplog.text.count("a has told no external address") == 1
    assert (gauge("broker"), gauge("timer")) == (1, 0)
    await inside.Register(register("out:1", counter=2))
    assert gauge("broker") == 0


async def test_nobody_registers_from_outside(outside: Any) -> None:
    for call in (
        outside.Register(register("out:1")),
        outside.Deregister(pb.DeregisterRequest(broker="a")),
    ):
        with pytest.raises(PermissionDenied, match="register at the inside port"):
            await status.answer(call)


async def test_who_is_given_up_from_outside_is_told_with_its_address_there(
    inside: Any, outside: Any
) -> None:
    await inside.Register(register("out:1"))
    for stub, told in ((inside, "in:1"), (outside, "out:1")):
        with pytest.raises(InvalidArgument, match=f"a lives: {told} was heard of"):
            await status.answer(stub.Forget(pb.ForgetRequest(broker="a")))
    await inside.Deregister(pb.DeregisterRequest(broker="a", version=pb.Version(epoch=1)))
    await inside.Deregister(
        pb.DeregisterRequest(broker="a", version=pb.Version(epoch=1, counter=1))
    )
    answer = await status.answer(outside.Forget(pb.ForgetRequest(broker="a")))
    assert answer.address == "out:1"


async def test_an_external_address_is_checked(inside: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(inside.Register(register("nowhere")))
    assert caught.value.field == "broker.external_address"


def member(**more: Any) -> MemberSettings:
    return MemberSettings(name="b", data_dir="d", **more)


def test_an_external_address_needs_a_port_behind_it() -> None:
    with pytest.raises(InvalidArgument, match="external_listen must be given"):
        member(external_advertise="out:1")
    with pytest.raises(InvalidArgument) as caught:
        member(external_listen="0.0.0.0:1")
    assert caught.value.field == "external_advertise"
    with pytest.raises(InvalidArgument) as caught:
        member(external_listen=ANY, external_advertise="out:0")
    assert caught.value.field == "external_advertise"
    assert member(external_listen="0.0.0.0:1", external_advertise="out:1")


def test_of_the_addresses_of_several_a_process_takes_its_own() -> None:
    several = "a=out:1, b=out:2,g/r=out:3"
    assert member(external_listen=ANY, external_advertise=several).external_advertised == "out:2"
    replica = ReplicaSettings(
        name="g",
        data_dir="d",
        replica="r",
        replicas=("r", "s"),
        lease_store="kubernetes",
        listen="127.0.0.1:1",
        external_listen=ANY,
        external_advertise=several,
    )
    assert replica.external_advertised == "out:3"
    for wrong in ("a=out:1", "b=", "b=out:0", "b=0.0.0.0:1"):
        with pytest.raises(InvalidArgument) as caught:
            member(external_listen=ANY, external_advertise=wrong)
        assert caught.value.field == "external_advertise"


async def test_a_stop_drains_both_ports() -> None:
    server = Server(NameserverSettings(listen=ANY, external_listen=ANY, drain_timeout=30))
    await server.start(announced=False)
    async with AsyncExitStack() as stack:
        watches = []
        for address in (server.address, server.external_address):
            connection = await stack.enter_async_context(channel.connect(address))
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watches.append(watch)
        stop = asyncio.create_task(server.stop())
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stop
        for address in (server.address, server.external_address):
            other = await stack.enter_async_context(channel.connect(address))
            check = health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest())
            with pytest.raises(Unavailable):
                await status.answer(check)


@needs_openssl
async def test_both_ports_ask_for_the_same_certificates_and_permissions(tmp_path: Path) -> None:
    ca, file = authority(tmp_path), tmp_path / "permissions.toml"
    entries = ('names = ["operator"]\nadmin = true', 'names = ["server"]\nservice = true')
    file.write_text("".join(f"[[allow]]\n{entry}\n" for entry in entries))
    mine = certificate(ca, "server")
    settings = NameserverSettings(
        listen=ANY,
        external_listen=ANY,
        ready_after=0.0,
        drain_timeout=0.0,
        tls_cert=mine.cert,
        tls_key=mine.key,
        tls_ca=mine.ca,
        tls_verify_clients=True,
        permissions=str(file),
    )
    nameserver = Nameserver(settings)
    await nameserver.start(announced=False)
    operator, other = certificate(ca, "operator"), certificate(ca, "other")
    try:
        for address in (nameserver.server.address, nameserver.server.external_address):
            for tls, error in ((operator, None), (other, PermissionDenied), (None, Unavailable)):
                async with channel.connect(address, tls) as connection:
                    call = NameserverStub(connection).Forget(pb.ForgetRequest(broker="b"))
                    with pytest.raises(error or InstanceNotFound):
                        await status.answer(call)
    finally:
        await nameserver.stop()


async def test_what_comes_later_comes_to_both_ports_and_what_peers_use_to_one() -> None:
    refusal: Unavailable | None = Unavailable("b leads")
    server = Server(NameserverSettings(listen=ANY, external_listen=ANY, drain_timeout=0))
    member: Any = SimpleNamespace(status=lambda: replication_pb2.ReplicaStatus(group="g"))
    server.add(REPLICATION, ReplicationServicer(member), inside_only=True)
    server.expect([NAMESERVER], lambda: refusal)
    await server.start(announced=False)
    try:
        async with (
            channel.connect(server.address) as inside,
            channel.connect(server.external_address) as outside,
        ):
            request = replication_pb2.GetStatusRequest()
            found = await ReplicationStub(inside).GetStatus(request)
            assert found.group == "g"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ReplicationStub(outside).GetStatus(request)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            asks = [NameserverStub(each).GetCluster for each in (inside, outside)]
            for ask in asks:
                with pytest.raises(Unavailable, match="b leads"):
                    await status.answer(ask(pb.GetClusterRequest()))
            refusal = None
            registry = Registry(ready_at_ms=0)
            server.add(NAMESERVER, NameserverServicer(registry, lambda: 0, 1, server.unsent))
            for ask in asks:
                assert await ask(pb.GetClusterRequest()) == pb.Cluster()
    finally:
        await server.stop()


async def test_an_external_port_that_is_taken_stops_the_start() -> None:
    first = Server(NameserverSettings(listen=ANY, external_listen=ANY))
    await first.start(announced=False)
    second = Server(NameserverSettings(listen=ANY, external_listen=first.external_address))
    with pytest.raises(OSError, match="cannot listen"):
        await second.start(announced=False)
    await first.stop()


@pytest.fixture
async def brokers(nameserver: Nameserver, tmp_path: Path) -> AsyncIterator[dict[str, Broker]]:
    """Two of which others than this test know no inside address."""
    async with AsyncExitStack() as stack:
        found = {}
        for name in ("b0", "b1"):
            found[name], _ = await stack.enter_async_context(
                running_broker(
                    tmp_path / name,
                    name=name,
                    advertise=f"{name}.inside.invalid:1",
                    external_listen=ANY,
                    nameservers=(nameserver.server.address,),
                    heartbeat_period=HEARTBEAT_S,
                    drain_timeout=0.1,
                )
            )
        caches = [each._routes.cache for each in found.values()]
        await until(lambda: all(len(each.brokers) == len(found) for each in caches))
        yield found


async def test_a_client_outside_works_by_external_addresses_alone(
    nameserver: Nameserver, brokers: dict[str, Broker]
) -> None:
    topic, address = topic_name(), nameserver.server.external_address
    received: set[bytes] = set()
    async with (
        aio.Producer(address) as producer,
        aio.PushConsumer("g", topic, lambda m: received.add(m.body), nameserver=address),
    ):
        bodies = {b"%d" % number for number in range(8)}
        for body in bodies:
            await producer.send(topic, body)
        await until(lambda: received == bodies)
    async with aio.Admin(address) as admin:
        found = await admin.cluster()
    assert {each.address for each in found.brokers} == {
        each.server.external_address for each in brokers.values()
    }


async def join(address: str, topic: str) -> group_pb2.CoordinatorEvent:
    """What a member of the group hears first."""
    async with channel.connect(address) as connection:
        call = stubs.GroupCoordinatorStub(connection).Join()
        subscriptions = [group_pb2.Subscription(topic=topic)]
        hello = group_pb2.Hello(group="g", member_id="m", subscriptions=subscriptions)
        await call.write(group_pb2.MemberEvent(hello=hello))
        event = await status.answer(call.read())
        call.cancel()
    return event


async def test_members_are_told_the_addresses_of_their_side(
    nameserver: Nameserver, brokers: dict[str, Broker]
) -> None:
    topic = topic_name()
    async with aio.Admin(nameserver.server.external_address) as admin:
        await admin.create_topic(topic)
    caches = [each._routes.cache for each in brokers.values()]
    await until(lambda: all(len(c.route(topic).brokers) == 2 for c in caches if c.route(topic)))
    await until(lambda: all(c.route(topic) for c in caches))
    here = balance.coordinator("g", brokers) or ""
    there = next(name for name in brokers if name != here)
    inside = {name: f"{name}.inside.invalid:1" for name in brokers}
    outside = {name: each.server.external_address for name, each in brokers.items()}
    for port, told in (("address", inside), ("external_address", outside)):
        event = await join(getattr(brokers[here].server, port), topic)
        assert {b.name: b.address for b in event.assignment.brokers} == told
        event = await join(getattr(brokers[there].server, port), topic)
        assert isinstance(status.from_proto(event.error), NotCoordinator)
        assert (event.coordinator, event.coordinator_address) == (here, told[here])
