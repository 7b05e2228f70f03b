"""Messages that are too large for their topic, or their broker, and travel with others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from duemq import Outgoing, Producer, aio
from duemq.errors import NotAllSent, TooLarge
from duemq.producing import handle
from duemq.settings import ProducerSettings
from duemq.testing import MemoryCluster
from duemq.v1 import admin_pb2, broker_pb2, error_pb2
from duemq_server.bench.harness.topic_reader import read_topic
from tests.service.fake_cluster import STORE_MS, FakeCluster
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

LIMIT = 100
MANY = ProducerSettings(frame_bytes=2_000)  # a batch has about 20 messages
WAYS = [
    {},
    {"ordering_key": "k"},
    {"delay": "5s"},
    {"delay_level": 2, "tag": "t"},
    {"ordering_key": "k", "deliver_at": STORE_MS + 3_600_000, "properties": {"a": "b"}},
]


def mixed(count: int = 20) -> list[bytes]:
    """Every third body is too large."""
    return [b"%d" % n + b"x" * (LIMIT + n) * (n % 3 == 1) for n in range(count)]


def check(told: NotAllSent, bodies: list[bytes], limit: int = LIMIT) -> list[int]:
    """The too large ones failed, each with an error of its own; answers the others' numbers."""
    large = {n for n, body in enumerate(bodies) if len(body) > limit}
    assert set(told.failures) == large
    for n, error in told.failures.items():
        assert isinstance(error, TooLarge)
        assert (error.field, error.value, error.limit) == ("body", str(len(bodies[n])), str(limit))
        assert f"{len(bodies[n])} bytes" in error.message
        with pytest.raises(TooLarge):
            told.receipts[n]
    return sorted(set(range(len(bodies))) - large)


@pytest.fixture
async def fake() -> AsyncIterator[FakeCluster]:
    """Its broker refuses batches in which a body is too large."""
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")

    def refuse(batch: broker_pb2.Batch) -> error_pb2.Error | None:
        largest = max(len(record.body) for record in batch.records.records)
        if largest <= LIMIT:
            return None
        return error_pb2.Error(
            code=error_pb2.TOO_LARGE, field="body", value=str(largest), limit=str(LIMIT)
        )

    cluster.brokers["a"].refuse = refuse
    yield cluster
    await cluster.stop()


@pytest.mark.parametrize("options", WAYS)
async def test_the_others_of_its_batch_are_stored_where_their_receipts_say(fake, options) -> None:
    bodies = mixed()
    async with aio.Producer(fake.nameserver) as producer:
        with pytest.raises(NotAllSent) as told:
            await producer.send_many("t", bodies, **options)
    broker = fake.brokers["a"]
    small = check(told.value, bodies)
    timed = options.keys() & {"delay", "delay_level", "deliver_at"}
    of = "%TIMER%" if timed else "t"
    assert sorted(broker.bodies(of)) == sorted(bodies[n] for n in small)
    for n in small:
        receipt = told.value.receipts[n]
        place = handle.decode(receipt.handle) if timed else receipt
        queue = place.queue_id if timed else place.queue
        assert broker.stored[of, queue][place.offset] == bodies[n]
        assert receipt.message_id in broker.message_ids
        if timed:
            due_ms = {"delay": STORE_MS + 5_000, "delay_level": STORE_MS + 2_000}
            [given] = timed
            assert receipt.due_ms == due_ms.get(given, STORE_MS + 3_600_000) == place.due_ms


async def test_due_times_stay_with_their_messages(fake) -> None:
    bodies = mixed(8)
    async with aio.Producer(fake.nameserver) as producer:
        await producer.send("t", b"first")  # the topic is found: what follows travels together
        fake.brokers["a"].gate.clear()
        pending = [producer.submit("t", body, delay=n) for n, body in enumerate(bodies)]
        fake.brokers["a"].gate.set()
        for n, (body, each) in enumerate(zip(bodies, pending, strict=True)):
            if len(body) > LIMIT:
                with pytest.raises(TooLarge):
                    await each
            else:
                receipt = await each
                assert receipt.due_ms == STORE_MS + 1_000 * n
                assert handle.decode(receipt.handle).due_ms == receipt.due_ms


async def test_a_key_stays_in_order_and_each_is_stored_once(fake) -> None:
    """Many batches of a lane are on their way as one in front is refused."""
    bodies = [b"%d" % n + b"x" * LIMIT * (n % 50 == 30) for n in range(1_000)]
    async with aio.Producer(fake.nameserver, settings=MANY) as producer:
        pending = []
        for body in bodies:
            await producer.ready("t")
            pending.append(producer.submit("t", body, ordering_key="k"))
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert fake.brokers["a"].bodies("t") == [body for body in bodies if len(body) <= LIMIT]
    for body, outcome in zip(bodies, outcomes, strict=True):
        assert isinstance(outcome, TooLarge) == (len(body) > LIMIT)


async def test_of_a_batch_of_large_ones_nothing_is_sent_again(fake) -> None:
    bodies = [b"x" * (LIMIT + 1 + n) for n in range(10)]
    async with aio.Producer(fake.nameserver) as producer:
        with pytest.raises(NotAllSent) as told:
            await producer.send_many("t", bodies)
    assert check(told.value, bodies) == []
    assert len(fake.brokers["a"].requests) == 1


async def test_who_asks_nobody_hears_of_the_large_ones_only(fake) -> None:
    heard = []
    bodies = mixed()
    async with aio.Producer(
        fake.nameserver, on_error=lambda pending, error: heard.append((pending, error))
    ) as producer:
        await producer.ready("t")
        ids = [producer.submit("t", body).message_id for body in bodies]
        await producer.flush()
    assert [pending.message_id for pending, _ in heard] == ids[1::3]
    assert [error.value for _, error in heard] == [str(len(body)) for body in bodies[1::3]]


async def test_after_the_deadline_the_others_are_in_doubt_and_the_large_ones_not(fake) -> None:
    broker, bodies = fake.brokers["a"], mixed(6)
    quick = ProducerSettings(send_timeout_s=0.5)
    async with aio.Producer(fake.nameserver, settings=quick) as producer:
        refuse = broker.refuse

        def once(batch: broker_pb2.Batch) -> error_pb2.Error | None:
            broker.gate.clear()  # what comes next is not answered
            return refuse(batch)

        broker.refuse = once
        with pytest.raises(NotAllSent) as told:
            await producer.send_many("t", bodies)
        kinds = [type(told.value.failures[n]).__name__ for n in range(len(bodies))]
        assert kinds == ["Timeout", "TooLarge", "Timeout"] * 2
        broker.gate.set()


# --- real brokers -----------------------------------------------------------------------------


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", "b1", message_bytes_max=1_000) as cluster:
        yield cluster


@pytest.fixture(params=[LIMIT, 0], ids=["of a topic", "of a broker"])
async def limited(request, cluster: Cluster) -> tuple[str, int]:
    """A topic, and what its bodies may have."""
    name = topic_name()
    config = admin_pb2.TopicConfig(name=name, queues=2, message_bytes_max=request.param)
    for client in cluster.clients.values():
        await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))
    await until(lambda: all(cluster._serves(cache, name) for cache in cluster._caches))
    return name, request.param or 1_000


def bodies_for(limit: int) -> list[bytes]:
    return [b"%d" % n + b"x" * limit * (n % 7 == 3) for n in range(200)]


async def contents(cluster: Cluster, topic: str) -> dict[tuple[str, int, int], tuple[str, bytes]]:
    found = await asyncio.to_thread(lambda: list(read_topic(cluster.nameserver, topic)))
    return {(m.broker, m.queue, m.offset): (m.message_id, m.body) for m in found}


@pytest.mark.parametrize("options", [{}, {"ordering_key": "k", "key": "look", "tag": "t"}])
async def test_a_real_broker_stores_the_others(cluster, limited, options) -> None:
    topic, limit = limited
    bodies = bodies_for(limit)
    async with aio.Producer(cluster.nameserver, settings=MANY) as producer:
        with pytest.raises(NotAllSent) as told:
            await producer.send_many(topic, bodies, **options)
        after = await producer.send(topic, b"after", **options)
    small = check(told.value, bodies, limit)
    stored = await contents(cluster, topic)
    assert stored.pop((after.broker, after.queue, after.offset)) == (after.message_id, b"after")
    receipts = {n: told.value.receipts[n] for n in small}
    assert stored == {
        (r.broker, r.queue, r.offset): (r.message_id, bodies[n]) for n, r in receipts.items()
    }
    if options:
        assert [body for _, body in stored.values()] == [bodies[n] for n in small]


async def test_a_blocking_producer_has_the_others_stored(cluster, limited) -> None:
    topic, limit = limited
    bodies = bodies_for(limit)

    def send() -> None:
        with (
            Producer(cluster.nameserver, settings=MANY) as producer,
            pytest.raises(NotAllSent) as told,
        ):
            producer.send_many(topic, iter(bodies))
        check(told.value, bodies, limit)

    await asyncio.to_thread(send)
    stored = await contents(cluster, topic)
    assert sorted(body for _, body in stored.values()) == sorted(
        body for body in bodies if len(body) <= limit
    )


@pytest.mark.parametrize("options", [{}, {"ordering_key": "k", "key": "look"}])
async def test_properties_that_a_broker_refuses_fail_alone(tmp_path, options) -> None:
    """By a limit of its own, lower than what the producer knows."""
    wrong = {0: {"long": "x" * 50}, 25: {"a": "1", "b": "x" * 40}}
    messages = [
        Outgoing(b"%d" % n, properties=wrong.get(n, {"fits": "x" * 34}), **options)
        for n in range(30)
    ]
    async with running_cluster(tmp_path, "b0", properties_bytes_max=44) as cluster:
        topic = topic_name()
        async with aio.Producer(cluster.nameserver) as producer:
            with pytest.raises(NotAllSent) as told:
                await producer.send_many(topic, messages)
        sizes = {n: (each.field, each.value, each.limit) for n, each in told.value.failures.items()}
        assert sizes == {0: ("properties", "58", "44"), 25: ("properties", "51", "44")}
        kept = [n for n in range(30) if n not in wrong]
        receipts = [told.value.receipts[n] for n in kept]
        assert await contents(cluster, topic) == {
            (r.broker, r.queue, r.offset): (r.message_id, messages[n].body)
            for n, r in zip(kept, receipts, strict=True)
        }


def test_the_twin_stores_the_others() -> None:
    """By its one limit, 4 MiB."""
    cluster = MemoryCluster(queues=1)
    limit, settings = 4 << 20, ProducerSettings(frame_bytes=8 << 20)
    bodies = [b"first", b"x" * (limit + 1), b"last"]
    with cluster.producer(settings=settings) as producer:
        for options in ({}, {"delay": "5s"}):
            with pytest.raises(NotAllSent) as told:
                producer.send_many("t", bodies, **options)
            assert check(told.value, bodies, limit) == [0, 2]
        timed = told.value.receipts
        assert producer.cancel([timed[0], timed[2]]) == ["cancelled"] * 2
    assert [message.body for message in cluster.messages("t")] == [b"first", b"last"]
