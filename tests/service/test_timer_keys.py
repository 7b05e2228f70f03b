"""Timers under their owner's key through the SDK: requests, repeats, order, answers."""

import asyncio
import contextlib
import gc
import itertools
from zlib import crc32

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import duemq
from duemq import CancelOutcome, Outgoing, RescheduleOutcome, aio
from duemq.errors import (
    Closed,
    InvalidArgument,
    NotAllSent,
    Overloaded,
    Timeout,
    TimerExists,
    TooLarge,
    TopicNotFound,
    Unavailable,
)
from duemq.producing import handle
from duemq.producing.keyed import lanes
from duemq.protocol.balance import queue_of_key
from duemq.settings import ClientSettings, ProducerSettings
from duemq.tracing import meters, spans
from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import message_pb2, timer_pb2
from tests.service.fake_cluster import FakeCluster
from tests.service.fake_keys import NOW_MS
from tests.service.running_cluster import WAIT_S, until
from tests.service.test_producer import in_a_hurry

TOPIC = "orders"
SHARDS = 2


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a", "b", timers=SHARDS)
    cluster.topic(TOPIC)
    yield cluster
    await cluster.stop()


@pytest.fixture
async def producer(cluster):
    async with aio.Producer(cluster.nameserver) as producer:
        yield producer


def shard_of(cluster, key, topic=TOPIC):
    return cluster.timers[crc32(f"{topic}\0{key}".encode()) % SHARDS].keyed


def keys_of(cluster, wanted, shard=0):
    """So many keys of one shard."""
    names = (f"key-{n}" for n in range(10_000))
    mine = [name for name in names if shard_of(cluster, name) is cluster.timers[shard].keyed]
    return mine[:wanted]


async def test_a_send_waits_for_room_though_others_fill_the_buffer_meanwhile(cluster, monkeypatch):
    """As it looked for the timer shards: it was Overloaded, as only `submit` may be."""
    settings = ProducerSettings(buffer_bytes=1_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.ready(TOPIC)
        look, others = producer._timer_calls.ready, []

        async def ready(timeout_s):
            while not producer.outbox.full:
                others.append(producer.submit(TOPIC, bytes(600)))
            return await look(timeout_s)

        monkeypatch.setattr(producer._timer_calls, "ready", ready)
        receipt = await producer.send(TOPIC, b"1", timer_key="k", delay="5s")
        assert receipt.due_ms == NOW_MS + 5_000
        assert len(await asyncio.gather(*others)) == 2


async def test_a_receipt_tells_handle_due_time_and_what_was_replaced(cluster, producer):
    first = await producer.send(TOPIC, b"1", timer_key="k", delay="5s")
    assert (first.due_ms, first.replaced, first.queue, first.offset) == (
        NOW_MS + 5_000,
        None,
        None,
        None,
    )
    assert first.broker == f"timer-{shard_of(cluster, 'k').shard}"
    assert first.store_ms == NOW_MS
    second = await producer.send(TOPIC, b"2", timer_key="k", deliver_at=NOW_MS + 9_000)
    assert (second.due_ms, second.replaced) == (NOW_MS + 9_000, first.handle)
    assert second.handle != first.handle
    waiting = shard_of(cluster, "k")
    [there] = waiting.waiting.values()
    assert handle.decode(second.handle) == there
    record = waiting.records[there.offset]
    assert (record.body, record.timer_key, record.message_id) == (b"2", "k", second.message_id)
    assert not any(broker.requests for broker in cluster.brokers.values())


async def test_with_if_absent_the_error_tells_what_is_there(cluster, producer):
    first = await producer.send(TOPIC, b"1", timer_key="k", delay=5, if_absent=True)
    with pytest.raises(TimerExists) as raised:
        await producer.send(TOPIC, b"2", timer_key="k", delay=7, if_absent=True)
    error = raised.value
    assert (error.handle, error.due_ms) == (first.handle, first.due_ms)
    assert (error.field, error.value, error.retryable) == ("timer_key", "k", False)
    assert "'k'" in str(error)
    assert TOPIC in str(error)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timer_key": "k"}, "timer_key"),
        ({"timer_key": "", "delay": 1}, "timer_key"),
        ({"timer_key": "x" * 256, "delay": 1}, "timer_key"),
        ({"timer_key": "a\nb", "delay": 1}, "timer_key"),
        ({"timer_key": "\ud800", "delay": 1}, "timer_key"),
        ({"timer_key": 5, "delay": 1}, "timer_key"),
        ({"timer_key": "k", "delay_level": 1}, "delay_level"),
        ({"timer_key": "k", "delay": 253_402_300_799}, "delay"),
        ({"if_absent": True, "delay": 1}, "if_absent"),
    ],
)
async def test_what_is_wrong_is_said_before_anything_is_sent(cluster, producer, options, field):
    with pytest.raises(InvalidArgument) as raised:
        await producer.send(TOPIC, b"", **options)
    assert raised.value.field == field
    assert not shard_of(cluster, "k").requests


async def test_a_topic_of_the_system_has_no_timer_keys(producer):
    with pytest.raises(InvalidArgument, match="topics of your own"):
        producer.submit("%TRACE%", b"", timer_key="k", delay=1)


async def test_a_topic_is_made_first(cluster, producer):
    pending = producer.submit("new", b"1", timer_key="k", delay=5, ordering_key="o")
    receipt = await pending
    assert receipt.topic == "new"
    [request] = shard_of(cluster, "k", "new").requests
    assert request.broker in cluster.brokers
    assert request.queue_id >= 0


async def test_an_ordering_key_goes_to_its_queue(cluster, producer):
    await producer.send(TOPIC, b"1", timer_key="k", delay=5, ordering_key="customer")
    await producer.send(TOPIC, b"1", timer_key="l", delay=5)
    index = queue_of_key("customer", 8)
    [request] = [each for each in shard_of(cluster, "k").requests if each.queue_id >= 0]
    assert (request.broker, request.queue_id) == ("a" if index < 4 else "b", index % 4)
    others = [each for timer in cluster.timers for each in timer.keyed.requests]
    assert [(each.broker, each.queue_id) for each in others if each is not request] == [("", -1)]


@pytest.mark.parametrize("error", [Unavailable("away"), Overloaded("full")])
async def test_a_request_is_repeated_as_it_was(cluster, producer, error):
    waiting = shard_of(cluster, "k")
    waiting.refuse, waiting.lose_answers = [error], 2
    receipt = await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    assert receipt.replaced is None
    assert len(waiting.requests) == 4
    assert len({each.SerializeToString() for each in waiting.requests}) == 1
    assert len(waiting.records) == 1


async def test_a_shard_that_comes_back_elsewhere_gets_the_same_request(cluster, producer):
    timer = cluster.timers[shard_of(cluster, "k").shard]
    timer.keyed.gate.clear()
    pending = producer.submit(TOPIC, b"1", timer_key="k", delay=5)
    await until(lambda: len(timer.keyed.requests) == 1)
    await timer.stop()
    timer.keyed.gate.set()
    timer.address = ""
    await timer.start()
    cluster.push()
    assert (await pending).replaced is None
    ids = {each.request_id for each in timer.keyed.requests}
    assert len(timer.keyed.requests) > 1
    assert len(ids) == 1


async def given_up(producer, key):
    """What a message says whose time was over after its shard was looked for."""
    while True:  # a slow machine may give it up before
        with pytest.raises(Timeout) as raised:
            await producer.send(TOPIC, b"1", timer_key=key, delay=5)
        if "what was asked before" not in str(raised.value):
            return str(raised.value)


async def test_at_its_deadline_a_message_is_given_up_and_says_what_is_known(cluster):
    async with aio.Producer(cluster.nameserver) as producer:
        await producer.ready(TOPIC)
        producer.intake._keyed._timeout_s = 0.3
        waiting = shard_of(cluster, "k")
        waiting.gate.clear()
        assert "whether the message is stored is unknown" in await given_up(producer, "k")
        cluster.hide_timers()
        await producer._client.wait_for(lambda routes: not routes.timers, WAIT_S)
        assert "not sent within 0.3 s: no timer shard" in await given_up(producer, "l")
        assert producer.outbox.used_bytes == 0
        waiting.gate.set()


async def test_without_any_timer_shard(cluster):
    lone = FakeCluster()
    await lone.start("a")
    lone.topic(TOPIC)
    settings = ProducerSettings(client=ClientSettings(request_timeout_s=0.2))
    async with aio.Producer(lone.nameserver, settings=settings) as producer:
        await producer.ready(TOPIC)
        with in_a_hurry(producer), pytest.raises(Unavailable, match="know no timer shard"):
            await producer.send(TOPIC, b"1", timer_key="k", delay=5)
        with pytest.raises(Unavailable, match="know no timer shard"):
            await producer.cancel(key=(TOPIC, "k"))
        with pytest.raises(Unavailable, match="know no timer shard"):
            producer.submit(TOPIC, b"1", timer_key="k", delay=5)
        await producer.send(TOPIC, b"as ever")
        assert producer.outbox.used_bytes == 0
    await lone.stop()


async def test_what_a_shard_refuses_for_good_is_the_callers_error(cluster, producer):
    waiting = shard_of(cluster, "k")
    waiting.refuse = [TooLarge("no", field="records")]
    with pytest.raises(TooLarge):
        await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    assert len(waiting.requests) == 1


async def test_a_topic_that_was_deleted_and_is_there_again_is_asked_about_again(cluster, producer):
    waiting = shard_of(cluster, "k")
    waiting.refuse = [TopicNotFound("no such topic", field="topic")]
    receipt = await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    assert receipt.due_ms == NOW_MS + 5_000
    first, again = waiting.requests
    assert first == again


async def test_a_topic_that_was_deleted_is_made_again_as_for_other_sends(cluster, producer):
    await producer.ready(TOPIC)
    waiting = shard_of(cluster, "k")
    waiting.gate.clear()
    sent = asyncio.create_task(producer.send(TOPIC, b"1", timer_key="k", delay=5))
    await until(lambda: waiting.running == 1)
    for broker in cluster.brokers.values():
        del broker.topics[TOPIC]
    cluster.push()
    await producer._client.wait_for(lambda routes: routes.route(TOPIC) is None, WAIT_S)
    waiting.refuse = [TopicNotFound("no such topic", field="topic")]
    waiting.gate.set()
    assert (await sent).due_ms == NOW_MS + 5_000
    assert all(TOPIC in broker.topics for broker in cluster.brokers.values())


async def test_a_topic_that_stays_away_is_said_to_be_not_there(cluster):
    settings = ProducerSettings(create_topics=False)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.ready(TOPIC)
        producer.intake._keyed._timeout_s = 0.5
        waiting = shard_of(cluster, "k")
        while True:  # on a slow machine it may be late before it is sent
            waiting.refuse = [TopicNotFound("no such topic", field="topic")] * 100
            with pytest.raises((TopicNotFound, Timeout)) as raised:
                await producer.send(TOPIC, b"1", timer_key="k", delay=5)
            if isinstance(raised.value, TopicNotFound):
                break
        assert raised.value.retryable


async def test_the_last_word_about_a_key_is_the_last_one_said(cluster, producer):
    waiting = shard_of(cluster, "k")
    waiting.gate.clear()
    pending = [
        producer.submit(TOPIC, b"%d" % n, timer_key="k", delay=5 + n, if_absent=False)
        for n in range(20)
    ]
    cancel = asyncio.create_task(producer.cancel(key=(TOPIC, "k")))
    await until(lambda: waiting.running == 1)
    last = producer.submit(TOPIC, b"last", timer_key="k", delay=5)
    waiting.gate.set()
    receipts = [await each for each in pending]
    assert await cancel is CancelOutcome.CANCELLED
    for before, after in itertools.pairwise(receipts):
        assert after.replaced == before.handle
    assert waiting.most_running == 1
    receipt = await last
    assert receipt.replaced is None
    assert handle.decode(receipt.handle) == waiting.waiting[TOPIC, "k"]


async def test_the_last_word_is_the_last_one_also_before_any_shard_is_known(cluster, monkeypatch):
    """Also where it is said just as they are heard of."""
    heard = RouteWatcher._said
    hidden = cluster.timers_hidden = set(range(len(cluster.timers)))
    async with aio.Producer(cluster.nameserver) as producer:
        await producer.ready("t")
        sends = []

        def send():
            said = producer.send("t", b"%d" % len(sends), timer_key="k", delay="1h")
            sends.append(asyncio.ensure_future(said))

        def hear(watcher, address, update):
            if update.timers:
                send()
            heard(watcher, address, update)

        monkeypatch.setattr(RouteWatcher, "_said", hear)
        for _ in range(3):
            send()
        await asyncio.sleep(0)
        hidden.clear()
        cluster.push()
        await until(lambda: len(sends) == 4)
        receipts = await asyncio.gather(*sends)
    assert [each.replaced for each in receipts] == [None, *(r.handle for r in receipts[:-1])]


async def test_messages_gather_while_requests_are_under_way(cluster, producer):
    keys = keys_of(cluster, 200)
    waiting = cluster.timers[0].keyed
    waiting.gate.clear()
    await producer.ready(TOPIC)
    pending = []
    for key in keys:
        pending.append(producer.submit(TOPIC, b"x", timer_key=key, delay=5))
        await asyncio.sleep(0)
    await until(lambda: waiting.running == 4)
    waiting.gate.set()
    receipts = [await each for each in pending]
    assert len({each.handle for each in receipts}) == 200
    assert waiting.most_running == 4
    assert len(waiting.requests) <= 8


async def test_many_go_in_requests_of_a_thousand_shards_in_parallel(cluster, monkeypatch):
    monkeypatch.setattr(lanes, "AGE_S_MAX", WAIT_S)  # a busy machine may need long to take all
    for timer in cluster.timers:
        timer.keyed.gate.clear()
    messages = [
        Outgoing(b"%d" % n, timer_key=f"k{n}", delay=5 + n % 2, key=f"k{n}", properties={"p": "v"})
        for n in range(5_000)
    ]
    patient = ProducerSettings(send_timeout_s=WAIT_S)
    async with aio.Producer(cluster.nameserver, settings=patient) as producer:
        sending = asyncio.create_task(producer.send_many(TOPIC, messages))
        await until(lambda: all(timer.keyed.running for timer in cluster.timers))
        taken = producer._timer_calls.lanes.open
        await until(lambda: sum(len(call.timers) for call in taken()) == 5_000)
        for timer in cluster.timers:
            timer.keyed.gate.set()
        receipts = await sending
    assert len(receipts) == 5_000
    requests = [each for timer in cluster.timers for each in timer.keyed.requests]
    assert len(requests) <= 20
    for n, receipt in enumerate(receipts):
        told = handle.decode(receipt.handle)
        record = cluster.timers[told.queue_id].keyed.records[told.offset]
        assert (record.timer_key, record.body) == (f"k{n}", b"%d" % n)
        assert record.message_id == receipt.message_id
        assert receipt.due_ms == NOW_MS + 5_000 + n % 2 * 1_000
        assert dict(record.properties) == {"p": "v"}


async def test_of_many_those_that_exist_fail_and_the_others_are_stored(cluster, producer):
    there = [await producer.send(TOPIC, b"", timer_key=f"k{n}", delay=5) for n in (1, 3)]
    messages = [Outgoing(b"", timer_key=f"k{n}", delay=9, if_absent=True) for n in range(5)]
    with pytest.raises(NotAllSent) as raised:
        await producer.send_many(TOPIC, messages)
    error = raised.value
    assert sorted(error.failures) == [1, 3]
    assert [error.failures[n].handle for n in (1, 3)] == [each.handle for each in there]
    stored = [error.receipts[n].due_ms for n in (0, 2, 4)]
    assert stored == [NOW_MS + 9_000] * 3
    with pytest.raises(TimerExists):
        error.receipts[1]


async def test_ordinary_and_keyed_messages_in_one_list(cluster, producer):
    messages = [b"plain", Outgoing(b"keyed", timer_key="k", delay=5), Outgoing(b"timed", delay=5)]
    plain, keyed, timed = await producer.send_many(TOPIC, messages)
    assert plain.offset is not None
    assert keyed.broker.startswith("timer-")
    assert timed.broker in cluster.brokers


async def test_a_wrong_message_of_a_list_sends_nothing(cluster, producer):
    messages = [Outgoing(b"", timer_key="a", delay=1), Outgoing(b"", timer_key="b")]
    with pytest.raises(InvalidArgument, match=r"message 1: timer_key 'b'.*nothing was sent"):
        await producer.send_many(TOPIC, messages)
    with pytest.raises(InvalidArgument, match="send them as Outgoing"):
        await producer.send_many(TOPIC, [b"a"], timer_key="k", delay=1)
    assert not any(timer.keyed.requests for timer in cluster.timers)


async def test_cancels_by_key(cluster, producer):
    await producer.send_many(TOPIC, [Outgoing(b"", timer_key=f"k{n}", delay=5) for n in range(4)])
    shard_of(cluster, "fired").fired.add((TOPIC, "fired"))
    assert await producer.cancel(key=(TOPIC, "k0")) is CancelOutcome.CANCELLED
    outcomes = await producer.cancel(key=[(TOPIC, each) for each in ("k1", "k0", "fired", "k2")])
    assert [str(each) for each in outcomes] == ["cancelled", "unknown", "fired", "cancelled"]
    async with aio.Admin(cluster.nameserver) as admin:
        assert await admin.cancel(key=[(TOPIC, "k3")]) == [CancelOutcome.CANCELLED]
        assert await admin.cancel(key=[]) == []


@pytest.mark.parametrize(
    "key",
    [
        "k",
        ("orders",),
        ("orders", "a", "b"),
        ["k"],
        [("orders", "")],
        ("%TRACE%", "k"),
        5,
        ("", "k"),
    ],
)
async def test_what_is_no_key_cancels_nothing(cluster, producer, key):
    with pytest.raises(InvalidArgument):
        await producer.cancel(key=key)
    with pytest.raises(InvalidArgument):
        await producer.reschedule(key=key, delay=1)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        await producer.cancel("dmq1", key=(TOPIC, "k"))


async def test_a_cancel_by_key_is_repeated_under_its_id(cluster, producer):
    """A second one would cancel what came under the key meanwhile."""
    await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    waiting = shard_of(cluster, "k")
    waiting.lose_answers = 1
    assert await producer.cancel(key=(TOPIC, "k")) is CancelOutcome.CANCELLED
    assert len({each.request_id for each in waiting.requests}) == 2


async def test_callers_that_cancel_by_key_share_requests(cluster, producer):
    keys = keys_of(cluster, 300)
    messages = [Outgoing(b"", timer_key=key, delay=5) for key in keys]
    await producer.send_many(TOPIC, messages)
    waiting = cluster.timers[0].keyed
    waiting.requests.clear()
    outcomes = await asyncio.gather(*(producer.cancel(key=(TOPIC, key)) for key in keys))
    assert outcomes == [CancelOutcome.CANCELLED] * 300
    assert len(waiting.requests) < 20


async def test_a_key_that_cannot_be_decided_yet_is_asked_about_again(cluster, producer):
    keys = keys_of(cluster, 3)
    await producer.send_many(TOPIC, [Outgoing(b"", timer_key=key, delay=5) for key in keys])
    waiting = cluster.timers[0].keyed
    waiting.refuse_timers[keys[1]] = 2
    outcomes = await producer.cancel(key=[(TOPIC, key) for key in keys])
    assert outcomes == [CancelOutcome.CANCELLED] * 3
    asked = [[each.key for each in request.keys] for request in waiting.requests[-2:]]
    assert asked == [[keys[1]], [keys[1]]]


async def test_a_caller_that_gives_up_takes_nobody_along(cluster, producer):
    keys = keys_of(cluster, 6)
    await producer.send_many(TOPIC, [Outgoing(b"", timer_key=key, delay=5) for key in keys])
    waiting = cluster.timers[0].keyed
    waiting.gate.clear()
    calls = [asyncio.create_task(producer.cancel(key=(TOPIC, key))) for key in keys]
    await until(lambda: waiting.running >= 1)
    calls[0].cancel()
    calls[5].cancel()
    waiting.gate.set()
    assert await asyncio.gather(*calls[1:5]) == [CancelOutcome.CANCELLED] * 4


async def test_reschedules_by_key_receipt_and_handle(cluster, producer):
    receipts = await producer.send_many(
        TOPIC, [Outgoing(b"", timer_key=f"k{n}", delay=5) for n in range(6)]
    )
    shard_of(cluster, "fired").fired.add((TOPIC, "fired"))
    one = await producer.reschedule(key=(TOPIC, "k0"), delay="1h")
    assert (one.outcome, one.due_ms) == (RescheduleOutcome.RESCHEDULED, NOW_MS + 3_600_000)
    assert one.handle != receipts[0].handle
    assert (await producer.reschedule(receipts[1], deliver_at=NOW_MS + 7)).due_ms == NOW_MS + 7
    answers = await producer.reschedule([receipts[2].handle, receipts[0]], delay=1)
    assert [str(each.outcome) for each in answers] == ["rescheduled", "unknown"]
    answers = await producer.reschedule(key=[(TOPIC, "k3"), (TOPIC, "fired")], delay=1)
    assert [str(each.outcome) for each in answers] == ["rescheduled", "fired"]
    assert (answers[1].handle, answers[1].due_ms) == (None, None)
    assert await producer.reschedule(one.handle, delay=2) != one
    async with aio.Admin(cluster.nameserver) as admin:
        assert (await admin.reschedule(key=(TOPIC, "k4"), delay=2)).due_ms == NOW_MS + 2_000


@pytest.mark.parametrize("what", ["reschedule", "fire"])
async def test_of_bodies_that_are_too_large_together_fewer_are_asked_about(cluster, producer, what):
    """Nobody who names timers knows how large they are, nor what others name at the same time."""
    keys = keys_of(cluster, 20)
    for key in keys:
        await producer.send(TOPIC, b"12345", timer_key=key, delay="1h")
    cluster.timers[0].keyed.bytes_max = 10
    options = {"delay": "2h"} if what == "reschedule" else {}
    outcomes = await getattr(producer, what)(key=[(TOPIC, key) for key in keys], **options)
    told = {str(each.outcome) if what == "reschedule" else str(each) for each in outcomes}
    assert told == {"rescheduled" if what == "reschedule" else "fired"}


async def test_who_asks_with_fewer_asks_again_about_what_will_do_later(cluster, producer):
    """Of what was too large nothing is done: it is not in doubt."""
    shard = cluster.timers[0].keyed
    for key in (keys := keys_of(cluster, 20)):
        await producer.send(TOPIC, b"12345", timer_key=key, delay="1h")
    shard.bytes_max = 10
    shard.refuse_timers[keys[7]] = 1
    outcomes = await producer.reschedule(key=[(TOPIC, key) for key in keys], delay="2h")
    assert {each.outcome for each in outcomes} == {RescheduleOutcome.RESCHEDULED}


async def test_of_two_that_share_a_request_one_is_too_large(cluster, producer):
    shard = cluster.timers[0].keyed
    for key in (keys := keys_of(cluster, lanes.IN_FLIGHT + 2)):
        await producer.send(TOPIC, b"12345", timer_key=key, delay="1h")
    shard.bytes_max = 6
    shard.records[shard.waiting[TOPIC, keys[-1]].offset].body = b"1234567"
    shard.gate.clear()
    asked = [asyncio.create_task(producer.reschedule(key=(TOPIC, key), delay="2h")) for key in keys]
    await until(lambda: shard.running == lanes.IN_FLIGHT)
    shard.gate.set()
    *done, refused = await asyncio.gather(*asked, return_exceptions=True)
    assert {each.outcome for each in done} == {RescheduleOutcome.RESCHEDULED}
    assert isinstance(refused, TooLarge)


@pytest.mark.parametrize("what", ["reschedule", "fire", "cancel"])
async def test_where_a_shard_refuses_the_error_tells_what_others_did(cluster, producer, what):
    """Nothing else would tell the new handles."""
    [mine], [theirs, more] = keys_of(cluster, 1, shard=0), keys_of(cluster, 2, shard=1)
    for key in (mine, theirs, more):
        await producer.send(TOPIC, b"", timer_key=key, delay=5)
    cluster.timers[0].keyed.refuse = [InvalidArgument("not this one")]
    keys = [(TOPIC, theirs), (TOPIC, mine), (TOPIC, more)]
    options = {"delay": "1h"} if what == "reschedule" else {}
    with pytest.raises(InvalidArgument, match="not this one") as raised:
        await getattr(producer, what)(key=keys, **options)
    answers = raised.value.answers
    outcomes = {"reschedule": "rescheduled", "fire": "fired", "cancel": "cancelled"}
    assert sorted(answers) == [0, 2]
    for each in answers.values():
        assert str(each.outcome if what == "reschedule" else each) == outcomes[what]
    if what == "reschedule":
        again = await producer.reschedule([each.handle for each in answers.values()], delay="2h")
        assert [str(each.outcome) for each in again] == ["rescheduled"] * 2


async def test_at_its_deadline_a_question_tells_what_was_answered(cluster):
    settings = ProducerSettings(client=ClientSettings(request_timeout_s=0.5))
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        [silent], [key] = keys_of(cluster, 1, shard=0), keys_of(cluster, 1, shard=1)
        for each in (silent, key):
            await producer.send(TOPIC, b"", timer_key=each, delay=5)
        cluster.timers[0].keyed.gate.clear()
        while True:  # a slow machine may give up before either shard answers
            with pytest.raises(Unavailable) as raised:
                await producer.reschedule(key=[(TOPIC, silent), (TOPIC, key)], delay=9)
            if raised.value.answers:
                break
        assert {at: str(each.outcome) for at, each in raised.value.answers.items()} == {
            1: "rescheduled"
        }
        cluster.timers[0].keyed.gate.set()


async def test_what_another_shard_did_not_answer_is_asked_for_again_under_the_id(cluster, producer):
    keys = keys_of(cluster, 2)
    for key in keys:
        await producer.send(TOPIC, b"", timer_key=key, delay=5)
    waiting = cluster.timers[0].keyed
    waiting.unanswered = [{0}, {1}]  # each is told once
    answers = await producer.reschedule(key=[(TOPIC, key) for key in keys], delay=9)
    assert [each.handle for each in answers] == [
        handle.text_of(waiting.waiting[TOPIC, key]) for key in keys
    ]
    first, second = waiting.requests[-2:]
    assert first == second


@pytest.mark.parametrize("blocking", [False, True])
async def test_where_another_shard_stays_away_the_error_tells_what_was_done(cluster, blocking):
    """The new handles are told nowhere else."""
    settings = ClientSettings(request_timeout_s=0.5)
    waiting = cluster.timers[0].keyed
    waiting.unanswered = [{1}] * 10_000
    keys = keys_of(cluster, 2)
    async with aio.Admin(cluster.nameserver, settings=settings) as admin:
        asked = {"key": [(TOPIC, key) for key in keys], "delay": "1h"}

        def ask():
            with duemq.Admin(cluster.nameserver, settings=settings) as blocking:
                blocking.reschedule(**asked)

        while True:  # a slow machine may give up before it answers
            request = timer_pb2.ScheduleRequest(topic=TOPIC, delays_ms=[5])
            request.records.records.extend(message_pb2.Record(timer_key=key) for key in keys)
            waiting.schedule(request)
            with pytest.raises(Unavailable) as raised:
                await (asyncio.to_thread(ask) if blocking else admin.reschedule(**asked))
            if raised.value.answers:
                break
    there = waiting.waiting[TOPIC, keys[0]]
    [(at, told)] = raised.value.answers.items()
    assert (at, told.handle, told.due_ms) == (0, handle.text_of(there), NOW_MS + 3_600_000)


async def test_a_reschedule_wants_one_due_time(producer):
    with pytest.raises(InvalidArgument) as raised:
        await producer.reschedule(key=(TOPIC, "k"))
    assert raised.value.field == "delay"
    with pytest.raises(InvalidArgument, match="exclude each other"):
        await producer.reschedule(key=(TOPIC, "k"), delay=1, deliver_at=5)
    with pytest.raises(InvalidArgument, match="handle"):
        await producer.reschedule(None, delay=1)


async def test_a_reschedule_is_repeated_under_its_id(cluster, producer):
    await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    waiting = shard_of(cluster, "k")
    waiting.lose_answers = 2
    answer = await producer.reschedule(key=(TOPIC, "k"), delay=9)
    assert answer.outcome is RescheduleOutcome.RESCHEDULED
    assert len(waiting.records) == 2


async def test_an_unanswered_question_may_have_been_heard(cluster):
    settings = ProducerSettings(client=ClientSettings(request_timeout_s=0.3))
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        await producer.send(TOPIC, b"1", timer_key="k", delay=5)
        waiting = shard_of(cluster, "k")
        waiting.gate.clear()
        cancels = heard = 0
        while not heard:  # a slow machine may give one up before it is
            with pytest.raises(Unavailable):
                await producer.cancel(key=(TOPIC, "k"))
            cancels += 1
            heard = len({each.request_id for each in waiting.requests}) - 1  # one is the send's
        assert heard <= cancels
        waiting.gate.set()


async def test_flush_waits_for_keyed_messages_and_close_ends_them(cluster):
    settings = ProducerSettings(close_timeout_s=0.2)
    producer = aio.Producer(cluster.nameserver, settings=settings)
    await producer.start()
    pending = producer.submit(TOPIC, b"1", timer_key="k", delay=5)
    await producer.flush()
    assert pending.done()
    waiting = shard_of(cluster, "k")
    waiting.gate.clear()
    left = producer.submit(TOPIC, b"2", timer_key="k", delay=5)
    behind = producer.submit(TOPIC, b"3", timer_key="k", delay=5)
    await until(lambda: waiting.running == 1)
    with pytest.raises(NotAllSent, match="2 messages not acknowledged"):
        await producer.close()
    with pytest.raises(Closed, match="its outcome is unknown"):
        await left
    with pytest.raises(Closed, match="it was not sent"):
        await behind
    waiting.gate.set()
    with pytest.raises(Closed):
        producer.submit(TOPIC, b"4", timer_key="k", delay=5)


async def test_a_closed_client_asks_nothing(cluster):
    admin = aio.Admin(cluster.nameserver)
    with pytest.raises(Closed):
        await admin.cancel(key=(TOPIC, "k"))
    await admin.start()
    await admin.close()
    with pytest.raises(Closed):
        await admin.cancel(key=(TOPIC, "k"))
    with pytest.raises(Closed):
        await admin.reschedule(key=(TOPIC, "k"), delay=1)


async def test_what_nobody_closed_is_said_in_the_log(cluster, caplog):
    producer = aio.Producer(cluster.nameserver)
    await producer.start()
    waiting = shard_of(cluster, "k")
    waiting.gate.clear()
    producer.submit(TOPIC, b"1", timer_key="k", delay=5)
    await until(lambda: waiting.running == 1)
    unclosed, client, calls = producer._unclosed, producer._client, producer._timer_calls
    del producer
    gc.collect()
    assert not unclosed.alive
    assert "1 message to topic orders not acknowledged when the producer ended" in caplog.text
    await calls.close()
    await client.close()
    waiting.gate.set()


async def test_on_error_is_told_of_those_that_exist(cluster):
    told = []
    async with aio.Producer(
        cluster.nameserver, on_error=lambda pending, error: told.append((pending, error))
    ) as producer:
        await producer.send(TOPIC, b"", timer_key="a", delay=5)
        again = producer.submit(TOPIC, b"", timer_key="a", delay=5, if_absent=True)
        producer.submit(TOPIC, b"", timer_key="b", delay=5, if_absent=True)
        await producer.flush()
    [(pending, error)] = told
    assert pending.message_id == again.message_id
    assert isinstance(error, TimerExists)


async def test_messages_carry_the_trace_of_their_send(cluster, producer):
    exported = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    spans.use(provider)
    try:
        await producer.send(TOPIC, b"1", timer_key="k", delay=5)
        with contextlib.suppress(TimerExists):
            await producer.send(TOPIC, b"2", timer_key="k", delay=5, if_absent=True)
    finally:
        spans.use(None)
    [record] = shard_of(cluster, "k").records.values()
    stored, refused = exported.get_finished_spans()
    trace_id = f"{stored.context.trace_id:032x}"
    assert record.properties["traceparent"].startswith(f"00-{trace_id}-")
    assert stored.status.is_ok or stored.status.is_unset
    assert not refused.status.is_ok
    provider.shutdown()


async def test_the_callers_baggage_leaves_the_key_alone(cluster, producer):
    token = context.attach(baggage.set_baggage("tenant", "7"))
    provider = TracerProvider(shutdown_on_exit=False)
    spans.use(provider)
    try:
        with provider.get_tracer("test").start_as_current_span("caller"):
            await producer.send(TOPIC, b"1", timer_key="k", delay=5)
    finally:
        spans.use(None)
        context.detach(token)
        provider.shutdown()
    [record] = shard_of(cluster, "k").records.values()
    assert record.timer_key == "k"
    assert record.properties["baggage"] == "tenant=7"


async def test_sends_are_metered_by_what_became_of_them(cluster, producer, monkeypatch):
    told = []
    monkeypatch.setattr(meters, "enabled", lambda: True)
    monkeypatch.setattr(meters, "sent", lambda *of: told.append((of[1], of[3], of[4])))
    await producer.send(TOPIC, b"", timer_key="k0", delay=5)
    address = cluster.timers[shard_of(cluster, "k0").shard].address
    assert told == [(1, None, address)]
    told.clear()
    keys = keys_of(cluster, 3, shard_of(cluster, "k0").shard)
    messages = [Outgoing(b"", timer_key=key, delay=5, if_absent=True) for key in (*keys, "k0")]
    with pytest.raises(NotAllSent):
        await producer.send_many(TOPIC, messages)
    assert sorted((count, error is None) for count, error, _ in told) == [(1, False), (3, True)]


async def test_blocking_clients_have_the_same(cluster):
    await asyncio.to_thread(_use_blocking_clients, cluster)


def _use_blocking_clients(cluster):
    with duemq.Producer(cluster.nameserver) as producer:
        first = producer.send(TOPIC, b"1", timer_key="k", delay=5)
        second = producer.send(TOPIC, b"2", timer_key="k", delay=5)
        assert second.replaced == first.handle
        with pytest.raises(TimerExists):
            producer.submit(TOPIC, b"", timer_key="k", delay=1, if_absent=True).result()
        receipts = producer.send_many(
            TOPIC, [Outgoing(b"", timer_key=f"k{n}", delay=5) for n in range(100)]
        )
        assert len({each.handle for each in receipts}) == 100
        assert producer.reschedule(second, delay=9).outcome is RescheduleOutcome.RESCHEDULED
        assert producer.cancel(key=(TOPIC, "k")) is CancelOutcome.CANCELLED
        assert producer.cancel(key=[(TOPIC, "k0"), (TOPIC, "k")]) == [
            CancelOutcome.CANCELLED,
            CancelOutcome.UNKNOWN,
        ]
    with duemq.Admin(cluster.nameserver) as admin:
        assert admin.cancel(key=(TOPIC, "k1")) is CancelOutcome.CANCELLED
        assert admin.reschedule(key=(TOPIC, "k2"), delay=1).due_ms is not None
