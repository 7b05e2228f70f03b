"""Messages that fail, with real brokers and timer service: retries, dead letters, kill -9."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import grpc
import pytest

from duemq import (
    ConsumerSettings,
    DeadLetter,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    RetryLater,
)
from duemq.protocol.names import dead_letter_topic
from duemq.v1 import group_admin_pb2, stubs
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, rows, topic_name, until

RETRIES_MAX = 2
# Of members that are not killed: they keep their queues however busy the machine is.
SETTINGS = ConsumerSettings(start_from="earliest", session_timeout_s=60, commit_interval_s=0.1)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two brokers whose groups retry after a second, twice; a timer service."""
    flags = {"broker": ["--retry-delays", "1s", "--retries-max", str(RETRIES_MAX)]}
    with EmbeddedCluster(tmp_path_factory.mktemp("impatient"), flags=flags) as embedded:
        yield embedded


def send(cluster: EmbeddedCluster, topic: str, *bodies: str) -> None:
    with Producer(cluster.nameserver) as producer:
        producer.send_many(topic, [body.encode() for body in bodies])


def sent_back(cluster: EmbeddedCluster, group: str) -> int:
    """By all members, as the brokers count."""
    total = 0
    for broker in cluster.names("broker"):
        with grpc.insecure_channel(cluster.address(broker)) as channel:
            request = group_admin_pb2.DescribeProgressRequest(group=group)
            stub = stubs.GroupAdminStub(channel)
            try:
                total += stub.DescribeProgress(request, timeout=WAIT_S).sent_back
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
    return total


def dead_letters(cluster: EmbeddedCluster, group: str, count: int) -> list[Message]:
    """All of them; at least `count`, which is waited for."""
    found: list[Message] = []
    with PullConsumer(nameserver=cluster.nameserver) as reader:
        reader.assign(dead_letter_topic(group), start_from="earliest")
        while len(found) < count:
            found += reader.poll(WAIT_S)
        return found + reader.poll(0.1)


def test_what_keeps_failing_comes_again_after_its_delays_and_is_a_dead_letter_then(
    impatient: EmbeddedCluster,
) -> None:
    topic = group = topic_name()
    send(impatient, topic, "good", "bad", "better")
    received: list[Message] = []

    def receive(message: Message) -> None:
        received.append(message)
        if message.body == b"bad":
            raise ValueError(f"bad indeed, {message.deliveries}")

    with PushConsumer(group, topic, receive, nameserver=impatient.nameserver, settings=SETTINGS):
        until(lambda: len(received) == 5)
        [dead] = dead_letters(impatient, group, 1)
    tries = [message for message in received if message.body == b"bad"]
    assert [message.deliveries for message in tries] == [0, 1, 2]
    assert {message.message_id for message in tries} == {dead.message_id}
    assert {message.topic for message in tries} == {dead.topic} == {topic}
    first = tries[0]
    for earlier, later in pairwise(tries):
        assert later.retry is not None
        assert later.retry.error == f"ValueError: bad indeed, {earlier.deliveries}"
        assert later.due_ms is not None
        assert later.due_ms - later.retry.last_failed_ms == 1_000
        assert later.store_ms >= later.due_ms
    assert dead.retry is not None
    assert dead.retry[:4] == (topic, first.broker, first.queue, first.offset)
    assert dead.retry.error == "ValueError: bad indeed, 2"
    assert dead.deliveries == 1 + RETRIES_MAX
    assert Counter(message.body for message in received) == {b"good": 1, b"better": 1, b"bad": 3}


def test_the_callback_may_choose(impatient: EmbeddedCluster) -> None:
    topic = group = topic_name()
    send(impatient, topic, "later", "never")
    calls: list[tuple[bytes, int]] = []

    def receive(messages: list[Message]) -> None:
        [message] = messages
        calls.append((message.body, message.deliveries))
        if message.body == b"never":
            raise DeadLetter("unreadable")
        if not message.deliveries:
            raise RetryLater("100ms")

    settings = ConsumerSettings(start_from="earliest", batch_messages_max=1)
    with PushConsumer(
        group, topic, receive, batch=True, nameserver=impatient.nameserver, settings=settings
    ):
        until(lambda: len(calls) == 3)
        [dead] = dead_letters(impatient, group, 1)
    assert Counter(calls) == Counter([(b"later", 0), (b"never", 0), (b"later", 1)])
    assert dead.body == b"never"
    assert dead.retry is not None
    assert dead.retry.error == "unreadable"


def test_the_command_line_shows_where_a_retry_came_from(impatient: EmbeddedCluster) -> None:
    topic = group = topic_name()
    send(impatient, topic, "bad")
    failed: list[Message] = []

    def receive(message: Message) -> None:
        failed.append(message)
        raise ValueError("bad indeed")

    with PushConsumer(group, topic, receive, nameserver=impatient.nameserver, settings=SETTINGS):
        until(lambda: len(failed) == 1)
    arguments = (topic, "--group", group, "--count", "1", "--idle-timeout", "50", "--json")
    (printed,) = rows(duemq(impatient.nameserver, "consume", *arguments))
    assert (printed["topic"], printed["body"], printed["attempt"]) == (topic, "bad", 2)
    story = printed["retry"]
    assert story["origin_topic"] == topic
    assert (story["origin_broker"], story["origin_queue"]) == (failed[0].broker, failed[0].queue)
    assert story["origin_offset"] == failed[0].offset
    assert story["first_failed_ms"] == story["last_failed_ms"] > 0
    assert story["error"] == "ValueError: bad indeed"


def test_a_member_killed_between_send_back_and_commit_repeats_nothing_that_it_sent_back(
    impatient: EmbeddedCluster,
) -> None:
    topic = group = topic_name()
    good = [f"good {number}" for number in range(50)]
    bad = [f"bad {number}" for number in range(20)]
    send(impatient, topic, *good, *bad)
    command = [sys.executable, "-m", "tests.cluster.failing_member"]
    arguments = [impatient.nameserver, group, topic]
    with subprocess.Popen(command + arguments, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        try:
            given: set[str] = set()
            while len(given) < len(good) + len(bad):  # retries may be among the lines
                given.add(json.loads(victim.stdout.readline()))
            until(lambda: sent_back(impatient, group) >= len(bad))
        finally:
            victim.kill()
    assert given == {*good, *bad}

    received: list[tuple[str, int]] = []
    adding = threading.Lock()

    def receive(message: Message) -> None:
        with adding:
            received.append((message.body.decode(), message.deliveries))

    with PushConsumer(group, topic, receive, nameserver=impatient.nameserver, settings=SETTINGS):
        until(lambda: len(received) >= len(good) + len(bad))
    # Nothing was committed, so what was done comes again; what was sent back only as a retry.
    assert Counter(body for body, _ in received) == Counter([*good, *bad])
    assert all((attempt > 0) == body.startswith("bad") for body, attempt in received)
