"""Connections over TLS: who trusts whom, what is said where not, and new certificates."""

import asyncio
import socket
import ssl
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from duemq.aio import Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import InvalidArgument, Unavailable
from duemq.settings import ClientSettings, ProducerSettings, Tls
from duemq.transport.blocking_client import BlockingClient
from duemq.transport.routing import diagnosis
from duemq.v1 import nameserver_pb2
from duemq.v1.stubs import NameserverStub
from duemq_server.local_cluster.layout import bind_port
from duemq_server.nameserver.clock import SteadyClock
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.settings import Settings as NameserverSettings
from duemq_server.serving.registration import Registration
from duemq_server.serving.server import Server
from tests.certificates import authority, certificate, needs_openssl
from tests.service.running_cluster import WAIT_S, running_cluster, until

pytestmark = needs_openssl


@pytest.fixture
def ca(tmp_path):
    return authority(tmp_path)


def of_server(tls: Tls) -> dict[str, str]:
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}


def client(tls: Tls | None, timeout_s: float = 30) -> ClientSettings:
    return ClientSettings(tls=tls, connect_timeout_s=timeout_s)


def producer(cluster, tls: Tls | None, timeout_s: float = 30) -> Producer:
    settings = ProducerSettings(client=client(tls, timeout_s))
    return Producer(cluster.nameserver, settings=settings)


@pytest.fixture
def patient(monkeypatch):
    """A busy machine is no answer."""
    monkeypatch.setattr(diagnosis, "QUESTION_TIMEOUT_S", WAIT_S)


async def found(cluster, tls: Tls | None) -> str:
    """What a start that goes on trying says in the end."""
    said = await diagnosis.diagnose(cluster.nameserver, tls)
    assert not said.mistaken
    return said.text


async def test_what_is_sent_over_tls_comes_over_tls(tmp_path, ca):
    tls = of_server(certificate(ca, "server"))
    async with running_cluster(tmp_path, "b0", "b1", **tls) as cluster:
        mine = Tls(ca=str(ca))
        async with producer(cluster, mine) as sender:
            for number in range(20):
                await sender.send("orders", b"%d" % number)
        received: set[bytes] = set()
        consumer = PushConsumer(
            "billing",
            "orders",
            lambda message: received.add(message.body),
            nameserver=cluster.nameserver,
            settings=ConsumerSettings(client=client(mine), start_from="earliest"),
        )
        async with consumer:
            await until(lambda: len(received) == 20)
        listed = await asyncio.to_thread(brokers_at, cluster.nameserver, mine)
        assert listed == {"b0", "b1"}


def brokers_at(nameserver: str, tls: Tls) -> set[str]:
    with BlockingClient(nameserver, 30, tls) as blocking:
        answer = blocking.ask(
            lambda to: NameserverStub(to).GetCluster, nameserver_pb2.GetClusterRequest()
        )
    return {each.name for each in answer.brokers}


async def test_who_has_no_tls_hears_at_once_that_there_is(tmp_path, ca, patient):
    tls = of_server(certificate(ca, "server"))
    async with running_cluster(tmp_path, "b0", **tls) as cluster:
        with pytest.raises(InvalidArgument, match="speaks TLS: name the authority of its cert"):
            await producer(cluster, None, timeout_s=WAIT_S).start()


async def test_who_trusts_another_authority_hears_why(tmp_path, ca, patient):
    tls = of_server(certificate(ca, "server"))
    async with running_cluster(tmp_path, "b0", **tls) as cluster:
        other = Tls(ca=str(authority(tmp_path, "other")))
        assert "CERTIFICATE_VERIFY_FAILED" in await found(cluster, other)
        with pytest.raises(Unavailable):
            await producer(cluster, other, timeout_s=0.5).start()


async def test_a_cluster_without_tls_is_told_from_one_with_it(tmp_path, ca, patient):
    async with running_cluster(tmp_path, "b0") as cluster:
        assert "does not speak TLS" in await found(cluster, Tls(ca=str(ca)))


async def test_a_certificate_of_another_host_is_refused(tmp_path, ca):
    elsewhere = certificate(ca, "elsewhere", san="DNS:elsewhere.example.org")
    server = Server(NameserverSettings(listen="127.0.0.1:0", **of_server(elsewhere)))
    await server.start(announced=False)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        await asyncio.to_thread(brokers_at, server.address, Tls(ca=str(ca)))
    await server.stop()


async def test_only_who_shows_a_certificate_is_served(tmp_path, ca, patient):
    server = certificate(ca, "server")
    settings = {**of_server(server), "tls_verify_clients": True}
    async with running_cluster(tmp_path, "b0", **settings) as cluster:
        async with producer(cluster, certificate(ca, "me")) as sender:
            await sender.send("orders", b"1")
        stranger = certificate(authority(tmp_path, "other"), "stranger")
        for tls in (Tls(ca=str(ca)), Tls(ca=str(ca), cert=stranger.cert, key=stranger.key)):
            assert "speaks TLS, but no connection came of it" in await found(cluster, tls)


async def test_a_new_certificate_is_shown_to_who_comes_next(tmp_path, ca):
    server = certificate(ca, "server")
    async with running_cluster(tmp_path, "b0", **of_server(server)) as cluster:
        async with producer(cluster, Tls(ca=str(ca))) as sender:
            await sender.send("orders", b"1")
            shown = await shown_at(cluster.nameserver)
            certificate(ca, "server")
            assert await shown_at(cluster.nameserver) != shown
            await sender.send("orders", b"2")  # over the connections that it has
        async with producer(cluster, Tls(ca=str(ca))) as sender:
            await sender.send("orders", b"3")


async def shown_at(address: str) -> str:
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_who_registers_goes_on_with_new_certificates_of_a_new_authority(tmp_path, ca):
    """Also where a nameserver that is started anew takes no others any more."""
    tls = certificate(ca, "server")
    settings = {**of_server(tls), "tls_verify_clients": True, "drain_timeout": 0.0}
    held = bind_port(0)  # so that nobody else gets it in between
    listen = f"127.0.0.1:{held.getsockname()[1]}"
    registry, server = await nameserver(listen, **settings)
    report = nameserver_pb2.BrokerReport(name="b1", address="127.0.0.1:1", store_id=1)
    registration = Registration([server.address], 0.2, 1, lambda: report, tls=tls)
    registration.start()
    await until(lambda: bool(registry.brokers))
    await server.stop()
    authority(tmp_path)
    certificate(ca, "server")
    registry, server = await nameserver(listen, **settings)
    await until(lambda: bool(registry.brokers))
    await registration.stop()
    await server.stop()
    held.close()


async def nameserver(listen: str, **settings: Any) -> tuple[Registry, Server]:
    clock = SteadyClock()
    registry = Registry(clock.now_ms(), expiry_ms=30_000)
    server = Server(NameserverSettings(listen=listen, ready_after=0.0, **settings))
    servicer = NameserverServicer(registry, clock.now_ms, 10, server.unsent)
    server.add(SERVICE, servicer, OVERRIDES)
    await server.start(announced=False)
    return registry, server


async def test_probes_ask_without_tls(tmp_path, ca):
    settings = NameserverSettings(
        listen="127.0.0.1:0",
        health_listen="127.0.0.1:0",
        tls_verify_clients=True,
        **of_server(certificate(ca, "server")),
    )
    server = Server(settings)
    await server.start(announced=False)
    async with grpc.aio.insecure_channel(server.health_address) as connection:
        answer = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await NameserverStub(connection).GetCluster(nameserver_pb2.GetClusterRequest())
    await server.stop()
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_files_that_are_of_no_use_end_the_start_and_are_named(tmp_path, ca):
    (tmp_path / "bad.pem").write_text("hello")
    settings = NameserverSettings(
        listen="127.0.0.1:0", tls_cert=str(tmp_path / "bad.pem"), tls_key=str(tmp_path / "ca.key")
    )
    with pytest.raises(InvalidArgument, match=r"tls_cert: .*bad.pem"):
        await Server(settings).start(announced=False)


async def test_a_port_for_probes_that_is_taken_is_named(tmp_path, ca):
    tls = of_server(certificate(ca, "server"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = NameserverSettings(listen="127.0.0.1:0", health_listen=address, **tls)
        server = Server(settings)
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            await server.start(announced=False)


async def test_probes_end_where_the_rest_does_not_start(monkeypatch, tmp_path, ca):
    tls = of_server(certificate(ca, "server"))
    settings = NameserverSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", **tls)
    server = Server(settings)

    async def start() -> None:
        raise OSError("no")

    monkeypatch.setattr(server._server, "start", start)
    with pytest.raises(OSError, match="no"):
        await server.start(announced=False)
    host, _, port = server.health_address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
