"""What a client says when there is no nameserver where it was told."""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest

import duemq
from duemq import aio
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import Closed, InvalidArgument, Unavailable
from duemq.protocol.balance import MessageQueue
from duemq.settings import ClientSettings, ProducerSettings
from duemq.transport import cluster_client
from duemq.transport.cluster_client import Client
from duemq.transport.loop_thread import LoopThread
from duemq.transport.routing import diagnosis
from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import broker_pb2, timer_pb2
from duemq_server.serving.server import Server
from duemq_server.serving.settings import ProcessSettings
from tests.listening import listening
from tests.service.fake_cluster import FakeCluster
from tests.service.running_cluster import WAIT_S, until

SOON = ClientSettings(connect_timeout_s=0.2)
# Far more than a diagnosis takes: who waits for this has not found out.
LONG = ClientSettings(connect_timeout_s=60.0)


@pytest.fixture
async def server():
    server = Server(ProcessSettings(listen="127.0.0.1:0", metrics_listen=""))
    yield server
    await server.stop()


def serve(server, module, service):
    descriptor = module.DESCRIPTOR.services_by_name[service]
    nothing = SimpleNamespace(**{method.name: _unasked for method in descriptor.methods})
    server.add(descriptor, nothing)


async def _unasked(request, context):
    raise AssertionError("only its health is asked for")


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a")
    yield cluster
    await cluster.stop()


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(diagnosis, "QUESTION_TIMEOUT_S", WAIT_S)


async def refusal(address, settings=SOON):
    with pytest.raises((Unavailable, InvalidArgument)) as raised:
        await Client(address, settings).start()
    return raised.value


async def refusal_once_looked(address):
    """The time to wait begins once what is at the address is known, however long that took."""
    looked, asked, ready = asyncio.Event(), set(), RouteWatcher.ready

    async def diagnose(at, tls):
        if at in asked:  # so what was found the first time is kept
            looked.set()
        asked.add(at)
        return await diagnosis.diagnose(at, tls)

    async def ready_since(watcher, timeout_s):
        async with asyncio.timeout(WAIT_S):
            await looked.wait()
        await ready(watcher, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_client, "diagnose", diagnose)
        patch.setattr(RouteWatcher, "ready", ready_since)
        return await refusal(address)


async def test_nobody_listens(patient):
    with socket.socket() as held:  # bound, and deaf
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        error = await refusal_once_looked(address)
    assert isinstance(error, Unavailable)
    assert f"connection refused at {address}" in error.message
    assert "duemq up" in error.message
    assert (error.field, error.value) == ("nameserver", address)


async def test_who_waits_for_long_says_early_for_what(patient, caplog):
    """Once: it is the first thing that a program does, and nothing else would be heard of it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        client = Client(address, LONG)
        starting = asyncio.create_task(client.start())
        await until(lambda: bool(caplog.records))
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    [said] = caplog.records
    assert said.levelname == "WARNING"
    assert f"waiting for 60 s: connection refused at {address}" in said.message


async def begun(client):
    """A start that waits for a nameserver."""
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return starting


async def test_a_close_ends_a_start_at_once():
    producer = aio.Producer("127.0.0.1:1", settings=ProducerSettings(client=LONG))
    starting = await begun(producer)
    await producer.close()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Closed):
            await starting


async def test_who_waits_for_a_topic_hears_of_the_close_as_it_ends(cluster):
    settings = ProducerSettings(create_topics=False, send_timeout_s=60, close_timeout_s=0.1)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        sending = asyncio.create_task(producer.send("nowhere", b"x"))
        await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Closed):
            await sending


async def test_of_two_that_start_a_client_one_may_give_up(cluster):
    client = Client(cluster.nameserver, LONG)
    first, second = await begun(client), await begun(client)
    first.cancel()
    async with asyncio.timeout(WAIT_S):
        await second
        assert first.cancelled()
        cluster.topic("made later")
        await client.wait_for(lambda routes: routes.route("made later") is not None, WAIT_S)
    await client.close()


async def test_no_such_host():
    error = await refusal_once_looked("no-such-host.invalid")
    assert "no-such-host.invalid:9876" in error.message


async def test_something_that_is_not_grpc(patient):
    async def http(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with listening(http) as address:
        error = await refusal_once_looked(address)
    assert f"{address} takes connections but does not speak gRPC" in error.message


async def test_a_proxy_that_grpc_asks_is_named(server, monkeypatch):
    await server.start(announced=False)
    with socket.socket() as held:  # bound, and deaf
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{held.getsockname()[1]}")
        for others in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(others, raising=False)
        error = await refusal_once_looked(server.address)
    assert "does not speak gRPC" in error.message
    assert "the proxy in http_proxy" in error.message


@pytest.mark.parametrize(
    ("module", "service", "role"),
    [(broker_pb2, "Broker", "a broker"), (timer_pb2, "Timer", "a timer service")],
)
async def test_another_server_of_the_cluster_is_named_at_once(server, module, service, role):
    serve(server, module, service)
    await server.start(announced=False)
    error = await refusal(server.address, LONG)
    assert isinstance(error, InvalidArgument)
    assert f"{server.address} is {role}, not a nameserver" in error.message


async def test_a_foreign_grpc_server_is_named_at_once(server):
    await server.start(announced=False)
    error = await refusal(server.address, LONG)
    assert f"{server.address} is a gRPC server, but no nameserver" in error.message


async def test_one_mistaken_address_of_two_is_no_reason_to_give_up(patient, server):
    cluster = FakeCluster()
    await cluster.start("a")
    await server.start(announced=False)
    client = Client([server.address, cluster.nameserver], LONG)
    await client.start()
    await client.close()
    await cluster.stop_nameserver()
    error = await refusal_once_looked([server.address, cluster.nameserver])
    assert "is a gRPC server" in error.message
    assert "connection refused" in error.message
    await cluster.stop()


def test_a_close_ends_a_start_in_another_thread():
    consumer = duemq.PullConsumer(nameserver="127.0.0.1:1", settings=ConsumerSettings(client=LONG))
    refused = []

    def start():
        try:
            consumer.start()
        except Closed as error:
            refused.append(error)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    while starting.is_alive() and consumer._consumer._client._watcher is None:
        time.sleep(0.001)
    consumer.close()
    starting.join(WAIT_S)
    assert refused
    assert LoopThread._shared is None


def test_a_pull_consumer_that_was_closed_before_it_started_does_not_start():
    consumer = duemq.PullConsumer(nameserver="127.0.0.1:1", settings=ConsumerSettings(client=SOON))
    consumer.close()
    for _ in range(2):
        with pytest.raises(Closed, match="the consumer is closed"):
            consumer.start()
        consumer.close()
    assert LoopThread._shared is None


async def test_a_push_consumer_that_was_closed_before_it_started_does_not_start():
    def in_a_thread():
        consumer = duemq.PushConsumer("g", "t", print, nameserver="127.0.0.1:1")
        consumer.close()
        consumer.run()
        with pytest.raises(Closed):
            consumer.start()

    await asyncio.to_thread(in_a_thread)
    consumer = aio.PushConsumer("g", "t", print, nameserver="127.0.0.1:1")
    running = asyncio.create_task(consumer.run())
    await consumer.close()
    await running
    with pytest.raises(Closed):
        await consumer.start()


async def test_who_is_not_started_says_so():
    queue = MessageQueue("t", "b", 0)
    admin, consumer = aio.Admin("127.0.0.1:1"), aio.PullConsumer("g", nameserver="127.0.0.1:1")
    for asked in (
        admin.cluster,
        admin.topics,
        admin.count_timers,
        lambda: admin.cancel(key=("t", "k")),
        lambda: consumer.queues("t"),
        lambda: consumer.commit({queue: 1}),
    ):
        with pytest.raises(Closed, match=r"not started: use `async with`"):
            await asked()


async def test_what_no_host_can_be_called_is_no_host():
    """Python refuses it before it asks anybody."""
    for name in ("a..b", "x" * 70):
        assert "no host of that name" in (await diagnosis.diagnose(f"{name}:1")).text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("http://ns1", "ns1:9876"),
        ("http://ns1:9876/", "ns1:9876"),
        ("grpc://[::1]:5", "[::1]:5"),
    ],
)
def test_a_scheme_is_refused_with_the_address_to_write(wrong, right):
    with pytest.raises(InvalidArgument, match="does not belong there") as raised:
        Client(wrong)
    assert raised.value.message.endswith(f"write {right}")
    assert raised.value.field == "nameserver"


async def test_the_environment_names_the_nameserver(monkeypatch):
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    monkeypatch.setenv("DUEMQ_NAMESERVER", cluster.nameserver)
    async with aio.Producer() as producer:
        assert (await producer.send("t", b"x")).broker == "a"
    async with aio.Admin() as admin, aio.PullConsumer() as consumer:
        assert [each.topic for each in await consumer.queues("t")] == ["t"] * 4
        assert admin is not None
    await cluster.stop()


def test_what_is_said_goes_before_the_environment_and_that_before_the_default(monkeypatch):
    monkeypatch.setenv("DUEMQ_NAMESERVER", "there:1,elsewhere")
    assert Client().nameservers == ("there:1", "elsewhere:9876")
    assert Client("here").nameservers == ("here:9876",)
    monkeypatch.setenv("DUEMQ_NAMESERVER", "")
    assert Client().nameservers == ("127.0.0.1:9876",)
    monkeypatch.setenv("DUEMQ_NAMESERVER", "http://there")
    with pytest.raises(InvalidArgument, match="write there:9876"):
        duemq.aio.PushConsumer("g", "t", print)
