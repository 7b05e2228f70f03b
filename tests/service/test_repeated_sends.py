"""A batch that was sent on a stream that broke may be stored: it goes nowhere else, whatever is
answered to its repeat, unless that proves that it is not."""

import asyncio

import pytest

from duemq import aio
from duemq.errors import Timeout, TopicNotFound
from duemq.settings import ProducerSettings
from duemq.v1 import error_pb2
from tests.service.fake_cluster import FakeCluster, refusal
from tests.service.running_cluster import until
from tests.service.test_producer import overdue

READ_ONLY = refusal(error_pb2.READ_ONLY, retryable=True)
UNSURE = [
    READ_ONLY,
    refusal(error_pb2.OVERLOADED, retryable=True),
    refusal(error_pb2.NOT_READY, retryable=True),
]


@pytest.fixture
async def one():
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    yield cluster
    await cluster.stop()


@pytest.fixture
async def two():
    cluster = FakeCluster()
    await cluster.start("a", "b")
    cluster.topic("t")
    yield cluster
    await cluster.stop()


async def sent_and_lost(cluster, producer, *bodies, **options):
    """Sends so that the first broker stores it and the answer is lost; the repeat waits.

    Answers the broker and what is pending.
    """
    brokers = cluster.brokers.values()
    for broker in brokers:
        broker.lose_answers = 1
    pending = [producer.submit("t", body, **options) for body in bodies]
    await until(lambda: any(broker.bodies("t") for broker in brokers))
    (stored,) = [broker for broker in brokers if broker.bodies("t")]
    for broker in brokers:
        broker.lose_answers = 0
    return stored, pending


def everything(cluster):
    return sorted(body for broker in cluster.brokers.values() for body in broker.bodies("t"))


def refuse_repeats(cluster, error, times):
    """Every broker refuses what it has seen before, so many times in all."""
    asked = []
    for broker in cluster.brokers.values():

        def refuse(batch, broker=broker):
            seen = [numbers(each) for request in broker.requests for each in request.batches]
            if seen.count(numbers(batch)) < 2 or len(asked) >= times:
                return None
            asked.append(batch)
            return error

        broker.refuse_unseen = refuse
    return asked


def numbers(batch):
    return (batch.topic, batch.queue_id, batch.producer_epoch, batch.sequence)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("error", UNSURE, ids=lambda error: error_pb2.ErrorCode.Name(error.code))
async def test_a_refused_repeat_is_asked_again_where_it_may_be_stored(two, error, key):
    asked = refuse_repeats(two, error, times=3)
    async with aio.Producer(two.nameserver) as producer:
        broker, (pending,) = await sent_and_lost(two, producer, b"once", ordering_key=key)
        receipt = await pending
    assert receipt.broker == broker.name
    assert len(asked) == 3
    assert len({(batch.producer_epoch, batch.sequence) for batch in asked}) == 1
    assert everything(two) == [b"once"]


async def test_a_broker_that_stays_full_ends_in_a_timeout_that_says_that_nobody_knows(two):
    refuse_repeats(two, READ_ONLY, times=10**9)
    settings = ProducerSettings(close_timeout_s=0.1)
    async with aio.Producer(two.nameserver, settings=settings) as producer:
        broker, (pending,) = await sent_and_lost(two, producer, b"once")
        in_flight = producer._sender.pump.to(broker.name)
        await until(lambda: "READ_ONLY" in str(in_flight.last_error))
        overdue(producer)
        with pytest.raises(Timeout, match=r"stored is unknown.*READ_ONLY"):
            await pending
        broker.refuse_unseen = lambda _: None
        await producer.send("t", b"next")  # and what follows is sent
    assert everything(two) == [b"next", b"once"]


async def test_what_follows_a_refused_repeat_keeps_its_order_and_its_numbers(one):
    asked = refuse_repeats(one, READ_ONLY, times=4)
    broker = one.brokers["a"]
    settings = ProducerSettings(frame_bytes=50_000)
    async with aio.Producer(one.nameserver, settings=settings) as producer:
        await producer.send("t", b"0", ordering_key="k")
        broker.gate.clear()
        bodies = [b"%d" % number * 40_000 for number in range(1, 9)]  # a frame each
        pending = [producer.submit("t", body, ordering_key="k") for body in bodies]
        broker.lose_answers = 1
        broker.gate.set()
        receipts = [await each for each in pending]
    assert len(asked) == 4
    assert broker.bodies("t") == [b"0", *bodies]
    assert [receipt.offset for receipt in receipts] == list(range(1, 9))


async def test_other_topics_of_the_broker_go_on_meanwhile(one):
    one.topic("other")
    refuse_repeats(one, READ_ONLY, times=10**9)
    settings = ProducerSettings(close_timeout_s=0.1)
    lost = []
    async with aio.Producer(
        one.nameserver, on_error=lambda *given: lost.append(given), settings=settings
    ) as producer:
        _, (pending,) = await sent_and_lost(one, producer, b"once")
        for number in range(10):
            await producer.send("other", b"%d" % number)
        assert not pending.done()
    assert len(lost) == 1


async def test_a_repeat_that_was_stored_and_forgotten_is_not_stored_again(one):
    broker = one.brokers["a"]
    real = broker._append

    def append(batch, timed):
        answer = real(batch, timed)
        asyncio.get_running_loop().call_soon(broker.forget_answers)
        return answer

    async with aio.Producer(one.nameserver) as producer:
        broker._append, broker.lose_answers = append, 1
        with pytest.raises(Timeout, match="stored is unknown"):
            await producer.send("t", b"once")
        broker._append = real
        await producer.send("t", b"next")
    assert everything(one) == [b"next", b"once"]


async def test_a_rejected_repeat_says_that_an_earlier_attempt_may_be_stored(two):
    asked = refuse_repeats(two, refusal(error_pb2.TOPIC_NOT_FOUND), times=1)
    async with aio.Producer(two.nameserver) as producer:
        _, (pending,) = await sent_and_lost(two, producer, b"once")
        with pytest.raises(TopicNotFound, match="an earlier attempt may have been stored"):
            await pending
    assert len(asked) == 1


async def test_a_first_refusal_proves_that_it_is_not_stored(two):
    for broker in two.brokers.values():
        broker.refuse_unseen = lambda _, broker=broker: READ_ONLY if broker.name == "a" else None
    async with aio.Producer(two.nameserver) as producer:
        receipts = [await producer.send("t", b"%d" % number) for number in range(6)]
    assert {receipt.broker for receipt in receipts} == {"b"}


async def test_a_topic_whose_deletion_was_not_answered_is_deleted(one):
    one.brokers["a"].lose_answers = 1
    async with aio.Admin(one.nameserver) as admin:
        await admin.delete_topic("t")
        with pytest.raises(TopicNotFound):
            await admin.delete_topic("t")
