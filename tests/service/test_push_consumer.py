"""Push consumers against brokers in this process: sharing, offsets, fences, failures, deaths."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace

import grpc.aio
import pytest

import duemq
from duemq.aio import Admin, PushConsumer
from duemq.consumer import push
from duemq.consumer.fetching import offset_client as offsets
from duemq.consumer.fetching.offset_client import OffsetClient
from duemq.consumer.group import committing, group_share, membership
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import (
    Closed,
    FencedMember,
    Internal,
    InvalidArgument,
    ReadOnly,
    Unavailable,
)
from duemq.outcomes import DeadLetter, RetryLater
from duemq.protocol import balance
from duemq.protocol.balance import MessageQueue
from duemq.transport import status
from duemq.transport.cluster_client import Client
from duemq.transport.loop_thread import LoopThread
from duemq.v1 import admin_pb2, broker_pb2, group_pb2, message_pb2
from duemq_server.broker.edge import offset_requests as groups
from duemq_server.broker.edge.send_back_requests import SendBackRequests
from duemq_server.broker.records.batch import IncomingBatch
from duemq_server.broker.store.offsets import GENERATION_MARKS, GroupQueue, newest_generation
from tests.service.played_timer import fire, records_in, timed_frames
from tests.service.running_broker import topic_name
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster, until

RETRY = "%RETRY%billing"
QUICK = {"retry_wait_s_min": 0.001, "retry_wait_s_max": 0.01}


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name)
    return name


class Consumers:
    """Members of one group; closes those that a test leaves open."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.received: dict[str, list[bytes]] = {}
        self._open: list[PushConsumer] = []

    async def start(self, name: str = "a", callback=None, **options) -> PushConsumer:
        received = self.received.setdefault(name, [])
        settings = {"start_from": "earliest", **QUICK, **options.pop("settings", {})}
        consumer = PushConsumer(
            options.pop("group", "billing"),
            options.pop("topics", self.topic),
            callback or (lambda message: received.append(message.body)),
            nameserver=self.cluster.nameserver,
            settings=ConsumerSettings(**settings),
            **options,
        )
        self._open.append(consumer)
        await consumer.start()
        return consumer

    async def close(self) -> None:
        for consumer in self._open:
            await consumer.close()

    @property
    def all(self) -> list[bytes]:
        return [body for bodies in self.received.values() for body in bodies]


@pytest.fixture
async def consumers(cluster: Cluster, topic: str):
    made = Consumers(cluster, topic)
    yield made
    await made.close()


async def fill(cluster: Cluster, topic: str, each: int, mark: str = "") -> set[bytes]:
    """`each` messages to every queue of both brokers."""
    sent = set()
    for broker in ("b0", "b1"):
        for queue_id in range(4):
            bodies = [f"{mark}{broker}/{queue_id}/{n}".encode() for n in range(each)]
            await cluster.send(topic, bodies, broker=broker, queue_id=queue_id)
            sent.update(bodies)
    return sent


async def committed(cluster: Cluster, topic: str, group: str = "billing") -> dict[str, int]:
    found = {}
    for name, client in cluster.clients.items():
        request = broker_pb2.GetOffsetsRequest(group=group, topic=topic)
        for each in (await client.broker.GetOffsets(request)).queues:
            found[f"{name}/{each.queue_id}"] = each.offset
    return found


# --- sharing ----------------------------------------------------------------------------------


async def test_one_member_receives_everything_once(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 10)
    await consumers.start()
    await until(lambda: len(consumers.all) >= len(sent))
    assert Counter(consumers.all) == Counter(sent)


async def test_what_is_sent_later_comes_too(cluster, topic, consumers) -> None:
    await consumers.start()
    sent = await fill(cluster, topic, 3)
    await until(lambda: len(consumers.all) >= len(sent))
    more = await fill(cluster, topic, 3, "more ")
    await until(lambda: len(consumers.all) >= len(sent | more))
    assert Counter(consumers.all) == Counter(sent | more)


async def test_members_share_the_queues_of_both_brokers(cluster, topic, consumers) -> None:
    first = await consumers.start("a")
    second = await consumers.start("b")
    await until(lambda: len(first.queues) == len(second.queues) == 4)
    everything = {MessageQueue(topic, b, n) for b in ("b0", "b1") for n in range(4)}
    assert first.queues | second.queues == everything
    sent = await fill(cluster, topic, 10)
    await until(lambda: len(consumers.all) >= len(sent))
    assert Counter(consumers.all) == Counter(sent)
    assert len(consumers.received["a"]) == len(consumers.received["b"]) == 40


async def test_joining_and_leaving_under_load_loses_and_repeats_nothing(
    cluster, topic, consumers
) -> None:
    sent: set[bytes] = set()

    async def load() -> None:
        for number in range(20):
            sent.update(await fill(cluster, topic, 5, f"{number} "))

    loading = asyncio.create_task(load())
    await consumers.start("a")
    second = await consumers.start("b")
    third = await consumers.start("c")
    await until(lambda: len(third.queues) >= 2)
    await second.close()
    await loading
    await until(lambda: len(consumers.all) >= len(sent))
    assert Counter(consumers.all) == Counter(sent)


async def test_groups_do_not_disturb_one_another(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 5)
    await consumers.start("a", group="gates")
    await consumers.start("b", group="board")
    await until(lambda: len(consumers.all) >= 2 * len(sent))
    assert Counter(consumers.received["a"]) == Counter(sent)
    assert Counter(consumers.received["b"]) == Counter(sent)


async def test_a_topic_may_come_after_its_subscriber(cluster, consumers) -> None:
    late = topic_name()
    consumer = await consumers.start(topics=[late])
    assert consumer.queues == frozenset()
    await cluster.create_topic(late)
    await until(lambda: len(consumer.queues) == 8)
    sent = await fill(cluster, late, 1)
    await until(lambda: len(consumers.all) >= len(sent))


async def test_more_queues_of_a_broker_than_a_request_takes_are_consumed_and_committed(
    cluster, consumers, monkeypatch
) -> None:
    monkeypatch.setattr(groups, "OFFSET_QUEUES_MAX", 2)
    monkeypatch.setattr(offsets, "OFFSET_QUEUES_MAX", 2)
    topic = topic_name()
    await cluster.create_topic(topic, queues=5)
    for queue_id in range(5):
        await cluster.send(topic, [b"%d" % queue_id], broker="b0", queue_id=queue_id)
    consumer = await consumers.start(topics=topic)
    await until(lambda: sorted(consumers.all) == [b"0", b"1", b"2", b"3", b"4"])
    await consumer.close()
    answer = await cluster.clients["b0"].broker.GetOffsets(
        broker_pb2.GetOffsetsRequest(group="billing", topic=topic)
    )
    assert [queue.offset for queue in answer.queues] == [1] * 5


async def test_a_broker_that_comes_brings_its_queues(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        topic = topic_name()
        await cluster.create_topic(topic)
        consumers = Consumers(cluster, topic)
        # If the group moves to b1, that one waits a session timeout for members it does not know.
        settings = {"session_timeout_s": 1, "commit_interval_s": 0.01}
        consumer = await consumers.start(settings=settings)
        await until(lambda: len(consumer.queues) == 4)
        await cluster.start_broker("b1")
        await cluster.create_topic(topic)
        await until(lambda: len(consumer.queues) == 8)
        sent = await fill(cluster, topic, 2)
        await until(lambda: len(consumers.all) >= len(sent))

        async def saved() -> bool:
            return set((await committed(cluster, topic)).values()) == {2}

        await until(saved)  # else the end would wait for b1 to take its offsets
        await cluster.stop_broker("b1")
        await until(lambda: len(consumer.queues) == 4)
        await consumers.close()


# --- filters ----------------------------------------------------------------------------------


async def test_a_filter_takes_its_tags_and_the_group_passes_over_the_rest(
    cluster, topic, consumers
) -> None:
    bodies = [b"a", b"b", b"c", b"none"]
    await cluster.send(topic, bodies, tags=["a", "b", "c", ""], queue_id=0)
    consumer = await consumers.start(topics={topic: "a || c"}, settings={"pull_wait_s": 0.1})
    await until(lambda: len(consumers.all) >= 2)
    assert sorted(consumers.all) == [b"a", b"c"]
    holding = MessageQueue(topic, "b0", 0)
    await until(lambda: holding in consumer.queues)
    await consumer.close()
    assert (await committed(cluster, topic))["b0/0"] in (3, 4)


# --- callbacks --------------------------------------------------------------------------------


async def test_a_batch_callback_gets_lists_of_one_queue(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 50)
    batches = []
    await consumers.start(callback=batches.append, batch=True, settings={"batch_messages_max": 20})
    await until(lambda: sum(map(len, batches)) >= len(sent))
    assert Counter(message.body for each in batches for message in each) == Counter(sent)
    for each in batches:
        assert 1 <= len(each) <= 20
        assert len({(message.broker, message.queue) for message in each}) == 1
        offsets = [message.offset for message in each]
        assert offsets == sorted(offsets)


async def test_a_coroutine_function_is_awaited_in_the_loop(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 5)
    received = []

    async def receive(message) -> None:
        await asyncio.sleep(0)
        received.append((message.body, threading.current_thread()))

    await consumers.start(callback=receive)
    await until(lambda: len(received) >= len(sent))
    assert Counter(body for body, _ in received) == Counter(sent)
    assert {thread for _, thread in received} == {threading.current_thread()}


async def test_one_slow_message_stops_its_queue_only_at_the_span(cluster, topic, consumers) -> None:
    for first in range(0, 300, 50):
        bodies = [str(number).encode() for number in range(first, first + 50)]
        await cluster.send(topic, bodies, queue_id=0)
    done: set[int] = set()
    healed = threading.Event()

    def receive(message) -> None:
        if message.offset == 0:
            assert healed.wait(60)
        done.add(message.offset)

    settings = {"queue_span_max": 100, "queue_messages_max": 20}
    await consumers.start(callback=receive, settings=settings)
    await until(lambda: set(range(1, 100)) <= done)
    assert max(done) < 100 + 20
    healed.set()
    await until(lambda: len(done) == 300)


# --- failures ---------------------------------------------------------------------------------


async def fired_until(cluster: Cluster, condition) -> None:
    """Plays the timer service until the condition holds: what is timed is due at once."""
    fired: set[tuple[str, int]] = set()

    async def step() -> bool:
        for name, client in cluster.clients.items():
            for number, timed in enumerate(await timed_frames(client)):
                if (name, number) not in fired:
                    fired.add((name, number))
                    await fire(client, timed, number)
        return condition()

    await until(step)


async def test_what_fails_is_sent_back_and_holds_up_nothing(
    cluster, topic, consumers, caplog
) -> None:
    bodies = [str(number).encode() for number in range(100)]
    await cluster.send(topic, bodies, queue_id=0)
    calls: list[bytes] = []

    def receive(message) -> None:
        calls.append(message.body)
        if message.body == b"13":
            raise ValueError("unlucky")

    await consumers.start(callback=receive, settings={"commit_interval_s": 0.05})

    async def is_committed() -> bool:
        return (await committed(cluster, topic))["b0/0"] == 100

    await until(is_committed)
    assert Counter(calls) == Counter(bodies)
    assert "unlucky" in caplog.text


async def forgets_to_await(given) -> object:
    async def later() -> None: ...

    return later()


@pytest.mark.parametrize(
    "callback",
    [
        forgets_to_await,
        lambda given: forgets_to_await(given),
        lambda given: (each for each in [given]),
    ],
)
@pytest.mark.parametrize("order", [None, "key"])
@pytest.mark.parametrize("batch", [False, True])
async def test_a_callback_of_which_nothing_ran_has_failed(
    cluster, topic, consumers, caplog, callback, order, batch
) -> None:
    await cluster.send(topic, [b"x"], queue_id=0)
    settings = {"commit_interval_s": 0.05, "retries_in_order_max": 0}
    await consumers.start(callback=callback, order=order, batch=batch, settings=settings)

    async def is_committed() -> bool:
        return (await committed(cluster, topic))["b0/0"] == 1

    await until(is_committed)
    assert "of which nothing ran" in caplog.text


async def test_a_retry_comes_with_its_story_and_its_own_topic(cluster, topic, consumers) -> None:
    await cluster.send(topic, [b"one", b"two"], queue_id=3)
    received: list[tuple] = []

    def receive(message) -> None:
        received.append((message.body, message.topic, message.deliveries, message.retry))
        if message.body == b"two" and message.deliveries < 2:
            raise ValueError(f"not yet {message.deliveries}")

    one_by_one = {"commit_interval_s": 0.05, "threads": 1}
    consumer = await consumers.start(callback=receive, settings=one_by_one)
    for expected in (3, 4):
        await fired_until(cluster, lambda n=expected: len(received) >= n)
    assert [(body, topic_, attempt) for body, topic_, attempt, _ in received] == [
        (b"one", topic, 0),
        (b"two", topic, 0),
        (b"two", topic, 1),
        (b"two", topic, 2),
    ]
    assert [story for *_, story in received][:2] == [None, None]
    for number, story in enumerate(story for *_, story in received[2:]):
        assert story[:4] == (topic, "b0", 3, 1)
        assert 0 < story.first_failed_ms <= story.last_failed_ms
        assert story.error == f"ValueError: not yet {number}"
    await until(lambda: MessageQueue(RETRY, "b0", 0) in consumer.queues)

    client = cluster.clients["b0"].broker

    async def is_committed() -> bool:
        request = broker_pb2.GetOffsetsRequest(group="billing", topic=RETRY)
        return [each.offset for each in (await client.GetOffsets(request)).queues] == [2]

    await until(is_committed)


async def test_the_callback_may_choose_the_delay_or_give_up(cluster, topic, consumers) -> None:
    await cluster.send(topic, [b"later", b"never", b"fine"], queue_id=0)

    async def receive(message) -> None:
        if message.body == b"later":
            raise RetryLater("1h", "closed on Saturdays")
        if message.body == b"never":
            raise DeadLetter("unreadable")

    await consumers.start(callback=receive, settings={"commit_interval_s": 0.05})

    async def is_committed() -> bool:
        return (await committed(cluster, topic))["b0/0"] == 3

    await until(is_committed)
    [timed] = await timed_frames(cluster.clients["b0"])
    [record] = records_in(timed)
    assert (record.body, record.retry.error) == (b"later", "closed on Saturdays")
    assert timed.due_ms[0] - record.retry.last_failed_ms == 3_600_000
    assert await cluster.clients["b0"].bodies("%DLQ%billing") == [b"never"]


async def test_a_failing_batch_is_sent_back_as_a_whole(cluster, topic, consumers) -> None:
    bodies = [b"1", b"2", b"3"]
    await cluster.send(topic, bodies, queue_id=0)
    calls: list[list[tuple[bytes, int]]] = []

    async def receive(messages) -> None:
        calls.append([(message.body, message.deliveries) for message in messages])
        if len(calls) == 1:
            raise ValueError("not yet")

    await consumers.start(callback=receive, batch=True)
    await fired_until(cluster, lambda: sum(map(len, calls)) >= 6)
    assert calls[0] == [(body, 0) for body in bodies]
    assert [each for call in calls[1:] for each in call] == [(body, 1) for body in bodies]


async def test_a_start_that_gets_too_few_threads_leaves_none(
    cluster, topic, consumers, monkeypatch
) -> None:
    """As where a container has too many already: who tries again must not use them up."""
    others = set(threading.enumerate())  # a test before may have left callbacks that hang
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "duemq-consumer-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await consumers.start()
    names = [thread.name for thread in threading.enumerate() if thread not in others]
    assert not [name for name in names if name.startswith("duemq-consumer")]


@pytest.mark.parametrize("messages", [1, 1_000])
async def test_a_batch_has_one_message_to_as_many_as_are_there(
    cluster, topic, consumers, messages
) -> None:
    bodies = [str(number).encode() for number in range(1_000)]
    await cluster.send(topic, bodies, queue_id=0)
    sizes: list[int] = []
    await consumers.start(
        callback=lambda batch: sizes.append(len(batch)),
        batch=True,
        settings={"batch_messages_max": messages},
    )
    await until(lambda: sum(sizes) == 1_000)
    assert len(sizes) == 1_000 // messages


async def test_what_takes_too_long_is_sent_back_while_it_runs(cluster, topic, consumers) -> None:
    await cluster.send(topic, [b"stuck", b"next"], queue_id=0)
    calls: list[tuple[bytes, int]] = []
    leave = threading.Event()

    def receive(message) -> None:
        calls.append((message.body, message.deliveries))
        if message.body == b"stuck" and not message.deliveries:
            assert leave.wait(60)

    settings = {"processing_timeout_s": 0.1, "commit_interval_s": 0.05}
    await consumers.start(callback=receive, threads=1, settings=settings)

    async def is_committed() -> bool:
        return (await committed(cluster, topic))["b0/0"] == 2

    await until(is_committed)
    await fired_until(cluster, lambda: (b"stuck", 1) in calls)
    leave.set()
    assert Counter(calls) == Counter([(b"stuck", 0), (b"next", 0), (b"stuck", 1)])


@pytest.mark.long
async def test_what_was_sent_back_and_not_committed_is_skipped_by_who_comes_next(
    cluster, topic, consumers
) -> None:
    bodies = [str(number).encode() for number in range(10)]
    await cluster.send(topic, bodies, queue_id=0)
    client = cluster.clients["b0"].broker
    failures = [broker_pb2.FailedMessage(topic=topic, offset=offset) for offset in (2, 3, 7)]
    await client.SendBack(broker_pb2.SendBackRequest(group="billing", messages=failures))
    await consumers.start()
    await until(lambda: len(consumers.all) >= 7)
    expected = [body for body in bodies if body not in (b"2", b"3", b"7")]
    assert sorted(consumers.all) == expected


async def test_what_fails_as_the_consumer_closes_is_sent_back_before_the_last_commit(
    cluster, topic, consumers
) -> None:
    await cluster.send(topic, [b"slow", b"failing"], queue_id=0)
    entered, leave = threading.Event(), threading.Event()

    def receive(message) -> None:
        if message.body == b"slow":
            return
        entered.set()
        leave.wait(30)
        raise ValueError("at last")

    consumer = await consumers.start(callback=receive)
    await until(entered.is_set)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    leave.set()
    await closing
    assert (await committed(cluster, topic))["b0/0"] == 2
    [timed] = await timed_frames(cluster.clients["b0"])
    assert [record.body for record in records_in(timed)] == [b"failing"]


async def test_a_broker_that_cannot_take_it_back_has_it_tried_again_here(
    cluster, topic, consumers, monkeypatch
) -> None:
    async def full(self, request):
        error = status.to_proto(ReadOnly("the disk is full"))
        results = [broker_pb2.SendBackResult(error=error) for _ in request.messages]
        return broker_pb2.SendBackResponse(results=results)

    monkeypatch.setattr(SendBackRequests, "send_back", full)
    await cluster.send(topic, [b"1", b"2"], broker="b1", queue_id=0)
    attempts: list[int] = []

    def receive(message) -> None:
        if message.body == b"1":
            attempts.append(message.deliveries)
            if len(attempts) < 3:
                raise ValueError("not yet")

    await consumers.start(callback=receive, settings={"commit_interval_s": 0.05})
    await until(lambda: attempts == [0, 1, 2])

    async def is_committed() -> bool:
        return (await committed(cluster, topic))["b1/0"] == 2

    await until(is_committed)


# --- offsets ----------------------------------------------------------------------------------


async def test_a_new_consumer_goes_on_where_the_last_one_closed(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 5)
    first = await consumers.start("a")
    await until(lambda: len(consumers.all) >= len(sent))
    await first.close()
    assert set((await committed(cluster, topic)).values()) == {5}
    more = await fill(cluster, topic, 5, "more ")
    await consumers.start("b")
    await until(lambda: len(consumers.received["b"]) >= len(more))
    assert Counter(consumers.received["b"]) == Counter(more)


async def test_a_group_may_begin_at_the_end(cluster, topic, consumers) -> None:
    await fill(cluster, topic, 5)
    consumer = await consumers.start(settings={"start_from": "latest"})
    await until(lambda: len(consumer.queues) == 8)
    more = await fill(cluster, topic, 5, "more ")
    await until(lambda: len(consumers.all) >= len(more))
    assert Counter(consumers.all) == Counter(more)


@pytest.mark.parametrize("as_datetime", [False, True])
async def test_a_group_may_begin_at_a_time(cluster, topic, consumers, as_datetime) -> None:
    await fill(cluster, topic, 5)
    between_ms = round(time.time() * 1000)
    await until(lambda: round(time.time() * 1000) > between_ms + 1)
    later = await fill(cluster, topic, 3, "later ")
    begin = datetime.fromtimestamp((between_ms + 1) / 1000, UTC) if as_datetime else between_ms + 1
    await consumers.start(start_from=begin)
    await until(lambda: len(consumers.all) >= len(later))
    more = await fill(cluster, topic, 1, "more ")
    await until(lambda: len(consumers.all) >= len(later | more))
    assert Counter(consumers.all) == Counter(later | more)


async def test_offsets_are_committed_while_consuming(cluster, topic, consumers) -> None:
    await fill(cluster, topic, 5)
    await consumers.start(settings={"commit_interval_s": 0.05})

    async def all_are() -> bool:
        return set((await committed(cluster, topic)).values()) == {5}

    await until(all_are)


async def test_close_waits_for_running_callbacks_and_commits_them(
    cluster, topic, consumers
) -> None:
    await cluster.send(topic, [b"slow"], queue_id=0)
    entered, leave = threading.Event(), threading.Event()

    def receive(message) -> None:
        entered.set()
        leave.wait(30)

    consumer = await consumers.start(callback=receive)
    await until(entered.is_set)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    leave.set()
    await closing
    assert (await committed(cluster, topic))["b0/0"] == 1


async def test_close_gives_up_on_a_callback_that_does_not_return(cluster, topic, consumers) -> None:
    await cluster.send(topic, [b"stuck", b"next"], queue_id=0)
    entered, leave = threading.Event(), threading.Event()

    def receive(message) -> None:
        entered.set()
        leave.wait(30)

    consumer = await consumers.start(
        callback=receive, threads=1, settings={"close_timeout_s": 0.05}
    )
    await until(entered.is_set)
    await consumer.close()
    assert (await committed(cluster, topic))["b0/0"] == 0
    leave.set()


async def test_the_callback_may_close_its_consumer(cluster, topic, consumers) -> None:
    await cluster.send(topic, [b"last"], queue_id=0)
    made: list[PushConsumer] = []

    async def receive(message) -> None:
        await made[0].close()

    made.append(await consumers.start(callback=receive))
    async with asyncio.timeout(30):
        await made[0].run()
    assert (await committed(cluster, topic))["b0/0"] == 1


# --- zombies ----------------------------------------------------------------------------------


async def take_over(cluster: Cluster, topic: str, broker: str, queue_id: int) -> None:
    """As a coordinator elsewhere would: a far newer generation acquires a queue."""
    await cluster.clients[broker].broker.AcquireQueues(
        broker_pb2.AcquireQueuesRequest(
            group="billing",
            member_id="other",
            generation=2_000_000_000_000 * GENERATION_MARKS,  # in 2033
            queues=[message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)],
            start_from=broker_pb2.EARLIEST,
        )
    )


async def test_a_fenced_queue_is_dropped_and_the_member_rejoins_above_the_fence(
    cluster, topic, consumers
) -> None:
    consumer = await consumers.start(settings={"commit_interval_s": 0.05, "pull_wait_s": 0.05})
    await until(lambda: len(consumer.queues) == 8)
    await take_over(cluster, topic, "b0", 0)
    sent = await fill(cluster, topic, 5)
    await until(lambda: len(consumers.all) >= len(sent))
    await until(lambda: len(consumer.queues) == 8)
    await consumer.close()
    assert set((await committed(cluster, topic)).values()) == {5}
    assert Counter(consumers.all) == Counter(sent)


async def test_a_member_that_lost_its_session_rejoins(cluster, topic, consumers) -> None:
    consumer = await consumers.start()
    await until(lambda: len(consumer.queues) == 8)
    for broker in cluster.brokers.values():
        groups = broker._groups._coordinator
        with suppress(Exception):
            member_id = next(iter(groups.group("billing").members))
            groups.leave("billing", member_id, 0)  # as if it had been silent for too long
    sent = await fill(cluster, topic, 5)
    await until(lambda: len(consumers.all) >= len(sent))
    more = await consumers.start("b")
    await until(lambda: len(consumer.queues) == len(more.queues) == 4)


async def test_a_broker_that_restarts_is_consumed_on(cluster, topic, consumers) -> None:
    sent = await fill(cluster, topic, 5)
    await consumers.start()
    await until(lambda: len(consumers.all) >= len(sent))
    for name in ("b0", "b1"):
        await cluster.stop_broker(name)
        await cluster.start_broker(name)
    sent |= await fill(cluster, topic, 5, "more ")
    await until(lambda: set(consumers.all) >= sent)


# --- goodbyes and static members --------------------------------------------------------------

LONG = {"session_timeout_s": 300}


@pytest.fixture
def patient_goodbyes(monkeypatch) -> None:
    """One that is given up is never said again, and no session ends here."""
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(push, "LEAVE_TIMEOUT_S", WAIT_S)


async def test_a_clean_close_gives_the_queues_to_the_others_at_once(
    cluster, topic, consumers, patient_goodbyes
) -> None:
    first = await consumers.start("a", settings=LONG)
    second = await consumers.start("b", settings=LONG)
    await until(lambda: len(first.queues) == len(second.queues) == 4)
    await second.close()
    await until(lambda: len(first.queues) == 8)  # long before the session is over


async def test_a_close_that_waits_for_a_callback_gives_the_idle_queues_away_meanwhile(
    cluster, topic, consumers, patient_goodbyes
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def receive(message) -> None:
        entered.set()
        leave.wait(60)

    patient = {**LONG, "release_timeout_s": 60}
    first = await consumers.start("a", callback=receive, settings=patient)
    await cluster.send(topic, [b"slow"], broker="b0", queue_id=0)
    await until(entered.is_set)
    second = await consumers.start("b", settings=LONG)
    await until(lambda: len(second.queues) >= 3)
    busy = MessageQueue(topic, "b0", 0)
    closing = asyncio.create_task(first.close())
    await until(lambda: len(second.queues - {busy}) == 7)
    assert not closing.done()
    assert busy not in second.queues
    sent = await fill(cluster, topic, 1)
    await until(lambda: len(consumers.received["b"]) >= 7)
    leave.set()
    await closing
    await until(lambda: len(second.queues) == 8)
    await until(lambda: len(consumers.received["b"]) >= len(sent))
    assert Counter(consumers.received["b"]) == Counter(sent)


class BusyMember:
    """A member with one message of each queue done and not committed, and busy with one of b0/0."""

    def __init__(self, consumers: Consumers, topic: str) -> None:
        self.busy = MessageQueue(topic, "b0", 0)
        self.leave = threading.Event()
        self.done: list[bytes] = []
        self._consumers = consumers
        self._topic = topic
        self._entered = threading.Event()

    def _receive(self, message) -> None:
        if message.body == b"slow":
            self._entered.set()
            self.leave.wait(60)
        self.done.append(message.body)

    async def start(self) -> PushConsumer:
        cluster = self._consumers.cluster
        settings = {**LONG, "commit_interval_s": 3_600, "close_timeout_s": 300}
        sent = await fill(cluster, self._topic, 1)
        consumer = await self._consumers.start("busy", self._receive, settings=settings)
        await until(lambda: len(self.done) == len(sent))
        await cluster.send(self._topic, [b"slow"], broker="b0", queue_id=0)
        await until(self._entered.is_set)
        return consumer


async def test_a_broker_that_is_away_keeps_no_queues_of_others_from_being_given_away(
    cluster, topic, consumers, monkeypatch
) -> None:
    member = BusyMember(consumers, topic)
    first = await member.start()
    answer, commit = asyncio.Event(), OffsetClient.commit

    async def slow(client, broker, commits, timeout_s=0.0):
        if broker == "b1" and client is first._share._offsets:
            await answer.wait()
        return await commit(client, broker, commits)

    monkeypatch.setattr(OffsetClient, "commit", slow)
    closing = asyncio.create_task(first.close())
    try:
        second = await consumers.start("b", settings=LONG)
        idle = {MessageQueue(topic, "b0", number) for number in (1, 2, 3)}
        await until(lambda: second.queues >= idle)
        assert not any(queue.broker == "b1" for queue in second.queues)
    finally:
        answer.set()
        member.leave.set()
        await closing
    await until(lambda: len(second.queues) == 8)


async def test_what_could_not_be_saved_while_a_callback_ran_is_saved_when_it_has_ended(
    cluster, topic, consumers, monkeypatch
) -> None:
    member = BusyMember(consumers, topic)
    first = await member.start()
    refused, commit = set(), OffsetClient.commit

    async def away(client, broker, commits, timeout_s=0.0):
        if broker == "b1" and not member.leave.is_set():
            refused.add(broker)
            raise Internal("its disk is full")  # not asked again at once
        return await commit(client, broker, commits)

    monkeypatch.setattr(OffsetClient, "commit", away)
    closing = asyncio.create_task(first.close())
    await until(lambda: bool(refused))
    member.leave.set()
    await closing
    assert await committed(cluster, topic) == {
        f"{broker}/{number}": 1 + (broker == "b0" and number == 0)
        for broker in ("b0", "b1")
        for number in range(4)
    }


async def test_commits_that_last_do_not_prolong_a_close_again_and_again(
    cluster, topic, consumers, monkeypatch
) -> None:
    gates = [threading.Event() for _ in range(4)]
    done: set[int] = set()
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, time=time.time, now_s=0.0)
    monkeypatch.setattr(group_share, "time", clock)

    async def receive(message) -> None:
        await until(gates[message.queue].is_set)
        done.add(message.queue)

    settings = {"commit_interval_s": 3_600, "close_timeout_s": 3_000, "session_timeout_s": 300}
    consumer = await consumers.start(callback=receive, settings=settings)
    for queue_id in range(4):
        await cluster.send(topic, [b"slow"], broker="b0", queue_id=queue_id)
    await until(lambda: len(consumer._share._dispatcher._workers.busy()) == 4)
    committer = consumer._share._committer
    commit, rounds = committer.commit, []

    async def slow(holdings):
        ours = sorted(each.queue.queue_id for each in holdings if each.queue in busy)
        if ours:
            rounds.append(ours)
        if len(ours) == 1 and (more := [gate for gate in gates if not gate.is_set()]):
            clock.now_s += 5_000
            more[0].set()  # another callback ends meanwhile
            await until(lambda: gates.index(more[0]) in done)
        return await commit(holdings)

    monkeypatch.setattr(committer, "commit", slow)
    busy = {MessageQueue(topic, "b0", queue_id) for queue_id in range(4)}
    gates[0].set()
    await consumer.close()
    assert rounds == [[0], [1], [0, 1, 2, 3]]  # what ended before the limit, once more, and all


async def test_a_goodbye_reaches_whoever_coordinates_now(
    cluster, topic, consumers, patient_goodbyes
) -> None:
    first = await consumers.start("a", settings=LONG)
    second = await consumers.start("b", settings=LONG)
    await until(lambda: len(first.queues) == len(second.queues) == 4)
    coordinator = balance.coordinator("billing", ["b0", "b1"])
    [other] = {"b0", "b1"} - {coordinator}
    await cluster.stop_broker(coordinator)
    await second.close()
    await until(lambda: first.queues == {MessageQueue(topic, other, n) for n in range(4)})


async def test_a_static_member_that_comes_back_finds_its_queues(cluster, topic, consumers) -> None:
    named = {"settings": LONG, "member_name": "pod-3"}
    other = await consumers.start("a", settings=LONG)
    static = await consumers.start("b", **named)
    await until(lambda: len(other.queues) == len(static.queues) == 4)
    kept, mine = other.queues, static.queues
    sources = {id(source) for source in other._share._by_source}
    await static.close()
    back = await consumers.start("c", **named)
    await until(lambda: back.queues == mine)
    sent = await fill(cluster, topic, 5)
    await until(lambda: len(consumers.all) >= len(sent))
    assert Counter(consumers.all) == Counter(sent)
    assert other.queues == kept
    assert {id(source) for source in other._share._by_source} == sources  # not touched


async def test_a_newer_process_ends_the_older_one_of_its_name(
    cluster, topic, consumers, monkeypatch
) -> None:
    monkeypatch.setattr(group_share, "FENCED_COMMIT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(committing, "REQUEST_TIMEOUT_S", 60.0)
    settings = LONG | {"commit_interval_s": 3_600}
    older = await consumers.start("a", member_name="pod-3", settings=settings)
    await until(lambda: len(older.queues) == 8)
    await fill(cluster, topic, 5, "before ")
    holdings = older._share._holdings.all
    await until(lambda: {each.source.pending.commit_point for each in holdings} == {5})
    newer = await consumers.start("b", member_name="pod-3", settings=settings)
    with pytest.raises(FencedMember) as ended:
        async with asyncio.timeout(30):
            await older.run()
    assert ended.value.field == "incarnation"
    assert older.queues == frozenset()
    await until(lambda: len(newer.queues) == 8)
    sent = await fill(cluster, topic, 5)
    await until(lambda: len(consumers.received["b"]) >= len(sent))
    assert Counter(consumers.received["b"]) == Counter(sent)  # what was done is not repeated
    await older.close()
    more = await fill(cluster, topic, 1, "more ")
    await until(lambda: len(consumers.received["b"]) >= len(sent | more))


async def test_a_newer_process_does_not_wait_for_a_broker_that_answers_the_older_one_nothing(
    cluster, topic, consumers, monkeypatch
) -> None:
    """Its commit is under way there when it hears that it is replaced."""
    monkeypatch.setattr(group_share, "FENCED_COMMIT_TIMEOUT_S", 0.1)
    settings = LONG | {"commit_interval_s": 3_600}
    older = await consumers.start("a", member_name="pod-3", settings=settings)
    await until(lambda: len(older.queues) == 8)
    await fill(cluster, topic, 5)
    share, asked, answer = older._share, [], asyncio.Event()
    holdings = share._holdings.all
    await until(lambda: {each.source.pending.commit_point for each in holdings} == {5})

    async def silent(broker, commits, timeout_s):
        asked.append(broker)
        await answer.wait()
        return {}

    monkeypatch.setattr(share._offsets, "commit", silent)
    under_way = asyncio.create_task(share._committer.commit(holdings))
    try:
        await until(lambda: len(asked) == 2)
        newer = await consumers.start("b", member_name="pod-3", settings=settings)
        await until(lambda: len(newer.queues) == 8)
    finally:
        answer.set()
        await under_way


# --- refusals ---------------------------------------------------------------------------------


async def test_without_a_nameserver_start_fails() -> None:
    consumer = PushConsumer("g", "t", print, nameserver="127.0.0.1:1")
    consumer._client.settings = type(consumer._client.settings)(connect_timeout_s=0.2)
    with pytest.raises(Unavailable):
        await consumer.start()
    with pytest.raises(Closed):
        await asyncio.wait_for(consumer.run(), 30)
    await consumer.close()
    blocking = duemq.PushConsumer("g", "t", print, nameserver="127.0.0.1:1")
    blocking._consumer._client.settings = consumer._client.settings
    for error in (Unavailable, Closed):
        with pytest.raises(error):
            await asyncio.to_thread(blocking.run)


async def test_of_a_consumer_that_is_closed_while_it_starts_nothing_begins(
    cluster, topic, monkeypatch
) -> None:
    connected, go_on, start = asyncio.Event(), asyncio.Event(), Client.start

    async def slow(client) -> None:
        await start(client)
        connected.set()
        await go_on.wait()

    monkeypatch.setattr(Client, "start", slow)
    consumer = PushConsumer("billing", topic, print, nameserver=cluster.nameserver)
    starting = asyncio.create_task(consumer.start())
    await connected.wait()
    await consumer.close()
    go_on.set()
    await starting
    await consumer.run()  # is over
    assert consumer._share is None
    assert not consumer._tasks


async def test_what_the_group_refuses_start_raises(cluster, topic, consumers) -> None:
    await consumers.start("a")
    with pytest.raises(InvalidArgument) as refused:
        await consumers.start("b", settings={"strategy": "average-by-circle"})
    assert refused.value.field == "strategy"
    with pytest.raises(InvalidArgument) as refused:
        await consumers.start("c", group="not a name")
    assert refused.value.field == "group"


async def test_a_consumer_is_started_once(cluster, topic, consumers) -> None:
    consumer = await consumers.start()
    with pytest.raises(Closed):
        await consumer.start()


# --- what cannot be read ----------------------------------------------------------------------


async def test_a_record_that_is_none_is_passed_over(cluster, topic, consumers, caplog) -> None:
    """As an older broker may have stored it."""
    garbage = b"\x0a\x03\xff\xff\xff"  # an entry of 3 bytes that are no Record
    await cluster.send(topic, [b"before"], queue_id=0)
    cluster.brokers["b0"].store.send(
        IncomingBatch(topic, 0, 0, 0, 0, garbage, b"\5\0\0\0", bytes(4), bytes(4), b"", b"", b""),
        now_ms=time.time_ns() // 1_000_000,
    )
    await cluster.send(topic, [b"after"], queue_id=0)
    await consumers.start()
    await cluster.send(topic, [b"fine"], queue_id=1)
    await until(lambda: sorted(consumers.all) == [b"after", b"before", b"fine"])
    assert "cannot be decoded" in caplog.text
    assert "offsets 1" in caplog.text
    offsets = cluster.brokers["b0"].store.offsets
    await until(
        lambda: (
            (done := offsets.find(GroupQueue("billing", topic, 0))) is not None and done.offset == 3
        )
    )


async def test_ctrl_c_while_a_blocking_consumer_starts_leaves_no_member_behind(
    cluster, topic, monkeypatch, patient_goodbyes
) -> None:
    consumer = duemq.PushConsumer("billing", topic, print, nameserver=cluster.nameserver)
    run = LoopThread.run

    def interrupted(self, *arguments):
        monkeypatch.setattr(LoopThread, "run", run)
        run(self, *arguments)
        raise KeyboardInterrupt

    def program() -> None:
        monkeypatch.setattr(LoopThread, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.start()

    await asyncio.to_thread(program)
    async with Admin(cluster.nameserver) as admin:
        assert (await admin.describe_group("billing")).members == ()


def held_acquires(monkeypatch) -> asyncio.Event:
    """Nobody takes a queue over before the event is set."""
    go = asyncio.Event()
    acquire = OffsetClient.acquire

    async def late(self, *arguments):
        await go.wait()
        return await acquire(self, *arguments)

    monkeypatch.setattr(OffsetClient, "acquire", late)
    return go


async def test_what_is_sent_to_a_new_topic_before_it_is_taken_over_is_not_left_out(
    cluster, consumers, monkeypatch
) -> None:
    """Also with "latest", which is meant for what was there before."""
    topic, sent = topic_name(), held_acquires(monkeypatch)
    consumer = await consumers.start(topics=topic, settings={"start_from": "latest"})
    for body in (b"1", b"2"):  # made, deleted, made anew
        sent.clear()
        await cluster.create_topic(topic, queues=1)
        await cluster.send(topic, [body], broker="b0", queue_id=0)
        sent.set()
        await until(lambda body=body: body in consumers.all)
        for client in cluster.clients.values():
            await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
        await until(lambda: not consumer.queues)
    assert consumers.all == [b"1", b"2"]


async def test_latest_leaves_out_what_was_there_before(cluster, topic, consumers) -> None:
    await fill(cluster, topic, 3)
    consumer = await consumers.start(settings={"start_from": "latest"})
    await until(lambda: len(consumer.queues) == 8)
    await cluster.send(topic, [b"new"], broker="b0", queue_id=0)
    await until(lambda: bool(consumers.all))
    assert consumers.all == [b"new"]


async def test_a_start_lasts_until_latest_means_before_it(
    cluster, topic, consumers, monkeypatch
) -> None:
    """Who sends right after it would be quicker than the member is at the queues' brokers."""
    monkeypatch.setattr(group_share, "BEGIN_TIMEOUT_S", 60.0)
    go = held_acquires(monkeypatch)
    settings = {"start_from": "latest", "start_timeout_s": 120.0}
    starting = asyncio.create_task(consumers.start(settings=settings))
    await until(lambda: bool(consumers._open) and consumers._open[0]._share is not None)
    share = consumers._open[0]._share
    await until(lambda: share._holdings.generation > 0)  # the group has answered
    assert not share.joined.is_set()
    go.set()
    consumer = await starting
    assert len(consumer.queues) == 8


async def test_latest_leaves_out_nothing_that_is_sent_while_queues_cannot_be_taken_over(
    cluster, topic, consumers, monkeypatch
) -> None:
    """They were there before, but their broker, or the way to it, is not for a moment."""
    acquire, sent = OffsetClient.acquire, asyncio.Event()

    async def refused(self, *args):
        if not sent.is_set():
            raise Unavailable("away for a moment")
        return await acquire(self, *args)

    monkeypatch.setattr(OffsetClient, "acquire", refused)
    await consumers.start(settings={"start_from": "latest"})
    new = await fill(cluster, topic, 1)
    sent.set()
    await until(lambda: len(consumers.all) >= len(new))
    assert Counter(consumers.all) == Counter(new)


async def test_latest_leaves_out_the_old_of_a_broker_that_was_away_at_the_start(
    cluster, consumers, monkeypatch
) -> None:
    topic, sent = topic_name(), held_acquires(monkeypatch)
    consumer = await consumers.start(topics=topic, settings={"start_from": "latest"})
    holdings = consumer._share._holdings
    monkeypatch.setattr(holdings, "_began_ms", 4_000_000_000_000)
    holdings.reads({topic: 4_000_000_000_000})
    monkeypatch.setattr(holdings, "reads", lambda since_ms: None)
    await cluster.create_topic(topic, queues=1)
    await cluster.send(topic, [b"old"], broker="b0", queue_id=0)
    sent.set()
    await until(lambda: len(consumer.queues) == len(cluster.brokers))
    await cluster.send(topic, [b"new"], broker="b0", queue_id=0)
    await until(lambda: bool(consumers.all))
    assert consumers.all == [b"new"]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("acquire", marks=pytest.mark.long),
        pytest.param("commit", marks=pytest.mark.long),
        "hello",
    ],
)
async def test_a_made_up_generation_does_not_keep_a_group_from_its_queues(
    cluster, topic, way
) -> None:
    """Any client may say what it likes; the most that is believed is soon counted past."""
    generation = newest_generation(int(time.time() * 1000) - 60_000)
    refs = [message_pb2.QueueRef(topic=topic, queue_id=number) for number in range(4)]
    commits = [
        broker_pb2.OffsetCommit(topic=topic, queue_id=number, generation=generation)
        for number in range(4)
    ]
    for client in cluster.clients.values():
        request = broker_pb2.AcquireQueuesRequest(
            group="billing", member_id="evil", generation=generation, queues=refs
        )
        if way == "acquire":
            await status.answer(client.broker.AcquireQueues(request))
        elif way == "commit":
            request.generation = 1
            await status.answer(client.broker.AcquireQueues(request))
            commit = broker_pb2.CommitOffsetsRequest(group="billing", commits=commits)
            await status.answer(client.broker.CommitOffsets(commit))
        else:
            hello = group_pb2.Hello(
                group="billing",
                member_id="evil",
                generation=1 << 62,
                subscriptions=[group_pb2.Subscription(topic=topic)],
            )
            call = client.groups.Join()
            await call.write(group_pb2.MemberEvent(hello=hello))
            with suppress(grpc.RpcError):
                await call.read()
                await call.write(group_pb2.MemberEvent(leave=group_pb2.Leave()))
            call.cancel()
    consumers = Consumers(cluster, topic)
    await consumers.start()
    sent = [f"{broker} {n}".encode() for broker in cluster.brokers for n in range(4)]
    for broker in cluster.brokers:
        for number in range(4):
            body = f"{broker} {number}".encode()
            await cluster.send(topic, [body], broker=broker, queue_id=number)
    await until(lambda: sorted(consumers.all) == sorted(sent))
    await consumers.close()


async def test_latest_leaves_out_nothing_that_came_to_a_new_broker_while_the_group_was_away(
    cluster, topic, consumers
) -> None:
    """It has no offset there; it is not new all the same."""
    latest = {"start_from": "latest"}
    await (await consumers.start(settings=latest)).close()
    await cluster.start_broker("b2")
    await cluster.create_topic(topic)
    await cluster.send(topic, [b"meanwhile"], broker="b2")
    assert balance.coordinator("billing", cluster.brokers) == "b1"  # as before
    group = cluster.brokers["b1"]._groups._coordinator.group("billing")
    group.reads_since_ms[topic] -= 120_000
    await consumers.start(settings=latest)
    await until(lambda: consumers.received["a"] == [b"meanwhile"])
