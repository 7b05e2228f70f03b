"""The twin for users' tests, as far as a cluster has nothing like it; the rest: tests/cluster."""

import asyncio
import inspect
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime

import pytest

import duemq
from duemq import ConsumerSettings, Producer, PushConsumer, RetryLater, Sql, aio
from duemq.errors import Closed, InvalidArgument, PermissionDenied
from duemq.producing.cancels import CancelOutcome
from duemq.testing import ConsumerOptions, MemoryCluster
from duemq.testing import aio as testing_aio
from duemq.testing.cluster import DELIVERIES_MAX

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)


@pytest.fixture
def cluster():
    return MemoryCluster(now=NOON)


@pytest.fixture
def producer(cluster):
    with cluster.producer() as producer:
        yield producer


def test_a_topic_that_was_deleted_is_made_anew_by_the_next_send(cluster, producer):
    producer.send("t", b"old")
    cluster.delete_topic("t")
    assert producer.send("t", b"new").offset == 0
    assert [message.body for message in cluster.messages("t")] == [b"new"]


def test_ordering_keys_have_queues_of_a_topic_that_was_made_anew_with_fewer(cluster, producer):
    keys = [f"k{number}" for number in range(20)]
    cluster.create_topic("t", queues=8)
    for key in keys:
        producer.send("t", b"delayed", ordering_key=key, delay="1h")
        producer.send("t", b"keyed", ordering_key=key, delay="1h", timer_key=key)
    cluster.delete_topic("t")
    cluster.create_topic("t", queues=2)
    assert {producer.send("t", b"now", ordering_key=key).queue for key in keys} == {0, 1}
    cluster.advance("1h")
    assert {message.queue for message in cluster.messages("t")} == {0, 1}
    assert len(cluster.messages("t")) == 3 * len(keys)


def test_twins_are_what_annotations_ask_for(cluster, producer):
    consumer = cluster.push_consumer("g", "t", print)
    assert isinstance(producer, Producer)
    assert isinstance(consumer, PushConsumer)
    assert isinstance(testing_aio.MemoryCluster().producer(), aio.Producer)
    assert isinstance(testing_aio.MemoryCluster().push_consumer("g", "t", print), aio.PushConsumer)


@pytest.mark.parametrize("kind", [duemq.PushConsumer, aio.PushConsumer])
def test_options_are_the_real_ones(kind):
    parameters = inspect.signature(kind).parameters.values()
    named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set(ConsumerOptions.__annotations__) == named - {"nameserver"}


@pytest.mark.parametrize(
    ("twin", "real"),
    [
        (type(MemoryCluster().producer()), Producer),
        (type(testing_aio.MemoryCluster().producer()), aio.Producer),
        (type(MemoryCluster().push_consumer("g", "t", print)), PushConsumer),
        (
            type(testing_aio.MemoryCluster().push_consumer("g", "t", print)),
            aio.PushConsumer,
        ),
    ],
)
def test_what_uses_the_network_is_replaced(twin, real):
    """A new public method of the real one is a decision here."""
    known = {
        "send",
        "submit",
        "ready",
        "send_many",
        "cancel",
        "reschedule",
        "fire",
        "flush",
        "close",
        "start",
        "run",
        "queues",
    }
    known |= {
        "group",
        "settings",
        "missing",
        "in_callback",
        "begin_close",
        "intake",
        "outbox",
        "targets",
    }
    assert {name for name in dir(real) if not name.startswith("_")} <= known


def test_the_clock_moves_only_when_it_is_told(cluster, producer):
    assert cluster.now_ms == NOON_MS
    receipt = producer.send("t", b"")
    assert receipt.store_ms == NOON_MS
    cluster.advance(1.5)
    cluster.deliver()
    assert cluster.now_ms == NOON_MS + 1_500
    assert producer.send("t", b"", delay="1s").due_ms == NOON_MS + 2_500


def test_callbacks_see_the_time_at_which_a_message_was_due(cluster, producer):
    seen = []
    with cluster.push_consumer("g", "t", lambda m: seen.append((m.body, cluster.now_ms - NOON_MS))):
        for delay in ("3s", "1s", "2s", "10s"):
            producer.send("t", delay.encode(), delay=delay)
        assert cluster.advance("5s") == 3
        assert cluster.now_ms == NOON_MS + 5_000
        assert cluster.advance("4999ms") == 0
        assert cluster.advance("1ms") == 1
    assert seen == [(b"1s", 1_000), (b"2s", 2_000), (b"3s", 3_000), (b"10s", 10_000)]


def test_what_a_callback_sends_falls_due_in_the_same_advance(cluster, producer):
    seen = []

    def again(message):
        seen.append(message.store_ms - NOON_MS)
        if len(seen) < 4:
            producer.send("t", b"", delay="1m")

    producer.send("t", b"")
    with cluster.push_consumer("g", "t", again, start_from="earliest"):
        assert cluster.advance("2m30s") == 3
        assert cluster.advance("1h") == 1
    assert seen == [0, 60_000, 120_000, 180_000]


def test_looking_in(cluster, producer):
    with cluster.push_consumer("g", "t", lambda m: None):
        producer.send("t", b"now")
        delayed = producer.send("t", b"later", key="k", delay="1m")
        assert cluster.lag("g") == 1
        assert [message.body for message in cluster.messages("t")] == [b"now"]
        [pending] = cluster.pending()
        assert pending == (delayed.due_ms, "t", delayed.message_id, "k", b"later", delayed.handle)
        cluster.advance("1m")
        assert cluster.lag("g") == 0
        assert cluster.pending() == []
        assert [message.body for message in cluster.messages("t")] == [b"now", b"later"]
    assert cluster.messages("unknown") == cluster.dead_letters("g") == []


def test_callbacks_own_their_copies(cluster, producer):
    producer.send("t", b"x")
    got = []

    def fail(message):
        got.append(message)
        raise ValueError

    settings = ConsumerSettings(start_from="earliest", suspend_s=1)
    with cluster.push_consumer("g", "t", fail, order="queue", settings=settings):
        cluster.advance("1s")
    assert [message.deliveries for message in got] == [0, 1]
    assert [message.deliveries for message in cluster.messages("t")] == [0]
    assert cluster.lag("g") == 1


@pytest.mark.parametrize("later", [RetryLater("1s"), ExceptionGroup("", [RetryLater("1s")])])
def test_errors_can_be_raised(later):
    cluster = MemoryCluster(raise_errors=True)
    attempts = []

    def fail(message):
        attempts.append(message.deliveries)
        if message.deliveries == 0:
            raise later
        if message.deliveries == 1:
            raise AssertionError("seen")

    with cluster.push_consumer("g", "t", fail):
        cluster.producer().send("t", b"")
        cluster.deliver()
        with pytest.raises(AssertionError, match="seen"):
            cluster.advance("1s")
        cluster.advance("1h")
    assert attempts == [0, 1, 2]


async def test_a_coroutine_that_cancels_itself_has_failed():
    cluster = testing_aio.MemoryCluster()
    attempts = []

    async def leak(message):
        attempts.append(message.attempt)
        if message.attempt == 1:
            asyncio.current_task().cancel()
            await asyncio.Event().wait()

    async with cluster.producer() as producer, cluster.push_consumer("g", "t", leak):
        await producer.send("t", b"")
        await cluster.advance("1h")
    assert attempts == [1, 2]


async def test_a_test_that_is_cancelled_in_a_callback_ends():
    cluster, begun = testing_aio.MemoryCluster(), asyncio.Event()

    async def wait(message):
        begun.set()
        await asyncio.Event().wait()

    async with cluster.producer() as producer, cluster.push_consumer("g", "t", wait):
        await producer.send("t", b"")
        delivering = asyncio.create_task(cluster.deliver())
        await begun.wait()
        delivering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivering


def test_an_exit_fails_its_message_and_a_test_that_fails_in_a_callback_fails(cluster, producer):
    def leave(message):
        if message.body == b"exit":
            sys.exit(1)
        pytest.fail("seen")

    with cluster.push_consumer("g", "t", leave):
        producer.send("t", b"exit")
        cluster.deliver()
        [retry] = cluster.pending()
        assert retry.body == b"exit"
        producer.send("t", b"fail")
        with pytest.raises(pytest.fail.Exception, match="seen"):
            cluster.deliver()


async def test_nor_does_a_coroutine_that_exits_end_the_test_run():
    cluster = testing_aio.MemoryCluster()

    async def leave(message):
        sys.exit(1)

    async with cluster.producer() as producer, cluster.push_consumer("g", "t", leave):
        await producer.send("t", b"")
        await cluster.deliver()
        [retry] = cluster.pending()
    assert retry.due_ms == cluster.now_ms + 10_000


async def unfinished():
    """What a callback may give back instead of running it."""


def test_a_callback_of_which_nothing_ran_has_failed(cluster, producer):
    with cluster.push_consumer("g", "t", lambda message: unfinished()):
        producer.send("t", b"x")
        cluster.deliver()
        [retry] = cluster.pending()
    assert retry.due_ms == cluster.now_ms + 10_000


async def forgets(message):
    return unfinished()


@pytest.mark.parametrize("callback", [forgets, lambda message: unfinished()])
async def test_nor_has_one_that_forgets_to_await(callback):
    cluster = testing_aio.MemoryCluster()
    async with cluster.producer() as producer, cluster.push_consumer("g", "t", callback):
        await producer.send("t", b"x")
        await cluster.deliver()
        [retry] = cluster.pending()
    assert retry.due_ms == cluster.now_ms + 10_000


def test_what_a_callback_sets_in_its_context_is_gone_with_it(cluster, producer):
    calls, seen = ContextVar("calls", default=0), []

    def count(message):
        seen.append(calls.get())
        calls.set(calls.get() + 1)

    with cluster.push_consumer("g", "t", count):
        producer.send_many("t", [b"1", b"2"])
        cluster.deliver()
    assert [*seen, calls.get()] == [0, 0, 0]


def test_an_interrupted_callback_has_not_happened(cluster, producer):
    def interrupted(message):
        raise KeyboardInterrupt

    producer.send("t", b"x")
    with cluster.push_consumer("g", "t", interrupted, start_from="earliest") as consumer:
        with pytest.raises(KeyboardInterrupt):
            cluster.deliver()
        assert cluster.lag("g") == 1
        consumer.close()
        with cluster.push_consumer("g", "t", lambda m: None):
            assert cluster.deliver() == 1


def test_callbacks_do_not_deliver(cluster, producer, caplog):
    producer.send("t", b"")
    with cluster.push_consumer("g", "t", lambda m: cluster.deliver(), start_from="earliest"):
        cluster.deliver()
    assert "a callback cannot deliver" in caplog.text


def test_endless_feeding_is_noticed(cluster, producer, monkeypatch):
    monkeypatch.setattr("duemq.testing.cluster.DELIVERIES_MAX", 50)
    producer.send("t", b"")
    with (
        cluster.push_consumer("g", "t", lambda m: producer.send("t", b""), start_from="earliest"),
        pytest.raises(RuntimeError, match="50 messages and no end"),
    ):
        cluster.deliver()
    assert DELIVERIES_MAX > 50


def test_a_worker_that_runs_until_closed_ends_when_all_is_done(cluster, producer):
    producer.send_many("t", [b"1", b"2"])
    got = []
    consumer = cluster.push_consumer("g", "t", got.append, start_from="earliest")
    consumer.run()
    assert len(got) == 2
    assert consumer.queues == frozenset()
    with pytest.raises(Closed):
        consumer.start()


def test_a_consumer_that_was_closed_before_it_started_does_not_start(cluster, producer):
    called = []
    consumer = cluster.push_consumer("g", "t", called.append, start_from="earliest")
    producer.send("t", b"x")
    consumer.close()
    consumer.run()
    assert not called
    with pytest.raises(Closed):
        consumer.start()


@pytest.mark.parametrize("there", [True, False])
def test_a_topic_that_comes_later_is_read_from_its_beginning(cluster, producer, there):
    """Whether the group has members then, or not."""
    got = []
    first = cluster.push_consumer("g", "t", got.append)
    first.start()
    if not there:
        first.close()
    producer.send("t", b"made")
    with cluster.push_consumer("g", "t", got.append):
        cluster.deliver()
    assert [message.body for message in got] == [b"made"]


def test_in_broadcast_a_host_goes_on_where_it_was(cluster, producer):
    got = {"a": [], "b": []}

    def consumer(host):
        def note(message):
            got[host].append(message.body)

        return cluster.push_consumer("g", "t", note, broadcast=True, start_from="earliest")

    producer.send("t", b"1")
    with consumer("a"), consumer("b"):
        cluster.deliver()
    producer.send("t", b"2")
    with consumer("a"):
        cluster.deliver()
    assert got == {"a": [b"1", b"2"], "b": [b"1"]}


def test_a_list_of_another_key_takes_nothing_along_twice(cluster):
    """What waits behind a failed message was put there once for each look at the queue."""
    cluster.create_topic("one", queues=1)
    got = []

    def note(messages):
        got.append([message.body for message in messages])
        if len(got) == 1:
            raise ValueError("again")

    options = {"batch": True, "order": "key", "start_from": "earliest"}
    with cluster.producer() as producer, cluster.push_consumer("g", "one", note, **options):
        producer.send("one", b"B1", ordering_key="B")
        cluster.deliver()
        for body in (b"A1", b"B2"):
            producer.send("one", body, ordering_key=chr(body[0]))
        cluster.deliver()
        assert cluster.lag("g") == 2
        cluster.advance("1m")
    assert got == [[b"B1"], [b"A1"], [b"B1"], [b"B2"]]


def test_closing_in_a_callback_leaves_the_rest_for_others(cluster, producer):
    producer.send_many("t", [b"1", b"2"])
    got = []

    def once(message):
        got.append(message.body)
        consumer.close()

    with cluster.push_consumer("g", "t", once, start_from="earliest") as consumer:
        assert cluster.deliver() == 1
    assert cluster.lag("g") == 1
    with cluster.push_consumer("g", "t", lambda m: got.append(m.body)):
        cluster.deliver()
    assert sorted(got) == [b"1", b"2"]


def test_what_the_twin_cannot_do_is_refused(cluster):
    with (
        pytest.raises(InvalidArgument, match="SQL"),
        cluster.push_consumer("g", {"t": Sql("price > 10")}, print),
    ):
        pass

    async def handle(message):
        raise AssertionError("it is refused")

    with pytest.raises(InvalidArgument, match=r"duemq\.testing\.aio"):
        cluster.push_consumer("g", "t", handle)
    for wrong in ({"queues": 0}, {"now": datetime(2030, 1, 1)}):
        with pytest.raises(InvalidArgument):
            MemoryCluster(**wrong)


def test_what_only_brokers_write_to_is_refused(cluster, producer):
    with pytest.raises(PermissionDenied):
        producer.send("%RETRY%g", b"x")
    assert not cluster.messages("%RETRY%g")


def test_many_threads_send(cluster, producer):
    def send(number):
        for index in range(200):
            producer.send("t", f"{number}-{index}".encode(), ordering_key=str(number))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = []
    with cluster.push_consumer("g", "t", lambda m: got.append(m.body), start_from="earliest"):
        assert cluster.deliver() == 800
    for number in range(4):
        of = [body for body in got if body.startswith(b"%d-" % number)]
        assert of == [f"{number}-{index}".encode() for index in range(200)]


async def test_the_asyncio_twin():
    cluster = testing_aio.MemoryCluster(now=NOON)
    got = []

    async def handle(message):
        got.append((message.body, message.deliveries))
        if message.body == b"bad" and message.deliveries == 0:
            raise ValueError

    async with cluster.producer() as producer, cluster.push_consumer("g", "t", handle) as consumer:
        await producer.send("t", b"bad")
        pending = producer.submit("t", b"now")
        assert pending.done()
        never = await producer.send("t", b"never", delay="1s")
        await producer.send("t", b"later", delay="1m")
        assert await producer.cancel(never.handle) == "cancelled"
        assert await cluster.deliver() == 2
        assert await cluster.advance("1m") == 2
        assert len(consumer.queues) == 5
    assert got == [(b"bad", 0), (b"now", 0), (b"bad", 1), (b"later", 0)]
    for call in (producer.send("t", b""), producer.cancel("dmq1"), producer.flush()):
        with pytest.raises(Closed):
            await call
    consumer = cluster.push_consumer("h", "t", lambda m: got.append(m.body), start_from="earliest")
    await consumer.run()
    assert got[4:] == [b"bad", b"now", b"later"]


def test_a_group_may_start_an_hour_ago_by_the_clusters_clock():
    cluster = MemoryCluster()
    producer = cluster.producer()
    producer.send("t", b"old")
    cluster.advance("2h")
    producer.send("t", b"young")
    received = []
    with cluster.push_consumer("g", "t", received.append, start_from="-1h"):
        cluster.deliver()
    assert [each.body for each in received] == [b"young"]


def test_a_receipt_cancels_its_message():
    cluster = MemoryCluster()
    producer = cluster.producer()
    receipts = producer.send_many("t", [b"a", b"b", b"c"], delay="1h")
    assert producer.cancel(receipts[0]) is CancelOutcome.CANCELLED
    assert producer.cancel([receipts[1], receipts[2].handle]) == [CancelOutcome.CANCELLED] * 2
    with pytest.raises(InvalidArgument, match="was not delayed"):
        producer.cancel(producer.send("t", b"now"))


def test_a_time_that_is_none_is_named_as_it_is_given(cluster):
    with pytest.raises(InvalidArgument) as refused:
        MemoryCluster(now=datetime(2030, 1, 1))
    assert refused.value.field == "now"
    with pytest.raises(InvalidArgument) as refused:
        cluster.advance(-1)
    assert refused.value.field == "by"


def test_delays_grow_as_a_brokers_do_however_many_retries_there_were(cluster, producer):
    """A factor of 10 leaves the range of floats at the 310th retry."""
    retries = 320
    cluster.put_group("g", retries_max=retries, exponential=("1ms", 10.0, "5s"))

    def fail(message):
        raise ValueError("again")

    with cluster.push_consumer("g", "t", fail, start_from="earliest"):
        producer.send("t", b"x")
        cluster.advance("1h")
    [letter] = cluster.dead_letters("g")
    assert letter.deliveries == retries + 1


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"exponential": ("1s", 101.0, "1m")}, "multiplier"),
        ({"exponential": ("1m", 2.0, "1s")}, "max_ms"),
        ({"retry_delays": "367d"}, "delays_ms"),
    ],
)
def test_a_policy_that_brokers_refuse_is_refused(cluster, policy, field):
    with pytest.raises(InvalidArgument) as refused:
        cluster.put_group("g", **policy)
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["%TIMER%", "%PURGED%", "a b"])
def test_a_group_that_brokers_refuse_is_refused(cluster, name):
    with pytest.raises(InvalidArgument) as refused:
        cluster.put_group(name, retries_max=1)
    assert refused.value.field == "group"
