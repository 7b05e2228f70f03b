"""What an application's own OpenTelemetry providers get of its messages."""

from dataclasses import replace

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from duemq import aio
from duemq.consumer.settings import ConsumerSettings
from duemq.tracing import meters, spans
from tests.service.running_broker import topic_name
from tests.service.running_cluster import running_cluster, until

SETTINGS = ConsumerSettings(start_from="earliest", retry_wait_s_min=0.001, retry_wait_s_max=0.01)


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0") as cluster:
        cluster.made = topic_name()
        await cluster.create_topic(cluster.made)
        yield cluster


@pytest.fixture
def reader():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meters.use(provider)
    yield reader
    meters.use(None)
    provider.shutdown()


@pytest.fixture
def sampled():
    return True


@pytest.fixture
def exporter(sampled):
    exporter = InMemorySpanExporter()
    sampler = ALWAYS_ON if sampled else ALWAYS_OFF
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.use(provider)
    yield exporter
    spans.use(None)
    provider.shutdown()


def points(reader):
    """(metric, operation, error) → (messages or calls, attributes)."""
    data = reader.get_metrics_data()
    found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes)
            count = getattr(point, "count", None)
            key = (
                metric.name,
                attributes["messaging.operation.name"],
                attributes.get("error.type"),
            )
            found[key] = point.value if count is None else count, attributes, point
    return found


def consumer(cluster, callback, **options):
    return aio.PushConsumer(
        "billing",
        cluster.made,
        callback,
        nameserver=cluster.nameserver,
        settings=SETTINGS,
        **options,
    )


async def send(cluster, *bodies):
    async with aio.Producer(cluster.nameserver) as producer:
        for body in bodies:
            await producer.send(cluster.made, body)


async def test_messages_and_durations_are_measured(cluster, reader):
    got = []

    def callback(message):
        got.append(message.body)
        if message.body == b"bad":
            raise ValueError("no")

    await send(cluster, b"one", b"bad", b"two")
    async with consumer(cluster, callback):
        await until(lambda: len(got) == 3)
        await until(
            lambda: ("messaging.client.operation.duration", "settle", None) in points(reader)
        )

    found = points(reader)
    sent, attributes, _ = found["messaging.client.sent.messages", "send", None]
    assert sent == 3
    address = attributes.pop("server.address"), attributes.pop("server.port")
    assert f"{address[0]}:{address[1]}" == cluster.brokers["b0"].server.address
    assert attributes == {
        "messaging.system": "duemq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": cluster.made,
    }
    consumed, attributes, _ = found["messaging.client.consumed.messages", "receive", None]
    assert consumed == 3
    assert attributes["messaging.consumer.group.name"] == "billing"
    _, _, durations = found["messaging.client.operation.duration", "send", None]
    assert durations.count == 3
    assert durations.explicit_bounds[0] == 0.005
    assert found["messaging.process.duration", "process", None][0] == 2
    assert found["messaging.process.duration", "process", "ValueError"][0] == 1
    assert found["messaging.client.operation.duration", "settle", None][0] == 1


@pytest.mark.parametrize("batch", [False, True], ids=["each", "batch"])
@pytest.mark.parametrize("order", [None, "queue"])
async def test_every_kind_of_callback_is_measured(cluster, reader, batch, order):
    got = []

    async def callback(given):
        got.extend(given if batch else [given])

    await send(cluster, b"one", b"two")
    async with consumer(cluster, callback, batch=batch, order=order):
        await until(lambda: len(got) == 2)
    calls, attributes, _ = points(reader)["messaging.process.duration", "process", None]
    assert 1 <= calls <= 2 if batch else calls == 2
    assert attributes["messaging.destination.name"] == cluster.made


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "not-sampled"])
async def test_baggage_goes_along_whether_sampled_or_not(cluster, exporter, sampled):
    got = []
    token = context.attach(baggage.set_baggage("tenant", "blue, and green"))
    try:
        await send(cluster, b"sent")
        async with aio.Producer(cluster.nameserver) as producer:
            await producer.send_many(cluster.made, [b"listed"])
            own = {"baggage": "tenant=red"}
            await producer.send(cluster.made, b"own", properties=own)
            crowded = {"x": "y" * 32_750}
            await producer.send(cluster.made, b"no room", properties=crowded)
    finally:
        context.detach(token)
    await send(cluster, b"none")

    def callback(message):
        got.append((message.body, baggage.get_baggage("tenant"), dict(message.properties)))

    async with consumer(cluster, callback):
        await until(lambda: len(got) == 5)
    tenants = {body: tenant for body, tenant, _ in got}
    both = "blue, and green"
    assert tenants == {
        b"sent": both,
        b"listed": both,
        b"own": "red",
        b"no room": None,
        b"none": None,
    }
    assert baggage.get_baggage("tenant") is None
    traced = {body for body, _, properties in got if "traceparent" in properties}
    assert traced == (set(tenants) - {b"no room"} if sampled else set())


async def test_spans_name_the_server_and_what_was_raised(cluster, exporter):
    got = []

    def callback(message):
        got.append(message)
        raise ValueError("no such order")

    await send(cluster, b"one")
    async with consumer(cluster, callback):
        await until(lambda: len(got) == 1)
        await until(lambda: any(s.name.startswith("settle") for s in exporter.get_finished_spans()))
    by_operation = {
        span.attributes["messaging.operation.name"]: span for span in exporter.get_finished_spans()
    }
    for operation in ("send", "receive", "settle"):
        attributes = by_operation[operation].attributes
        server = f"{attributes['server.address']}:{attributes['server.port']}"
        assert server == cluster.brokers["b0"].server.address
    [event] = by_operation["process"].events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "ValueError"
    assert event.attributes["exception.message"] == "no such order"


async def test_a_call_says_whether_each_member_gets_everything(cluster, exporter, tmp_path):
    got = []
    settings = replace(SETTINGS, offsets_dir=str(tmp_path / "offsets"))
    await send(cluster, b"m")
    for broadcast in (True, False):
        async with aio.PushConsumer(
            "billing",
            cluster.made,
            got.append,
            broadcast=broadcast,
            nameserver=cluster.nameserver,
            settings=settings,
        ):
            await until(lambda many=2 - broadcast: len(got) == many)
    calls = [span for span in exporter.get_finished_spans() if span.name.startswith("process")]
    assert [call.attributes.get("duemq.broadcast") for call in calls] == [True, None]
