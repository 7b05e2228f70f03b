"""The plumbing around every service: errors, views, health, metrics, drain."""

import asyncio
import json
import logging
import threading
import urllib.request
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.registry import Collector

from duemq import errors
from duemq.transport import channel, status
from duemq.v1 import broker_pb2, view_pb2
from duemq.v1.stubs import BrokerStub
from duemq_server.serving import metrics
from duemq_server.serving.methods import method_handlers
from duemq_server.serving.server import Server
from duemq_server.serving.settings import ProcessSettings
from tests.listening import loopbacks
from tests.service.running_cluster import until

SERVICE = broker_pb2.DESCRIPTOR.services_by_name["Broker"]
VIEWS = {
    "Send": (view_pb2.SendRequestView.FromString, view_pb2.SendResponseView.SerializeToString),
    "SendStream": (
        view_pb2.SendRequestView.FromString,
        view_pb2.SendResponseView.SerializeToString,
    ),
}


ADDRESSES = ("address", "metrics_address", "health_address")


class Servicer:
    """Does what the topic's name says."""

    def __init__(self):
        self.parked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Send(self, request, context):
        assert isinstance(request, view_pb2.SendRequestView)
        records = request.batches[0].records
        return view_pb2.SendResponseView(request_id=len(records))

    async def SendStream(self, requests, context):
        async for request in requests:
            if request.request_id == 0:
                raise errors.Overloaded("full", limit=8)
            await context.write(view_pb2.SendResponseView(request_id=request.request_id))

    async def Pull(self, request, context):
        match request.group:
            case "rejected":
                raise errors.TooLarge("too large", field="max_bytes", value=9, limit=8)
            case "bug":
                raise KeyError("secret")
            case "group":
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._fail(errors.GroupNotFound("no such group")))
                    tasks.create_task(asyncio.Event().wait())
            case "parked group":
                self.parked.set()
                try:
                    raise BaseExceptionGroup("", [await self._cancelled()])
                finally:
                    self.cancelled.set()
            case "invariant":
                raise errors.InvariantError("2 is not 3")
            case "park":
                self.parked.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        return broker_pb2.PullResponse(request_id=request.request_id)

    async def _fail(self, error):
        raise error

    async def _cancelled(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            return error

    async def PullStream(self, requests, context):
        async for request in requests:
            if request.group == "rejected":
                raise errors.NotReady("soon")
            yield broker_pb2.PullResponse(request_id=request.request_id)

    async def _unused(self, request, context):
        raise AssertionError

    FetchFrames = ClaimTimerQueues = AcquireQueues = CommitOffsets = GetOffsets = SendBack = _unused


@asynccontextmanager
async def serving(**more):
    server = Server(ProcessSettings(**{"listen": "127.0.0.1:0", "drain_timeout": 0, **more}))
    server.servicer = Servicer()
    server.add(SERVICE, server.servicer, VIEWS)
    await server.start(announced=False)
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def server():
    async with serving() as server:
        yield server


@pytest.fixture
async def connection(server):
    async with channel.connect(server.address) as connection:
        yield connection


@pytest.fixture
def stub(connection):
    return BrokerStub(connection)


async def health_of(connection, name):
    check = health_pb2_grpc.HealthStub(connection).Check
    return (await check(health_pb2.HealthCheckRequest(service=name))).status


async def test_an_error_arrives_as_what_it_was(stub):
    with pytest.raises(errors.TooLarge) as caught:
        await status.answer(stub.Pull(broker_pb2.PullRequest(group="rejected")))
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("max_bytes", "9", "8")


async def test_a_foreign_client_sees_status_and_text(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Pull(broker_pb2.PullRequest(group="rejected"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "too large"


@pytest.mark.parametrize("method", ["Pull", "Send"])
async def test_bytes_that_are_no_request_are_refused_and_not_logged(connection, method, caplog):
    call = connection.unary_unary(f"/duemq.v1.Broker/{method}")
    with pytest.raises(errors.InvalidArgument, match="cannot be decoded") as caught:
        await status.answer(call(b"\xff\xff\xff"))
    assert caught.value.field == "request"
    assert not caplog.records


async def test_a_stream_of_bytes_that_are_no_request_ends_with_an_error(connection, stub, caplog):
    call = connection.stream_stream("/duemq.v1.Broker/PullStream")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
    response = await stub.Pull(broker_pb2.PullRequest(request_id=7))
    assert response.request_id == 7


async def test_a_bug_is_logged_and_its_text_stays_at_home(stub, caplog):
    with pytest.raises(errors.Internal) as caught:
        await status.answer(stub.Pull(broker_pb2.PullRequest(group="bug")))
    assert str(caught.value) == "Pull failed: KeyError; see the server's log"
    assert "secret" in caplog.text


async def test_a_broken_invariant_is_logged(stub, caplog):
    with pytest.raises(errors.Internal, match="2 is not 3"):
        await status.answer(stub.Pull(broker_pb2.PullRequest(group="invariant")))
    assert "InvariantError" in caplog.text


async def test_an_error_of_a_task_group_arrives_as_what_it_was(stub):
    with pytest.raises(errors.GroupNotFound, match="no such group"):
        await status.answer(stub.Pull(broker_pb2.PullRequest(group="group")))


async def test_a_cancelled_task_group_is_no_failure(server, stub, caplog):
    call = stub.Pull(broker_pb2.PullRequest(group="parked group"))
    await server.servicer.parked.wait()
    call.cancel()
    await server.servicer.cancelled.wait()
    await server.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_expected_error_is_not_logged(stub, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(errors.TooLarge):
        await status.answer(stub.Pull(broker_pb2.PullRequest(group="rejected")))
    assert not caplog.records


async def test_views_stand_in_for_the_generated_classes(stub):
    records = {"records": [{"body": b"x" * 100}]}
    batch = broker_pb2.Batch(topic="t", records=records)
    answer = await stub.Send(broker_pb2.SendRequest(batches=[batch]))
    assert answer.request_id == batch.records.ByteSize()


async def test_streams_that_write_end_with_the_error(stub):
    stream = stub.SendStream()
    await stream.write(broker_pb2.SendRequest(request_id=5))
    assert (await stream.read()).request_id == 5
    await stream.write(broker_pb2.SendRequest(request_id=0))
    with pytest.raises(errors.Overloaded, match="full"):
        await status.answer(stream.read())


async def test_streams_that_yield_end_with_the_error(stub):
    stream = stub.PullStream()
    await stream.write(broker_pb2.PullRequest(request_id=5))
    assert (await stream.read()).request_id == 5
    await stream.write(broker_pb2.PullRequest(group="rejected"))
    with pytest.raises(errors.NotReady, match="soon"):
        await status.answer(stream.read())


async def test_a_deadline_that_passes_is_a_timeout_and_cancels_the_call(server, stub):
    while not server.servicer.parked.is_set():  # a slow machine may not get so far in time
        with pytest.raises(errors.Timeout):
            await status.answer(stub.Pull(broker_pb2.PullRequest(group="park"), timeout=0.05))
    await server.servicer.cancelled.wait()


async def test_nobody_there_is_unavailable():
    async with channel.connect("127.0.0.1:1") as connection:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1: "):
            await status.answer(
                BrokerStub(connection).Pull(broker_pb2.PullRequest()), "127.0.0.1:1"
            )


async def test_a_missing_service_is_rejected(connection):
    call = connection.unary_unary("/duemq.v1.Nobody/Call")
    with pytest.raises(errors.Rejected):
        await status.answer(call(b""))


async def test_health_tells_life_readiness_and_drain(server, connection):
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health_of(connection, "") == serving
    assert await health_of(connection, SERVICE.full_name) == not_serving
    server.ready()
    assert await health_of(connection, SERVICE.full_name) == serving
    server.ready(serving=False)
    assert await health_of(connection, SERVICE.full_name) == not_serving
    server.drain()
    assert await health_of(connection, "") == not_serving
    assert server.draining.is_set()


async def test_who_watches_health_hears_of_a_stop_and_does_not_hold_it_up():
    server = Server(ProcessSettings(listen="127.0.0.1:0", drain_timeout=600))
    await server.start(announced=False)
    async with channel.connect(server.address) as connection:
        request = health_pb2.HealthCheckRequest(service="")
        watch = health_pb2_grpc.HealthStub(connection).Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(30):
            await server.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_who_watches_health_is_told_of_changes(server, connection):
    request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
    watch = health_pb2_grpc.HealthStub(connection).Watch(request)
    for serving in (False, True, False):
        server.ready(serving=serving)
        expected = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        assert (await watch.read()).status == expected
    unknown = health_pb2.HealthCheckRequest(service="nobody")
    watch = health_pb2_grpc.HealthStub(connection).Watch(unknown)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize(
    "method",
    [
        "grpc.health.v1.Health/Check",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_nonsense_is_an_invalid_argument_of_health_and_reflection_too(
    connection, caplog, method
):
    nonsense = b"\x0b" * 50
    if method.endswith("Check"):
        answer = connection.unary_unary(f"/{method}")(nonsense)
    else:
        stream = connection.stream_stream(f"/{method}")()
        await stream.write(nonsense)
        answer = stream.read()
    with pytest.raises(errors.InvalidArgument, match="cannot be decoded"):
        await status.answer(answer)
    assert not caplog.records


async def test_a_method_of_health_that_is_not_served_is_unimplemented(connection, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health_pb2_grpc.HealthStub(connection).List(health_pb2.HealthListRequest())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records


async def test_reflection_lists_the_services(connection):
    listing = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo()
    await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [one.name for one in (await listing.read()).list_services_response.service]
    await listing.done_writing()
    assert SERVICE.full_name in names


def read_page(url):
    with urllib.request.urlopen(url) as page:
        return page.read().decode()


def is_served(address):
    with suppress(OSError):
        return "process_" in read_page(f"http://{address}/metrics")
    return False


@pytest.mark.parametrize(("each_byte_s", "all_s"), [(0.05, 600), (600, 0.05)])
@pytest.mark.parametrize("half", [b"GET /metr", b"what is that"])
async def test_half_a_request_for_metrics_is_not_waited_for(
    half, each_byte_s, all_s, monkeypatch, capfd
):
    monkeypatch.setattr(metrics._Request, "timeout", each_byte_s)
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", all_s)
    async with serving(metrics_listen="127.0.0.1:0") as server:
        host, port = server.metrics_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(half)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await writer.wait_closed()
    assert "Traceback" not in capfd.readouterr().err


async def test_figures_that_take_long_are_waited_for(monkeypatch):
    now_s, looked = [0.0], threading.Event()
    look = metrics._Listener.service_actions

    class Slow(Collector):
        def describe(self):
            return []

        def collect(self):
            now_s[0] += metrics.REQUEST_TIMEOUT_S + 1
            assert looked.wait(30)
            return []

    def service_actions(self):
        is_late = now_s[0] > 0
        look(self)
        if is_late:
            looked.set()

    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(metrics._Listener, "service_actions", service_actions)
    async with serving(metrics_listen="127.0.0.1:0") as server:
        server.registry.register(Slow())
        assert await asyncio.to_thread(is_served, server.metrics_address)


async def test_who_comes_while_many_ask_for_metrics_is_sent_away(monkeypatch):
    """Each holds a thread, and a port scanner, or who never finishes a request, could take all."""
    monkeypatch.setattr(metrics, "REQUESTS_MAX", 2)
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 600)
    monkeypatch.setattr(metrics._Request, "timeout", 600)
    async with serving(metrics_listen="127.0.0.1:0") as server:
        host, port = server.metrics_address.split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 30) == b""
        for _, each in (*held, (reader, writer)):
            each.close()
            await each.wait_closed()
        await until(lambda: asyncio.to_thread(is_served, server.metrics_address))


async def test_who_got_no_thread_for_metrics_takes_nobodys_place(monkeypatch):
    monkeypatch.setattr(metrics, "REQUESTS_MAX", 1)
    begin, refused = metrics.ThreadingMixIn.process_request, []

    def process_request(self, request, client_address):
        if not refused:
            refused.append(request)
            raise RuntimeError("can't start new thread")
        begin(self, request, client_address)

    monkeypatch.setattr(metrics.ThreadingMixIn, "process_request", process_request)
    async with serving(metrics_listen="127.0.0.1:0") as server:
        assert not await asyncio.to_thread(is_served, server.metrics_address)
        assert await asyncio.to_thread(is_served, server.metrics_address)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
async def test_everywhere_is_ipv4_and_ipv6(everywhere):
    """Of a pod Kubernetes' probes and Prometheus may know either."""
    given = dict.fromkeys(("listen", "metrics_listen", "health_listen"), f"{everywhere}:0")
    async with serving(**given) as server:
        told = {name: getattr(server, name) for name in ADDRESSES}
        ports = {name: address.rpartition(":")[2] for name, address in told.items()}
        assert told["metrics_address"].startswith(f"{everywhere}:")
        assert told["health_address"].startswith(f"{everywhere}:")
        for host in loopbacks():
            page = f"http://{host}:{ports['metrics_address']}/metrics"
            assert "process_" in await asyncio.to_thread(read_page, page)
            for name in ("address", "health_address"):
                async with channel.connect(f"{host}:{ports[name]}") as connection:
                    health = health_pb2_grpc.HealthStub(connection)
                    answer = await health.Check(health_pb2.HealthCheckRequest())
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_metrics_count_calls_by_status():
    async with (
        serving(metrics_listen="127.0.0.1:0") as server,
        channel.connect(server.address) as connection,
    ):
        stub = BrokerStub(connection)
        await stub.Pull(broker_pb2.PullRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Pull(broker_pb2.PullRequest(group="rejected"))
        page = await asyncio.to_thread(read_page, f"http://{server.metrics_address}/metrics")
    labels = 'method="Pull",service="duemq.v1.Broker"'
    assert f'duemq_rpc_handled_total{{{labels},status="OK"}} 1.0' in page
    assert f'duemq_rpc_handled_total{{{labels},status="INVALID_ARGUMENT"}} 1.0' in page
    assert f"duemq_rpc_seconds_count{{{labels}}} 2.0" in page
    assert f"duemq_rpc_running{{{labels}}} 0.0" in page
    assert "process_resident_memory_bytes" in page


async def test_stop_cancels_what_does_not_end(server, stub):
    call = stub.Pull(broker_pb2.PullRequest(group="park"))
    parked = asyncio.ensure_future(status.answer(call))
    await server.servicer.parked.wait()
    await server.stop()
    with pytest.raises(errors.Unavailable):
        await parked


async def test_a_taken_port_is_an_os_error(server):
    second = Server(ProcessSettings(listen=server.address))
    with pytest.raises(OSError, match="cannot listen on"):
        await second.start()


async def test_a_taken_port_for_metrics_is_named_before_anything_is_served(server):
    taken = server.address
    second = Server(ProcessSettings(listen="127.0.0.1:0", metrics_listen=taken))
    with pytest.raises(OSError, match=f"metrics_listen: cannot listen on {taken}"):
        await second.start()
    assert not second.address


async def test_no_page_of_metrics_stays_where_the_server_cannot_listen(server):
    second = Server(ProcessSettings(listen=server.address, metrics_listen="127.0.0.1:0"))
    with pytest.raises(OSError, match="cannot listen on"):
        await second.start()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read_page, f"http://{second.metrics_address}/metrics")


async def test_the_address_is_announced_on_stdout(capsys):
    server = Server(ProcessSettings(listen="0.0.0.0:0"))
    await server.start()
    assert json.loads(capsys.readouterr().out) == {
        "event": "listening",
        "address": server.address,
    }
    assert server.address.startswith("127.0.0.1:")
    await server.stop()


async def test_what_to_advertise_can_be_told():
    server = Server(ProcessSettings(listen="127.0.0.1:0", advertise="broker-0.broker:9870"))
    await server.start(announced=False)
    assert server.advertised == "broker-0.broker:9870"
    await server.stop()


async def test_where_metrics_are_is_announced_too(capsys):
    server = Server(ProcessSettings(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0"))
    await server.start()
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"] == server.metrics_address
    await server.stop()


def test_a_servicer_must_have_every_method():
    with pytest.raises(AttributeError):
        method_handlers(SERVICE, object())
    with pytest.raises(ValueError, match=r"duemq\.v1\.Broker has no Sent"):
        method_handlers(SERVICE, Servicer(), {"Sent": VIEWS["Send"]})


async def test_an_error_that_any_client_can_cause_is_logged_once_a_minute(connection, caplog):
    for _ in range(5):
        with pytest.raises(errors.Internal):
            await status.answer(BrokerStub(connection).Pull(broker_pb2.PullRequest(group="bug")))
    assert len([line for line in caplog.records if "Pull failed" in line.getMessage()]) == 1


class Follower:
    """A server whose service comes when it leads."""

    def __init__(self):
        self.leads = False
        self.server = Server(ProcessSettings(listen="127.0.0.1:0", drain_timeout=0))

    def refusal(self):
        if self.leads:
            return None
        return errors.Unavailable("b leads, at 127.0.0.1:9", field="leader", value="127.0.0.1:9")


@pytest.fixture
async def follower():
    follower = Follower()
    follower.server.expect([SERVICE], follower.refusal)
    await follower.server.start(announced=False)
    try:
        yield follower
    finally:
        await follower.server.stop()


async def refused(call):
    with pytest.raises(errors.Unavailable, match="b leads") as caught:
        await status.answer(call)
    assert (caught.value.field, caught.value.value) == ("leader", "127.0.0.1:9")
    assert caught.value.retryable


async def test_what_is_expected_is_refused_and_then_served(follower):
    async with channel.connect(follower.server.address) as connection:
        stub = BrokerStub(connection)
        await refused(stub.Pull(broker_pb2.PullRequest(request_id=7)))
        stream = stub.SendStream(timeout=30)
        await refused(stream.read())  # before it has said anything
        assert (
            await health_of(connection, SERVICE.full_name)
            == health_pb2.HealthCheckResponse.NOT_SERVING
        )

        follower.leads = True
        follower.server.add(SERVICE, Servicer(), VIEWS)
        follower.server.ready()
        assert (await stub.Pull(broker_pb2.PullRequest(request_id=7))).request_id == 7
        batch = broker_pb2.Batch(topic="t", records={"records": [{"body": b"x" * 100}]})
        answer = await stub.Send(broker_pb2.SendRequest(batches=[batch]))  # by its views
        assert answer.request_id == batch.records.ByteSize()
        stream = stub.SendStream()
        await stream.write(broker_pb2.SendRequest(request_id=5))
        assert (await stream.read()).request_id == 5
        await stream.done_writing()
        assert (
            await health_of(connection, SERVICE.full_name) == health_pb2.HealthCheckResponse.SERVING
        )

        follower.leads = False  # no more
        await refused(stub.Pull(broker_pb2.PullRequest(request_id=7)))


async def test_of_what_is_expected_the_rest_is_unknown(follower):
    follower.leads = True
    async with channel.connect(follower.server.address) as connection:
        for path in ("/duemq.v1.Broker/Nothing", "/duemq.v1.Brokers/Pull"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await connection.unary_unary(path)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
