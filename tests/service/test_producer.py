"""The producers against brokers that misbehave."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import pytest

from duemq import aio
from duemq.errors import (
    Closed,
    InvalidArgument,
    NotAllSent,
    Overloaded,
    PermissionDenied,
    Timeout,
    TooLarge,
    TopicNotFound,
    Unavailable,
)
from duemq.message import Outgoing
from duemq.producing.intake import EARLY_BATCHES_MAX
from duemq.settings import ClientSettings, ProducerSettings
from duemq.v1 import admin_pb2, error_pb2
from tests.service.fake_cluster import STORE_MS, FakeBroker, FakeCluster, refusal
from tests.service.running_cluster import WAIT_S, until

QUICK = ProducerSettings(send_timeout_s=0.3, close_timeout_s=0.3)


@pytest.fixture
async def cluster():
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


@pytest.fixture
async def producer(cluster):
    async with aio.Producer(cluster.nameserver) as producer:
        yield producer


def numbered(count):
    return [b"%d" % index for index in range(count)]


async def test_a_receipt_tells_where_the_message_is(cluster, producer):
    first = await producer.send("t", b"body", key="k", tag="x", properties={"a": "b"})
    assert (first.topic, first.broker, first.offset) == ("t", "a", 0)
    assert (first.store_ms, first.handle, first.due_ms) == (STORE_MS, None, None)
    (request,) = cluster.brokers["a"].requests
    (record,) = request.batches[0].records.records
    assert (record.body, record.key, record.tag) == (b"body", "k", "x")
    assert record.message_id == first.message_id
    assert dict(record.properties) == {"a": "b"}


async def test_a_delayed_message_has_a_handle(producer):
    receipt = await producer.send("t", b"body", delay="5s")
    assert (receipt.due_ms, receipt.queue, receipt.offset) == (STORE_MS + 5_000, None, None)
    assert receipt.handle.startswith("dmq1")


async def test_what_waits_travels_together(cluster, producer):
    broker = cluster.brokers["a"]
    await producer.send("t", b"first")
    broker.gate.clear()
    pending = [producer.submit("t", body) for body in numbered(1_000)]
    broker.gate.set()
    receipts = [await each for each in pending]
    assert len({(r.queue, r.offset) for r in receipts}) == 1_000
    assert len({r.message_id for r in receipts}) == 1_000
    assert len(broker.requests) < 20


async def test_nothing_waits_when_nothing_is_on_its_way(cluster, producer):
    for body in numbered(5):
        await producer.send("t", body)
    assert [len(r.batches[0].sizes) for r in cluster.brokers["a"].requests] == [1] * 5


async def test_a_broker_that_does_not_answer_holds_up_little_for_long(two):
    """Little that waits waits for answers of other brokers, but not for ever."""
    async with aio.Producer(two.nameserver) as producer:
        await producer.send("t", b"x")
        in_flight = producer._sender.pump.to("a")
        two.brokers["a"].gate.clear()
        stuck = producer.submit("t", b"x")
        await until(lambda: stuck.done() or in_flight.awaited)
        while stuck.done():  # it was the other broker's turn
            stuck = producer.submit("t", b"x")
            await until(lambda stuck=stuck: stuck.done() or in_flight.awaited)
        receipt = await producer.submit("t", b"little")
        assert receipt.broker == "b"
        assert not stuck.done()
        two.brokers["a"].gate.set()


async def test_queues_and_brokers_take_turns(two):
    async with aio.Producer(two.nameserver) as producer:
        receipts = [await producer.send("t", b"x") for _ in range(16)]
    used = {(receipt.broker, receipt.queue) for receipt in receipts}
    assert {broker for broker, _ in used} == {"a", "b"}
    assert len(used) == 8


async def test_an_ordering_key_stays_in_one_queue_in_order(two):
    async with aio.Producer(two.nameserver) as producer:
        pending = [
            producer.submit("t", b"%d/%d" % (index % 7, index), ordering_key=f"k{index % 7}")
            for index in range(700)
        ]
        receipts = [await each for each in pending]
    for key in range(7):
        mine = receipts[key::7]
        assert len({(receipt.broker, receipt.queue) for receipt in mine}) == 1
        assert [r.offset for r in mine] == sorted({r.offset for r in mine})


async def test_lost_answers_are_sent_again_and_stored_once(cluster, producer):
    broker = cluster.brokers["a"]
    await producer.send("t", b"first")
    broker.lose_answers = 3
    receipts = await producer.send_many("t", numbered(5_000))
    assert sorted(broker.bodies("t")) == sorted([b"first", *numbered(5_000)])
    assert broker.streams > 1
    assert len({(r.queue, r.offset) for r in receipts}) == 5_000


async def test_lost_answers_keep_the_order_of_a_key(cluster, producer):
    broker = cluster.brokers["a"]
    settings = ProducerSettings(frame_bytes=2_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        broker.lose_answers = 4
        await producer.send_many("t", numbered(500), ordering_key="k")
    assert broker.bodies("t") == numbered(500)


async def test_an_answer_that_nobody_understands_costs_the_stream_and_no_message(
    cluster, producer, monkeypatch
):
    await producer.send("t", b"x")
    pump, strange = producer._sender.pump, ["one"]
    answered = pump.answered

    def understand(*args):
        if strange:
            raise KeyError(strange.pop())
        answered(*args)

    monkeypatch.setattr(pump, "answered", understand)
    assert [(await producer.send("t", body)).broker for body in numbered(3)] == ["a"] * 3
    assert sorted(cluster.brokers["a"].bodies("t")) == [b"0", b"1", b"2", b"x"]


async def test_a_restarted_broker_gets_each_message_once(cluster, producer):
    broker = cluster.brokers["a"]
    await producer.send("t", b"first")
    broker.gate.clear()
    pending = [producer.submit("t", body, ordering_key="k") for body in numbered(300)]
    await asyncio.sleep(0)
    await broker.stop()
    broker.gate.set()
    await broker.start()
    receipts = [await each for each in pending]
    assert [r.offset for r in receipts] == list(range(receipts[0].offset, receipts[0].offset + 300))
    assert sorted(broker.bodies("t")) == sorted([b"first", *numbered(300)])


async def test_a_refused_batch_fails_alone_and_what_follows_is_stored_in_order(cluster):
    broker = cluster.brokers["a"]

    def refuse(batch):
        large = any(len(record.body) > 1_000 for record in batch.records.records)
        return refusal(error_pb2.TOO_LARGE) if large else None

    settings = ProducerSettings(frame_bytes=1_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.send("t", b"first", ordering_key="k")
        broker.refuse = refuse
        bodies = [*numbered(100), bytes(2_000), *numbered(100)]
        pending = [producer.submit("t", body, ordering_key="k") for body in bodies]
        outcomes = await asyncio.gather(*map(awaited, pending), return_exceptions=True)
    failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, TooLarge)]
    assert 100 in failed
    kept = [body for index, body in enumerate(bodies) if index not in failed]
    assert broker.bodies("t") == [b"first", *kept]


async def awaited(pending):
    return await pending


async def test_an_overloaded_broker_is_asked_again(cluster, producer):
    refusals = iter([refusal(error_pb2.OVERLOADED, retryable=True)] * 3)
    cluster.brokers["a"].refuse = lambda _: next(refusals, None)
    assert (await producer.send("t", b"one")).broker == "a"
    await producer.send("t", b"two", ordering_key="k")
    assert sorted(cluster.brokers["a"].bodies("t")) == [b"one", b"two"]


async def test_a_read_only_broker_is_avoided_and_its_batch_goes_elsewhere(two):
    two.brokers["a"].refuse = lambda _: refusal(error_pb2.READ_ONLY, retryable=True)
    async with aio.Producer(two.nameserver) as producer:
        receipts = [await producer.send("t", b"x") for _ in range(10)]
    assert {receipt.broker for receipt in receipts} == {"b"}
    assert len(two.brokers["a"].requests) == 1
    assert len(two.brokers["b"].bodies("t")) == 10


async def test_a_dead_broker_is_avoided_by_messages_without_a_key(two):
    await two.brokers["a"].stop()
    async with aio.Producer(two.nameserver) as producer:
        receipts = [await producer.send("t", b"x") for _ in range(5)]
    assert {receipt.broker for receipt in receipts} == {"b"}


async def test_a_keyed_message_waits_for_its_broker(two):
    async with aio.Producer(two.nameserver) as producer:
        first = await producer.send("t", b"1", ordering_key="key")
        home = two.brokers[first.broker]
        await home.stop()
        await noticed(producer, home)
        pending = producer.submit("t", b"2", ordering_key="key")
        others = [await producer.send("t", b"x") for _ in range(3)]
        assert {receipt.broker for receipt in others} != {first.broker}
        assert not pending.done()
        await home.start()
        second = await pending
    assert (second.broker, second.queue, second.offset) == (first.broker, first.queue, 1)


async def test_keys_stay_in_their_queues_while_the_nameservers_forget_a_broker(two):
    keys = [f"k{number}" for number in range(24)]
    async with aio.Producer(two.nameserver) as producer:
        before = [await producer.send("t", b"1", ordering_key=key) for key in keys]
        assert {receipt.broker for receipt in before} == {"a", "b"}
        await away(two, "a", producer)
        pending = [producer.submit("t", b"2", ordering_key=key) for key in keys]
        for receipt, first in zip(pending, before, strict=True):
            if first.broker == "b":
                assert place(await receipt) == place(first)
        assert [each.done() for each in pending] == [first.broker == "b" for first in before]
        await back(two, "a")
        assert [place(await each) for each in pending] == list(map(place, before))


async def test_a_topic_first_used_while_a_broker_is_away_has_all_its_queues(two):
    async with aio.Producer(two.nameserver) as producer:
        await away(two, "a", producer)
        pending = [producer.submit("t", b"x", ordering_key=f"k{n}") for n in range(24)]
        await back(two, "a")
        assert {(await each).broker for each in pending} == {"a", "b"}


async def test_a_keyed_message_never_goes_elsewhere_when_its_time_is_over(two):
    async with aio.Producer(two.nameserver) as producer:
        home = (await producer.send("t", b"1", ordering_key="key")).broker
        await away(two, home, producer)
        await noticed(producer, two.brokers[home])
        with in_a_hurry(producer), pytest.raises(Timeout, match=r"not sent within 0\.3 s"):
            await producer.send("t", b"2", ordering_key="key")
        (other,) = two.brokers.keys() - {home}
        assert two.brokers[other].stored == {}


@contextmanager
def in_a_hurry(producer):
    """What is sent within may time out soon; what must succeed before and after may take long."""
    patient = producer._settings
    producer._settings = producer._sender.pump.settings = QUICK
    try:
        yield
    finally:
        producer._settings = producer._sender.pump.settings = patient


def overdue(producer):
    """The time of all that the producer was given is over, and it finds out.

    So a test gives it as long as it needs to get where it shall be when that happens.
    """
    for batch in producer._sender.pump.open:
        batch.deadline_ms = 0.0
    producer._sender.run()


async def taken_in(producer):
    """Returns when the producer has something to send."""
    await until(lambda: any(not batch.done for batch in producer._sender.pump.open))


def place(receipt):
    return receipt.broker, receipt.queue


async def away(cluster, name, producer):
    """Stops a broker; returns when the producer was told that it is gone."""
    await cluster.brokers[name].stop()
    cluster.gone.add(name)
    cluster.push()
    await producer._client.wait_for(lambda routes: routes.broker(name) is None, WAIT_S)


async def back(cluster, name):
    await cluster.brokers[name].start()
    cluster.gone.discard(name)
    cluster.push()


async def noticed(producer, broker):
    """Until the producer knows that the broker is down: what it wrote before would have to wait."""
    await until(lambda: not producer._sender.pump.to(broker.name).up)


async def test_a_message_that_cannot_be_sent_times_out_and_says_that_it_was_not(cluster):
    await cluster.brokers["a"].stop()
    async with aio.Producer(cluster.nameserver) as producer:
        for ordering_key in (None, "k"):
            sending = asyncio.create_task(producer.send("t", b"y", ordering_key=ordering_key))
            await taken_in(producer)
            await until(lambda: producer._sender.pump.to("a").last_error is not None)
            overdue(producer)
            with pytest.raises(Timeout, match=r"not sent within \d.* s.*a: .*cannot connect"):
                await sending


async def test_a_message_without_answer_times_out_and_says_that_nobody_knows(cluster):
    broker = cluster.brokers["a"]
    async with aio.Producer(cluster.nameserver) as producer:
        await producer.send("t", b"x")
        broker.gate.clear()
        sending = asyncio.create_task(producer.send("t", b"y"))
        await until(lambda: bool(producer._sender.pump.to("a").awaited))
        overdue(producer)
        with pytest.raises(Timeout, match="unknown"):
            await sending
        broker.gate.set()
        # The way is free again, and the lane goes on.
        assert [(await producer.send("t", b"z")).broker for _ in range(8)] == ["a"] * 8


async def test_a_full_buffer_makes_callers_wait(cluster):
    broker = cluster.brokers["a"]
    settings = ProducerSettings(buffer_bytes=20_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.send("t", b"x")
        broker.gate.clear()
        pending = [producer.submit("t", bytes(1_000)) for _ in range(19)]
        with pytest.raises(Overloaded, match="ready") as raised:
            producer.submit("t", b"too much")
        assert (raised.value.field, raised.value.limit) == ("buffer_bytes", "20000")
        calls = (producer.ready("t"), producer.send("t", b"late"))
        waiting = [asyncio.create_task(call) for call in calls]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
        broker.gate.set()
        await asyncio.gather(*waiting)
        await producer.submit("t", b"later")
        for each in pending:
            await each


async def test_who_waits_for_room_as_the_producer_closes_hears_of_that(cluster):
    settings = ProducerSettings(buffer_bytes=1, close_timeout_s=0.1)
    producer = aio.Producer(cluster.nameserver, settings=settings)
    await producer.start()
    await producer.send("t", b"x")
    cluster.brokers["a"].gate.clear()
    sends = [asyncio.ensure_future(producer.send("t", b"y")) for _ in range(3)]
    await until(lambda: producer._turns.waiting == 2)
    await producer.close()
    told = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(each) for each in told] == [Closed] * 3
    cluster.brokers["a"].gate.set()


async def test_a_buffer_that_stays_full_is_a_timeout(cluster):
    async with aio.Producer(cluster.nameserver) as producer:
        await producer.send("t", b"x")
        producer.outbox.used_bytes += QUICK.buffer_bytes
        with in_a_hurry(producer), pytest.raises(Timeout) as raised:
            await producer.ready("t")
        assert raised.value.field == "buffer_bytes"
        producer.outbox.used_bytes -= QUICK.buffer_bytes
        await producer.send("t", b"y")


async def test_a_loop_that_is_ready_lets_messages_leave(cluster, producer):
    pending = []
    while not (pending and pending[0].done()):
        await producer.ready("t")
        pending.append(producer.submit("t", b"x"))
    assert len(cluster.brokers["a"].requests) >= 1


async def test_a_producer_that_is_not_started_takes_nothing(cluster):
    producer = aio.Producer(cluster.nameserver)
    with pytest.raises(Closed, match="not started"):
        producer.submit("t", b"x")
    with pytest.raises(Closed, match="not started"):
        await producer.ready("t")


async def test_what_is_submitted_before_its_topic_is_found_stays_in_order(two):
    """Also with what is sent while it is being found, and after."""
    async with aio.Producer(two.nameserver) as producer:
        early = [
            producer.submit("new", b"%d" % n, ordering_key=f"k{n % 5}", delay=delay)
            for n, delay in enumerate([None] * 50 + ["5s"])
        ]
        plain = [producer.submit("new", body) for body in numbered(100)]
        assert not any(each.done() for each in early + plain)
        sent = [producer.send("new", b"%d" % n, ordering_key=f"k{n % 5}") for n in range(50, 100)]
        keyed = [await each for each in early[:50]] + await asyncio.gather(*sent)
        assert (await early[50]).handle is not None
        late = [producer.submit("new", b"x", ordering_key=f"k{n}") for n in range(5)]
        keyed += [await each for each in late]
        ids = [(await each).message_id for each in plain]
    for key in range(5):
        mine = keyed[key::5]
        assert len({(receipt.broker, receipt.queue) for receipt in mine}) == 1
        assert [r.offset for r in mine] == sorted({r.offset for r in mine})
    assert ids == [each.message_id for each in plain]


async def test_sends_keep_their_order_while_their_topic_is_being_found(cluster, producer):
    """Also one that is called just as it is found."""
    sends = []

    def send():
        body = b"%d" % len(sends)
        sends.append(asyncio.ensure_future(producer.send("new", body, ordering_key="k")))

    def found():
        if "new" in producer._client.routes.topics and len(sends) < 6:
            send()

    producer._client.on_routes_changed(found)
    for _ in range(3):
        send()
    await until(lambda: len(sends) > 3)
    await asyncio.gather(*sends)
    assert cluster.brokers["a"].bodies("new") == numbered(len(sends))


async def test_sends_keep_their_order_while_they_wait_for_room(cluster):
    """Also one that is called just as there is room."""
    settings = ProducerSettings(buffer_bytes=1)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.ready("t")
        sends = []

        def send():
            body = b"%d" % len(sends)
            sends.append(asyncio.ensure_future(producer.send("t", body, ordering_key="k")))

        send()
        sends[0].add_done_callback(lambda _: send())
        await asyncio.sleep(0)
        assert producer.outbox.full
        producer.outbox.on_room(send)  # before those that wait
        for _ in range(3):
            send()
        await until(lambda: len(sends) == 6)
        await asyncio.gather(*sends)
    assert cluster.brokers["a"].bodies("t") == numbered(6)


async def test_what_is_submitted_to_a_topic_that_is_not_found_fails_as_a_send(cluster):
    cluster.brokers["a"].auto_create = False
    async with aio.Producer(cluster.nameserver) as producer:
        pending = [producer.submit("other", b"x", ordering_key=key) for key in (None, "k")]
        for each in pending:
            with pytest.raises(Exception, match="auto_create_topics") as sent:
                await each
        with pytest.raises(type(sent.value), match="auto_create_topics"):
            await producer.send("other", b"x")
        assert producer.outbox.used_bytes == 0
        cluster.brokers["a"].auto_create = True
        await producer.submit("other", b"y", ordering_key="k")


async def test_flush_and_close_know_what_waits_for_its_topic(cluster):
    settings = ProducerSettings(close_timeout_s=0.1, create_topics=False)
    producer = aio.Producer(cluster.nameserver, settings=settings)
    await producer.start()
    pending = producer.submit("other", b"x")
    await asyncio.sleep(0)  # it is being found, with time enough
    with in_a_hurry(producer), pytest.raises(Timeout, match="1 messages not answered"):
        await producer.flush()
    with pytest.raises(NotAllSent, match="1 message not acknowledged"):
        await producer.close()
    with pytest.raises(Closed, match="it was not sent"):
        await pending


async def test_the_keys_that_wait_for_their_topic_are_bounded(producer):
    pending = [
        producer.submit("new", b"x", ordering_key=f"k{number}")
        for number in range(EARLY_BATCHES_MAX)
    ]
    with pytest.raises(Overloaded) as raised:
        producer.submit("new", b"x", ordering_key="too many")
    assert raised.value.field == "ordering_key"
    await producer.ready("new")
    await producer.submit("new", b"x", ordering_key="one more")
    assert len({(await each).message_id for each in pending}) == EARLY_BATCHES_MAX


async def test_a_done_callback_may_submit(cluster):
    """Also in a buffer that was full until then."""
    settings = ProducerSettings(buffer_bytes=1_000)
    finished = asyncio.get_running_loop().create_future()

    def again(pending):
        if len(cluster.brokers["a"].bodies("t")) >= 20:
            finished.set_result(None)
            return
        producer.submit("t", bytes(1_000)).add_done_callback(again)

    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        producer.submit("t", bytes(1_000)).add_done_callback(again)
        await finished


async def test_an_unknown_topic_is_created_on_every_broker(two):
    async with aio.Producer(two.nameserver) as producer:
        await producer.send("new", b"x")
    assert all("new" in broker.topics for broker in two.brokers.values())


async def test_a_broker_that_is_slow_to_make_a_topic_makes_it_all_the_same(two, monkeypatch):
    monkeypatch.setattr("duemq.transport.cluster_client.CREATE_GRACE_S", 0.01)
    slow = two.brokers["b"]
    make, go_on = slow.CreateTopic, asyncio.Event()

    async def create(request, context):
        await go_on.wait()
        return await make(request, context)

    slow.CreateTopic = create
    await slow.stop()
    await slow.start()
    async with aio.Producer(two.nameserver) as producer:
        assert (await producer.send("new", b"x")).broker == "a"
        go_on.set()
        await until(lambda: "new" in slow.topics)
        while not slow.bodies("new"):
            await producer.send("new", b"y")


async def test_a_broker_that_made_a_topic_and_went_is_not_waited_for(two):
    going = two.brokers["b"]
    make = going.CreateTopic

    async def create(request, context):
        two.gone.add("b")
        return await make(request, context)

    going.CreateTopic = create
    await going.stop()
    await going.start()
    settings = ProducerSettings(send_timeout_s=10 * WAIT_S)
    async with asyncio.timeout(WAIT_S), aio.Producer(two.nameserver, settings=settings) as producer:
        assert (await producer.send("new", b"x")).broker == "a"


async def test_producers_that_send_one_message_do_not_all_use_one_queue(two, monkeypatch):
    lots = iter(range(1 << 62, (1 << 62) + 64))
    monkeypatch.setattr(
        "secrets.randbits", lambda _: next(lots) * 0x9E37_79B9_7F4A_7C15 % (1 << 63)
    )
    receipts = []
    for _ in range(24):
        async with aio.Producer(two.nameserver) as producer:
            receipts.append(await producer.send("t", b"x"))
    assert {receipt.broker for receipt in receipts} == {"a", "b"}
    assert {receipt.queue for receipt in receipts} == {0, 1, 2, 3}


async def test_a_broker_that_does_not_answer_does_not_hold_up_a_new_topic(two):
    await two.brokers["a"].stop()
    async with aio.Producer(two.nameserver) as producer:
        assert (await producer.send("new", b"x")).broker == "b"


async def test_closing_while_a_topic_is_made_is_an_error_and_no_cancellation(monkeypatch):
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(broker, request, context):
        asked.set()
        await answered.wait()
        return admin_pb2.CreateTopicResponse()

    monkeypatch.setattr(FakeBroker, "CreateTopic", slow)
    cluster = FakeCluster()
    await cluster.start("a")
    settings = ProducerSettings(close_timeout_s=0.3)
    producer = aio.Producer(cluster.nameserver, settings=settings)
    await producer.start()
    sending = asyncio.create_task(producer.send("new", b"x"))
    await asyncio.wait_for(asked.wait(), WAIT_S)
    await producer.close()
    with pytest.raises(Closed):
        await sending
    answered.set()
    await cluster.stop()


async def test_a_topic_that_is_found_behind_the_close_connects_to_nobody(cluster, monkeypatch):
    soon = ProducerSettings(close_timeout_s=0.1)  # the close waits for what the search is for
    producer = aio.Producer(cluster.nameserver, settings=soon)
    await producer.start()
    find = producer._client.topic_route

    async def late(*args, **options):
        await find(*args, **options)
        await producer.close()

    monkeypatch.setattr(producer._client, "topic_route", late)
    with pytest.raises(Closed):
        await producer.send("t", b"x")
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("link to")]


async def test_a_start_that_failed_may_be_tried_again(cluster):
    soon = replace(QUICK, send_timeout_s=20, client=ClientSettings(connect_timeout_s=0.2))
    producer = aio.Producer("127.0.0.1:1", settings=soon)
    with pytest.raises(Unavailable):
        await producer.start()
    producer._client.nameservers = (cluster.nameserver,)  # as if one listened there by now
    producer._client.settings = ClientSettings()
    await asyncio.gather(producer.start(), producer.start())
    assert (await producer.send("t", b"x")).broker == "a"
    await producer.close()


async def test_the_first_messages_of_a_key_go_where_the_later_ones_go(two):
    async with aio.Producer(two.nameserver) as producer:
        pending = [producer.submit("new", b"x", ordering_key=f"k{i % 9}") for i in range(90)]
        receipts = [await each for each in pending]
    homes = {(i % 9, r.broker, r.queue) for i, r in enumerate(receipts)}
    assert len(homes) == 9


async def test_a_topic_that_may_not_be_created(cluster):
    cluster.brokers["a"].auto_create = False
    async with aio.Producer(cluster.nameserver) as producer:
        with pytest.raises(Exception, match="auto_create_topics"):
            await producer.send("new", b"x")
    settings = replace(QUICK, create_topics=False)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        with pytest.raises(TopicNotFound):
            await producer.send("new", b"x")


async def test_a_topic_that_only_brokers_write_to_is_refused_and_not_made(cluster, producer):
    for topic in ("%RETRY%g", "%DLQ%g"):
        with pytest.raises(PermissionDenied, match="only brokers"):
            await producer.send(topic, b"x")
    assert list(cluster.brokers["a"].topics) == ["t"]


async def test_a_deleted_topic_is_looked_up_again(cluster, producer):
    await producer.send("t", b"x")
    del cluster.brokers["a"].topics["t"]
    with pytest.raises(TopicNotFound):
        await producer.send("t", b"y")
    cluster.push()
    await cluster_forgets(producer, "t")
    assert (await producer.send("t", b"z")).broker == "a"


async def test_a_topic_whose_end_was_heard_of_is_made_anew(cluster, producer):
    await producer.send("t", b"x")
    del cluster.brokers["a"].topics["t"]
    cluster.push()
    await cluster_forgets(producer, "t")
    assert (await producer.send("t", b"y")).offset == 0
    assert "t" in cluster.brokers["a"].topics


async def cluster_forgets(producer, topic):
    await producer._client.wait_for(lambda routes: routes.route(topic) is None, WAIT_S)


async def test_send_many_takes_any_mixture(cluster, producer):
    mixture = [b"a", Outgoing(b"b", key="k"), b"c", Outgoing(b"d", delay="1s"), bytearray(b"e")]
    receipts = await producer.send_many("t", iter(mixture), tag="shared")
    assert [receipt.handle is None for receipt in receipts] == [True, True, True, False, True]
    tags = {
        record.body: record.tag
        for request in cluster.brokers["a"].requests
        for batch in request.batches
        for record in batch.records.records
    }
    assert tags == {b"a": "shared", b"b": "", b"c": "shared", b"d": "", b"e": "shared"}


async def test_send_many_keeps_the_order_of_a_key_over_frames(cluster):
    settings = ProducerSettings(frame_bytes=5_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        receipts = await producer.send_many("t", numbered(3_000), ordering_key="k")
    assert [receipt.offset for receipt in receipts] == list(range(3_000))
    assert cluster.brokers["a"].bodies("t") == numbered(3_000)


async def test_send_many_of_nothing(producer):
    assert len(await producer.send_many("t", [])) == 0


async def test_send_many_says_which_failed(cluster):
    def refuse(batch):
        bad = any(record.body == b"bad" for record in batch.records.records)
        return refusal(error_pb2.INVALID_ARGUMENT) if bad else None

    cluster.brokers["a"].refuse = refuse
    settings = ProducerSettings(frame_bytes=1)  # each message travels alone
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        bodies = [b"ok"] * 3 + [b"bad"] + [b"ok"] * 3
        with pytest.raises(NotAllSent, match="1 of 7") as raised:
            await producer.send_many("t", bodies)
    assert list(raised.value.failures) == [3]
    assert isinstance(raised.value.failures[3], InvalidArgument)
    assert raised.value.receipts[4].topic == "t"


WRONG = [
    ("text", "body"),
    (bytes(8 << 20), "body"),
    (Outgoing(b"x", delay="soon"), "delay"),
    (Outgoing(b"x", key=7), "key"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
@pytest.mark.parametrize("others", [b"ok", Outgoing(b"ok")], ids=["bytes", "outgoing"])
async def test_of_a_list_with_a_wrong_message_nothing_is_sent(
    cluster, producer, wrong, field, others
):
    messages = [others] * 700 + [wrong] + [others] * 700
    with pytest.raises((InvalidArgument, TooLarge), match=r"message 700: .*nothing was sent") as e:
        await producer.send_many("t", messages)
    assert e.value.field == f"messages[700].{field}"
    await producer.flush()
    assert cluster.brokers["a"].bodies("t") == []


@pytest.mark.parametrize(("wrong", "field"), WRONG)
async def test_what_comes_in_front_of_a_wrong_message_is_sent(cluster, producer, wrong, field):
    messages = iter([b"ok"] * 700 + [wrong] + [b"ok"] * 700)
    with pytest.raises((InvalidArgument, TooLarge), match=r"message 700: .*front of it") as e:
        await producer.send_many("t", messages)
    assert e.value.field == f"messages[700].{field}"
    await producer.flush()
    assert cluster.brokers["a"].bodies("t") == [b"ok"] * 700


async def test_options_of_a_send_many_are_no_messages_fault(producer):
    with pytest.raises(InvalidArgument, match=r"^delay"):
        await producer.send_many("t", iter([b"x"]), delay="soon")


@pytest.mark.parametrize(
    ("topic", "options", "field"),
    [
        (None, {}, "topic"),
        (b"t", {}, "topic"),
        (5, {}, "topic"),
        ("\ud800", {}, "topic"),
        ("t", {"properties": [("a", "b")]}, "properties"),
        ("t", {"properties": "ab"}, "properties"),
    ],
)
async def test_arguments_of_another_type_are_refused_by_name(producer, topic, options, field):
    with pytest.raises(InvalidArgument) as refused:
        await producer.send(topic, b"x", **options)
    assert refused.value.field == field


async def test_cancel_takes_receipts(cluster, producer):
    delayed = [await producer.send("t", b"x", delay="1h") for _ in range(2)]
    plain = await producer.send("t", b"x")
    with pytest.raises(InvalidArgument, match="was not delayed") as raised:
        await producer.cancel([*delayed, plain])
    assert raised.value.field == "handle"
    settings = ProducerSettings(client=ClientSettings(request_timeout_s=0.1))
    async with aio.Producer(cluster.nameserver, settings=settings) as quick:
        for given in (delayed[0], delayed, [delayed[0].handle, delayed[1]]):
            with pytest.raises(Unavailable, match="no timer shard"):
                await quick.cancel(given)


@pytest.mark.parametrize("wrong", [b"one message", "text"])
async def test_send_many_wants_many(producer, wrong):
    with pytest.raises(InvalidArgument, match="takes an iterable"):
        await producer.send_many("t", wrong)


async def test_close_sends_what_is_left(cluster):
    broker = cluster.brokers["a"]
    async with aio.Producer(cluster.nameserver) as producer:
        pending = [producer.submit("t", body) for body in numbered(100)]
    assert all(each.done() for each in pending)
    assert len(broker.bodies("t")) == 100
    with pytest.raises(Closed):
        producer.submit("t", b"x")
    await producer.close()


async def test_close_is_bounded(cluster):
    broker = cluster.brokers["a"]
    settings = ProducerSettings(close_timeout_s=0.1)
    producer = aio.Producer(cluster.nameserver, settings=settings)
    await producer.start()
    await producer.send("t", b"x")
    broker.gate.clear()
    pending = producer.submit("t", b"y")
    await until(lambda: bool(producer._sender.pump.to("a").awaited))
    with pytest.raises(NotAllSent, match="1 message not acknowledged"):
        await producer.close()
    with pytest.raises(Closed, match="unknown"):
        await pending
    broker.gate.set()


async def test_who_waits_is_told_though_a_close_is_cancelled_twice(cluster):
    producer = aio.Producer(cluster.nameserver)
    await producer.start()
    await producer.send("t", b"x")
    cluster.brokers["a"].gate.clear()
    pending = producer.submit("t", b"y")
    link = producer._sender._links["a"]
    end = link.close

    async def cancelled():
        closing.cancel()
        await end()

    link.close = cancelled
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert pending.done()
    with pytest.raises(Closed):
        await pending
    cluster.brokers["a"].gate.set()


async def test_flush(cluster, producer):
    pending = [producer.submit("t", body) for body in numbered(100)]
    await producer.flush()
    assert all(each.done() for each in pending)


async def test_the_nameserver_may_die(cluster, producer):
    await producer.send("t", b"x")
    await cluster.stop_nameserver()
    assert (await producer.send("t", b"y")).broker == "a"


async def test_no_nameserver_at_all():
    settings = ProducerSettings(client=ClientSettings(connect_timeout_s=0.2))
    producer = aio.Producer("127.0.0.1:1", settings=settings)
    with pytest.raises(Unavailable, match="no nameserver answered"):
        await producer.start()
    with pytest.raises(Closed, match="not started"):
        await aio.Producer("127.0.0.1:1").send("t", b"x")


async def test_a_delay_level_that_a_broker_lacks_fails_no_other_message(cluster, producer):
    def refuse(batch):
        return refusal(error_pb2.INVALID_ARGUMENT) if 19 in batch.delay_levels else None

    cluster.brokers["a"].refuse = refuse
    await producer.ready("t")
    levels = [1, 19, 2, 1, 19]
    pending = [producer.submit("t", b"%d" % level, delay_level=level) for level in levels]
    answers = await asyncio.gather(*pending, return_exceptions=True)
    refused = [isinstance(answer, InvalidArgument) for answer in answers]
    assert refused == [level == 19 for level in levels]
    assert sorted(cluster.brokers["a"].bodies("%TIMER%")) == [b"1", b"1", b"2"]
