"""What a consumer sends back, against a broker that misbehaves on demand."""

import asyncio
import gc
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duemq.consumer.fetching.fetcher import Source
from duemq.consumer.fetching.offset_client import OffsetClient
from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.group.send_backs import MESSAGES_PER_REQUEST_MAX, SendBacks
from duemq.message import Message, Origin
from duemq.outcomes import Outcome
from duemq.protocol.balance import MessageQueue
from duemq.tracing import attributes as attribute
from duemq.tracing import spans
from duemq.transport.cluster_client import Client
from duemq.v1 import error_pb2
from duemq.v1.message_pb2 import Record
from tests.service.fake_cluster import STORE_MS, FakeBroker, FakeCluster, refusal
from tests.service.running_cluster import until

TRACEPARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
FAILED = Outcome("ValueError: no")


class Member:
    """One that holds a queue of b0."""

    def __init__(self, cluster: FakeCluster, client: Client, timeout_s: float) -> None:
        self.broker: FakeBroker = cluster.brokers["b0"]
        self.source = Source(MessageQueue("orders", "b0", 3), ALL, 77, 0)
        self.lost: list[Source] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.send_backs = SendBacks(
            OffsetClient(client, "billing", "m1"),
            self._spawn,
            lambda source, error: self.lost.append(source),
            group="billing",
            client_id="m1",
            timeout_s=timeout_s,
        )

    def _spawn(self, work):
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def fail(self, offset: int, outcome: Outcome = FAILED, deliveries: int = 1):
        record = Record(message_id=f"m{offset}", properties={"traceparent": TRACEPARENT})
        message = Message(record, Origin("orders", "b0", 3), offset, 0)
        return asyncio.ensure_future(
            self.send_backs.send_back(self.source, message, outcome, deliveries)
        )


@asynccontextmanager
async def member(timeout_s: float = 30.0):
    cluster = FakeCluster()
    await cluster.start("b0")
    client = Client(cluster.nameserver)
    await client.start()
    try:
        yield Member(cluster, client, timeout_s)
    finally:
        await client.close()
        await cluster.stop()
        gc.collect()


async def test_a_failure_goes_to_its_broker_with_all_that_is_known() -> None:
    async with member() as m:
        assert await m.fail(41)
        assert await m.fail(42, Outcome("closed", delay_ms=0), deliveries=3)
        assert await m.fail(43, Outcome("unreadable", dead_letter=True))
        first, second, third = m.broker.sent_back
        assert (first.topic, first.queue_id, first.offset) == ("orders", 3, 41)
        assert (first.generation, first.error, first.deliveries) == (77, "ValueError: no", 1)
        assert not first.HasField("delay_ms")
        assert not first.dead_letter
        assert second.HasField("delay_ms")
        assert (second.delay_ms, second.deliveries) == (0, 3)
        assert third.dead_letter
        [request, *_] = m.broker.send_back_requests
        assert (request.group, request.member_id) == ("billing", "m1")


async def test_what_fails_meanwhile_shares_the_next_request() -> None:
    async with member() as m:
        m.broker.gate.clear()
        count = 2 * MESSAGES_PER_REQUEST_MAX
        failures = [m.fail(0)]
        await until(lambda: len(m.broker.send_back_requests) == 1)
        failures += [m.fail(offset) for offset in range(1, count)]
        m.broker.gate.set()
        assert all(await asyncio.gather(*failures))
        sizes = [len(request.messages) for request in m.broker.send_back_requests]
        assert sizes == [1, MESSAGES_PER_REQUEST_MAX, MESSAGES_PER_REQUEST_MAX - 1]
        assert [message.offset for message in m.broker.sent_back] == list(range(count))


async def test_a_lost_answer_is_asked_for_again_and_stores_nothing_twice() -> None:
    async with member() as m:
        m.broker.lose_answers = 2
        assert await m.fail(41)
        assert len(m.broker.send_back_requests) == 3
        assert [message.offset for message in m.broker.sent_back] == [41]


async def test_a_refusal_is_of_one_message_only(caplog) -> None:
    async with member() as m:
        m.broker.gate.clear()
        before = m.fail(0)
        await until(lambda: len(m.broker.send_back_requests) == 1)
        m.broker.refuse_back = lambda message: (
            refusal(error_pb2.READ_ONLY, retryable=True) if message.offset == 2 else None
        )
        failures = [m.fail(offset) for offset in (1, 2, 3)]
        m.broker.gate.set()
        assert await asyncio.gather(before, *failures) == [True, True, False, True]
        assert "READ_ONLY" in caplog.text
        assert m.lost == []


async def test_a_queue_that_is_anothers_is_told() -> None:
    async with member() as m:
        m.broker.refuse_back = lambda _: refusal(error_pb2.FENCED_MEMBER)
        assert not await m.fail(41)
        assert m.lost == [m.source]


async def test_a_broker_that_is_away_gets_nothing_and_holds_up_nobody(caplog) -> None:
    async with member(timeout_s=0.05) as m:
        await m.broker.stop()
        failures = [m.fail(offset) for offset in range(MESSAGES_PER_REQUEST_MAX + 5)]
        assert not any(await asyncio.gather(*failures))
        assert f"{MESSAGES_PER_REQUEST_MAX + 5} messages could not be sent back" in caplog.text
        await m.broker.start()
        m.send_backs._timeout_s = 30.0
        assert await m.fail(0)


@pytest.fixture
def recorded():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.use(provider)
    yield exporter
    spans.use(None)
    provider.shutdown()


async def test_each_sending_back_is_a_span(recorded) -> None:
    async with member() as m:
        assert await m.fail(41, Outcome("closed", delay_ms=5_000), deliveries=2)
        m.broker.refuse_back = lambda _: refusal(error_pb2.READ_ONLY)
        assert not await m.fail(42)
        done, refused = recorded.get_finished_spans()
        assert done.name == refused.name == "settle orders"
        assert done.attributes[attribute.ATTEMPT] == 1
        assert done.attributes[attribute.DUE_MS] == STORE_MS + 5_000
        assert done.attributes[attribute.GROUP] == "billing"
        assert attribute.ERROR_TYPE not in done.attributes
        assert refused.attributes[attribute.ERROR_TYPE] == "READ_ONLY"
