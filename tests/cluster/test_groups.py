"""Groups over real processes: members that are killed, coordinators that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from duemq import ConsumerSettings, Message, Producer, PullConsumer, PushConsumer
from duemq.protocol import balance
from duemq.v1 import admin_pb2, broker_pb2, stubs
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, topic_name, until

Place = tuple[str, int, int]  # broker, queue, offset
# Of members that are not killed: they keep their queues however busy the machine is.
SETTINGS = ConsumerSettings(start_from="earliest", session_timeout_s=60, commit_interval_s=0.2)


class Member:
    """A process that consumes; what it has printed."""

    def __init__(self, nameserver: str, group: str, topic: str, commit_interval_s: float) -> None:
        command = [sys.executable, "-m", "tests.cluster.member"]
        arguments = [nameserver, group, topic, str(commit_interval_s)]
        self._process = subprocess.Popen(command + arguments, stdout=subprocess.PIPE, text=True)
        self.received: list[Place] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be torn
                    self.received.append(tuple(json.loads(line)))

    def signal(self, number: signal.Signals) -> None:
        """Suspends it, or lets it go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9; afterwards `received` is complete."""
        self._process.kill()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)


@contextmanager
def member(*arguments: str | float) -> Iterator[Member]:
    started = Member(*arguments)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.kill()


def committed(cluster: EmbeddedCluster, group: str, topic: str) -> dict[tuple[str, int], int]:
    """(broker, queue) → the group's offset."""
    found = {}
    for broker in cluster.names("broker"):
        with grpc.insecure_channel(cluster.address(broker)) as channel:
            request = broker_pb2.GetOffsetsRequest(group=group, topic=topic)
            stub = stubs.BrokerStub(channel)
            for each in stub.GetOffsets(request, timeout=WAIT_S, wait_for_ready=True).queues:
                found[broker, each.queue_id] = max(each.offset, 0)
    return found


def send(cluster: EmbeddedCluster, topic: str, count: int) -> set[Place]:
    """Spreads messages over all queues; answers where they lie."""
    with Producer(cluster.nameserver) as producer:
        receipts = [
            producer.submit(topic, str(n).encode(), ordering_key=f"key-{n}") for n in range(count)
        ]
        stored = [receipt.result(WAIT_S) for receipt in receipts]
    return {(receipt.broker, receipt.queue, receipt.offset) for receipt in stored}


@pytest.mark.long
def test_after_kill9_exactly_the_uncommitted_tail_comes_again(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    first = send(cluster, topic, 300)
    with member(cluster.nameserver, group, topic, 0.2) as committing:
        until(lambda: sum(committed(cluster, group, topic).values()) == len(first))
        committing.kill()
        assert Counter(committing.received) == Counter(first)
    tail = send(cluster, topic, 200)
    with member(cluster.nameserver, group, topic, 3600) as never_committing:
        until(lambda: len(never_committing.received) >= len(tail))
        never_committing.kill()
        assert Counter(never_committing.received) == Counter(tail)
    with member(cluster.nameserver, group, topic, 0.2) as last:
        until(lambda: sum(committed(cluster, group, topic).values()) == len(first | tail))
        last.kill()
        assert Counter(last.received) == Counter(tail)


def test_a_killed_members_queues_go_to_the_others(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    sent = send(cluster, topic, 100)
    received: list[Place] = []
    with member(cluster.nameserver, group, topic, 0.05) as victim:
        until(lambda: len(victim.received) == len(sent))
        with consuming(cluster, group, topic, received) as survivor:
            until(lambda: len(survivor.queues) == 4)
            victim.kill()
            sent |= send(cluster, topic, 100)
            until(lambda: set(received) | set(victim.received) >= sent)
            assert len(survivor.queues) == 8
    assert max(Counter(received).values()) == 1


def test_a_member_that_slept_through_its_session_moves_nothing(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    sent = send(cluster, topic, 100)
    received: list[Place] = []
    with (
        member(cluster.nameserver, group, topic, 0.05) as sleeper,
        consuming(cluster, group, topic, received) as survivor,
    ):
        until(lambda: len(survivor.queues) == 4)
        until(lambda: set(received) | set(sleeper.received) >= sent)
        sleeper.signal(signal.SIGSTOP)
        sent |= send(cluster, topic, 100)
        until(lambda: len(survivor.queues) == 8)
        until(lambda: set(received) | set(sleeper.received) >= sent)
        until(lambda: sum(committed(cluster, group, topic).values()) == len(sent))
        sleeper.signal(signal.SIGCONT)
        until(lambda: len(survivor.queues) == 4)
        assert sum(committed(cluster, group, topic).values()) == len(sent)
        sent |= send(cluster, topic, 100)
        until(lambda: set(received) | set(sleeper.received) >= sent)
        until(lambda: sum(committed(cluster, group, topic).values()) == len(sent))


@contextmanager
def consuming(
    cluster: EmbeddedCluster, group: str, topic: str, received: list[Place]
) -> Iterator[PushConsumer]:
    def receive(message: Message) -> None:
        received.append((message.broker, message.queue, message.offset))

    with PushConsumer(
        group, topic, receive, nameserver=cluster.nameserver, settings=SETTINGS
    ) as consumer:
        yield consumer


def test_members_come_and_go_and_nothing_is_lost_or_repeated(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    sent: set[Place] = set()
    received: list[Place] = []
    with consuming(cluster, group, topic, received) as first:
        sent |= send(cluster, topic, 500)
        with consuming(cluster, group, topic, received) as second:
            sent |= send(cluster, topic, 500)
            with consuming(cluster, group, topic, received) as third:
                sent |= send(cluster, topic, 500)
                until(lambda: sorted(len(c.queues) for c in (first, second, third)) == [2, 3, 3])
            sent |= send(cluster, topic, 500)
            until(lambda: len(first.queues) == len(second.queues) == 4)
        sent |= send(cluster, topic, 500)
        until(lambda: len(first.queues) == 8)
        until(lambda: len(received) >= len(sent))
    assert Counter(received) == Counter(sent)


@pytest.mark.parametrize("anew", [60, 900])
def test_a_group_takes_a_topic_that_is_made_anew_for_another_one(
    cluster: EmbeddedCluster, anew: int
) -> None:
    """With fewer messages than it had consumed of the old one, and with more.

    No nameserver is there that would tell anybody.
    """
    topic = group = topic_name()
    received: list[bytes] = []

    def submit(kind: str, count: int) -> set[bytes]:
        bodies = {f"{kind} {n}".encode() for n in range(count)}
        receipts = [producer.submit(topic, body, ordering_key=str(body)) for body in bodies]
        for receipt in receipts:
            receipt.result(WAIT_S)
        return bodies

    with (
        Producer(cluster.nameserver) as producer,
        PushConsumer(
            group,
            topic,
            lambda message: received.append(message.body),
            nameserver=cluster.nameserver,
            settings=SETTINGS,
        ),
    ):
        sent = submit("old", 300)
        until(lambda: len(received) == len(sent))
        [nameserver] = cluster.names("nameserver")
        cluster.stop_member(nameserver)
        for broker in cluster.names("broker"):
            make_anew(cluster.address(broker), topic)
        sent |= submit("new", anew)
        until(lambda: len(received) >= len(sent))
        until(lambda: sum(committed(cluster, group, topic).values()) == anew)
        cluster.start_member(nameserver)
        cluster.wait_ready()
    assert Counter(received) == Counter(sent)
    assert sum(committed(cluster, group, topic).values()) == anew


def make_anew(address: str, topic: str) -> None:
    """At one broker."""
    with grpc.insecure_channel(address) as channel:
        stub = stubs.BrokerAdminStub(channel)
        stub.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic), timeout=WAIT_S)
        config = admin_pb2.TopicConfig(name=topic, queues=4)
        stub.CreateTopic(admin_pb2.CreateTopicRequest(topic=config), timeout=WAIT_S)


def test_members_keep_their_queues_when_the_coordinator_is_killed(
    cluster: EmbeddedCluster,
) -> None:
    topic = group = topic_name()
    sent = send(cluster, topic, 100)
    received: list[Place] = []
    with (
        consuming(cluster, group, topic, received) as first,
        consuming(cluster, group, topic, received) as second,
    ):
        until(lambda: len(first.queues) == len(second.queues) == 4)
        before = first.queues, second.queues
        cluster.kill(coordinator_of(cluster, group))
        cluster.wait_ready()
        sent |= send(cluster, topic, 100)
        until(lambda: set(received) >= sent)
        until(lambda: (first.queues, second.queues) == before)
    assert set(received) == sent


def test_members_consume_through_a_rolling_restart_of_the_brokers(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    sent = send(cluster, topic, 100)
    received: list[Place] = []
    with (
        consuming(cluster, group, topic, received) as first,
        consuming(cluster, group, topic, received) as second,
    ):
        until(lambda: len(first.queues) == len(second.queues) == 4)
        for broker in cluster.names("broker"):
            assert cluster.stop_member(broker) == 0
            until(lambda: len(first.queues) == len(second.queues) == 2)
            sent.update(send(cluster, topic, 100))
            until(lambda: set(received) >= sent)
            cluster.start_member(broker)
            cluster.wait_ready()
            until(lambda: len(first.queues) == len(second.queues) == 4)
    assert set(received) == sent


def coordinator_of(cluster: EmbeddedCluster, group: str) -> str:
    name = balance.coordinator(group, cluster.names("broker"))
    assert name is not None
    return name


def test_a_callback_may_close_its_consumer(cluster: EmbeddedCluster) -> None:
    topic = group = topic_name()
    send(cluster, topic, 10)

    def receive(messages: list[Message]) -> None:
        consumer.close()

    consumer = PushConsumer(
        group, topic, receive, batch=True, nameserver=cluster.nameserver, settings=SETTINGS
    )
    consumer.run()
    assert sum(committed(cluster, group, topic).values()) > 0


def test_a_pull_consumer_needs_no_event_loop(cluster: EmbeddedCluster) -> None:
    topic = topic_name()
    sent = send(cluster, topic, 100)
    received: list[Place] = []
    with PullConsumer(f"{topic}-group", nameserver=cluster.nameserver) as consumer:
        consumer.assign(topic, start_from="earliest")
        assert consumer.assignment == frozenset(consumer.queues(topic))
        while len(received) < len(sent):
            received += [(m.broker, m.queue, m.offset) for m in consumer.poll(1.0)]
        consumer.commit()
        for queue in consumer.assignment:
            assert consumer.committed(queue) == consumer.position(queue)
        [first] = [queue for queue in consumer.assignment if queue == min(consumer.assignment)]
        consumer.seek(first, "earliest")
        consumer.pause(first)
        assert consumer.poll(0.05) == []
        consumer.resume(first)
        assert {m.queue for m in consumer.poll(30.0)} == {first.queue_id}
    assert Counter(received) == Counter(sent)
