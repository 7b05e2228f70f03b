"""The admin client's look-ups over two brokers, and the lives of messages."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import duemq
from duemq.administering import finding
from duemq.aio import Admin, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.descriptions import DeliveryState, FoundMessages
from duemq.errors import InvalidArgument, QueueNotFound, TopicNotFound, Unavailable
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, soon_given_up, until
from tests.unit.broker.reading.test_lookup import COLLIDING

BROKERS = ("b0", "b1")


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, *BROKERS) as made:
        yield made


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    return name


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Admin]:
    async with Admin(cluster.nameserver) as made:
        yield made


@pytest.fixture
async def impatient(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Admin]:
    """For when b1 is away: each question to it takes all of its time."""
    soon_given_up(monkeypatch, "b1")
    async with Admin(cluster.nameserver) as made:
        yield made


@pytest.fixture
async def producer(cluster: Cluster) -> AsyncIterator[Producer]:
    async with Producer(cluster.nameserver) as made:
        yield made


def bodies(found: FoundMessages) -> list[bytes]:
    return [message.body for message in found.messages]


async def test_by_key_over_brokers_with_colliding_hashes(topic, admin, producer) -> None:
    one, other = COLLIDING
    for number in range(24):
        key = one if number % 2 else other
        # Ordering keys spread them over all queues.
        await producer.send(topic, b"%d" % number, key=key, ordering_key=str(number))
    found = await admin.find_messages(topic, key=one)
    assert {message.key for message in found.messages} == {one}
    assert sorted(map(int, bodies(found))) == list(range(1, 24, 2))
    assert {message.broker for message in found.messages} == set(BROKERS)
    assert [m.store_ms for m in found.messages] == sorted(m.store_ms for m in found.messages)
    assert (found.more, found.missing) == (False, ())
    few = await admin.find_messages(topic, key=one, limit=5)
    assert (len(few.messages), few.more) == (5, True)
    assert set(bodies(few)) <= set(bodies(found))


async def test_by_id_time_and_place(topic, admin, producer) -> None:
    receipts = [await producer.send(topic, b"%d" % n) for n in range(10)]
    wanted = receipts[6]
    [found] = (await admin.find_messages(topic, message_id=wanted.message_id)).messages
    assert (found.broker, found.queue, found.offset) == (
        wanted.broker,
        wanted.queue,
        wanted.offset,
    )
    [same] = (
        await admin.find_messages(
            topic, broker=wanted.broker, queue=wanted.queue, offset=wanted.offset, limit=1
        )
    ).messages
    assert same == found
    assert len((await admin.find_messages(topic)).messages) == 10
    assert (
        len((await admin.find_messages(topic, since="-1h", until="2100-01-01T00:00Z")).messages)
        == 10
    )
    assert bodies(await admin.find_messages(topic, until="-1h")) == []
    late = await admin.find_messages(topic, since=wanted.store_ms)
    assert {b"6", b"7", b"8", b"9"} <= set(bodies(late))


async def test_a_look_up_goes_on_over_many_steps(topic, admin, cluster, monkeypatch) -> None:
    for broker in BROKERS:
        await cluster.send(topic, [b"%d" % n for n in range(50)], broker=broker)
    monkeypatch.setattr(finding, "FOUND_MAX", 7)
    assert len((await admin.find_messages(topic, limit=1_000)).messages) == 100


async def test_a_broker_that_is_away_is_named(topic, impatient, cluster) -> None:
    for broker in BROKERS:
        await cluster.send(topic, [b"a"], broker=broker)
    await cluster.silence_broker("b1")
    found = await impatient.find_messages(topic)
    assert [message.broker for message in found.messages] == ["b0"]
    assert [each.name for each in found.missing] == ["b1"]
    trace = await impatient.describe_message(topic, "m0")
    assert [stored.message.broker for stored in trace.stored] == ["b0"]
    assert [each.name for each in trace.missing] == ["b1"]


async def test_a_look_up_that_is_not_through_in_time_says_so(
    topic, admin, cluster, monkeypatch
) -> None:
    await cluster.send(topic, [b"%d" % n for n in range(50)])
    monkeypatch.setattr(finding, "FOUND_MAX", 7)
    found = await admin.find_messages(topic, broker="b0", limit=1_000, timeout_s=0.0)
    assert [each.name for each in found.missing] == ["b0"]
    assert len(found.messages) < 50


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"key": "a", "message_id": "b"}, InvalidArgument, "key"),
        ({"since": "soon"}, InvalidArgument, "since"),
        ({"until": "2030-01-01T00:00:00"}, InvalidArgument, "until"),
        ({"offset": 1}, InvalidArgument, "offset"),
        ({"queue": 0, "offset": -1}, InvalidArgument, "offset"),
        ({"queue": 9}, QueueNotFound, "queue"),
        ({"limit": 0}, InvalidArgument, "limit"),
        ({"limit": 10_001}, InvalidArgument, "limit"),
    ],
)
async def test_illegal_look_ups(topic, admin, options, kind, field: str) -> None:
    with pytest.raises(kind) as caught:
        await admin.find_messages(topic, **options)
    assert caught.value.field == field


async def test_a_broker_that_nobody_ever_heard_of_is_said_at_once(
    topic, cluster, monkeypatch
) -> None:
    """A look-up does not wait until it comes."""
    async with Admin(cluster.nameserver) as admin:

        def wait(*_: object) -> None:
            raise AssertionError("it was asked")

        monkeypatch.setattr(admin._asker, "at", wait)
        with pytest.raises(Unavailable, match="nosuch is not there; live ones: b0, b1") as raised:
            await admin.find_messages(topic, broker="nosuch")
        assert raised.value.field == "broker"


async def test_unknown_topics_and_ids(topic, admin) -> None:
    with pytest.raises(TopicNotFound):
        await admin.find_messages("nowhere")
    assert bodies(await admin.find_messages(topic, message_id="nobody")) == []
    assert not (await admin.describe_message(topic, "nobody")).found
    assert not (await admin.describe_message("nowhere", "nobody")).found
    with pytest.raises(InvalidArgument):
        await admin.describe_message(topic, "")


async def test_the_life_of_a_message(topic, admin, cluster, producer) -> None:
    good = await producer.send(topic, b"good", ordering_key="o", key="k")
    bad = await producer.send(topic, b"bad", ordering_key="o")
    later = await producer.send(topic, b"later", ordering_key="o")
    gate = asyncio.Event()

    async def work(message: duemq.Message) -> None:
        if message.body == b"bad":
            raise duemq.DeadLetter("unreadable")
        if message.body == b"later":
            await gate.wait()

    async def read(message: duemq.Message) -> None:
        pass

    settings = ConsumerSettings(start_from="earliest", commit_interval_s=0.05)
    options = {"nameserver": cluster.nameserver, "settings": settings}
    async with (
        PushConsumer("billing", topic, work, **options),
        PushConsumer("audit", topic, read, **options),
    ):

        async def states(message_id: str) -> dict[str, DeliveryState]:
            trace = await admin.describe_message(topic, message_id)
            [stored] = trace.stored
            return {each.group: each.state for each in stored.groups}

        async def settled() -> bool:
            return (await states(later.message_id), await states(bad.message_id)) == (
                {"audit": DeliveryState.CONSUMED, "billing": DeliveryState.IN_FLIGHT},
                {"audit": DeliveryState.CONSUMED, "billing": DeliveryState.SENT_BACK},
            )

        await until(settled)
        assert (await states(good.message_id))["billing"] is DeliveryState.CONSUMED
        trace = await admin.describe_message(topic, bad.message_id)
        gate.set()
    [copy] = trace.copies
    assert copy.stored_topic == "%DLQ%billing"
    assert copy.retry is not None
    assert (copy.retry.origin_topic, copy.retry.origin_offset) == (topic, bad.offset)
    assert "unreadable" in copy.retry.error
    assert (trace.accepted, trace.missing) == ((), ())
    [dead] = (await admin.find_messages("%DLQ%billing")).messages
    assert dead.message_id == bad.message_id


async def test_a_message_that_waits_for_its_retry_is_not_taken_for_consumed(
    topic, admin, cluster, producer
) -> None:
    async def fail(message: duemq.Message) -> None:
        raise duemq.RetryLater("1h", "the bank is closed")

    receipt = await producer.send(topic, b"bad", ordering_key="o")
    settings = ConsumerSettings(start_from="earliest", commit_interval_s=0.05)
    options = {"nameserver": cluster.nameserver, "settings": settings}
    async with PushConsumer("billing", topic, fail, **options):

        async def passed() -> bool:
            progress = (await admin.describe_group("billing")).progress
            return any(each.offset == 1 for each in progress)

        await until(passed)
        trace = await admin.describe_message(topic, receipt.message_id)
    [stored] = trace.stored
    assert [each.state for each in stored.groups] == [DeliveryState.SENT_BACK]
    assert (trace.copies, trace.accepted) == ((), ())
    [waiting] = trace.waiting
    assert waiting.retry is not None
    assert (waiting.retry.group, waiting.deliveries) == ("billing", 1)
    assert "the bank is closed" in waiting.retry.error


async def test_a_delayed_message_is_known_where_it_was_accepted(topic, admin, producer) -> None:
    receipt = await producer.send(topic, b"later", delay="1h")
    trace = await admin.describe_message(topic, receipt.message_id)
    assert trace.stored == ()
    assert [message.message_id for message in trace.accepted] == [receipt.message_id]
