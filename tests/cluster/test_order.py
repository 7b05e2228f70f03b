"""Order and broadcast over real processes: what a stopped member may and may not do, and kill -9.

What a group does under a storm of these is in test_consumption.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from duemq import ConsumerSettings, Message, Producer, PushConsumer
from duemq.v1 import broker_pb2, stubs
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, topic_name, until

Place = tuple[str, int, int]  # broker, queue, offset
Event = tuple[str, str | None, str, int, int]  # begin or end, key, place
KEYS = [f"key-{number}" for number in range(40)]
# A shorter session may end while a busy machine does not let a member run.
SETTINGS = {"start_from": "earliest", "session_timeout_s": 6, "commit_interval_s": 0.05}
# Of a member that must not lose its queues however busy the machine is.
PATIENT = SETTINGS | {"session_timeout_s": 60}
THREADS = 4


class Member:
    """A process that consumes; what it has printed."""

    def __init__(self, **arguments: Any) -> None:
        command = [sys.executable, "-m", "tests.cluster.noting_member", json.dumps(arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.events: list[Event] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be torn
                    self.events.append(tuple(json.loads(line)))

    def places(self, what: str, since: int = 0) -> list[Place]:
        """Where messages lie whose callbacks have begun, or ended."""
        return [event[2:] for event in self.events[since:] if event[0] == what]

    def signal(self, number: signal.Signals) -> None:
        """Suspends it, or lets it go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9; afterwards `events` is complete."""
        self._process.kill()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)


@contextmanager
def member(**arguments: Any) -> Iterator[Member]:
    started = Member(**arguments)
    try:
        yield started
    finally:
        started.kill()


def send(cluster: EmbeddedCluster, topic: str, each: int, body: bytes = b"") -> list[Place]:
    """So many messages of every key; answers where they lie, in the order they were sent."""
    with Producer(cluster.nameserver) as producer:
        receipts = [
            producer.submit(topic, body, ordering_key=key) for _ in range(each) for key in KEYS
        ]
        stored = [receipt.result(WAIT_S) for receipt in receipts]
    return [(receipt.broker, receipt.queue, receipt.offset) for receipt in stored]


def committed(cluster: EmbeddedCluster, group: str, topic: str) -> int:
    """The sum of the group's offsets."""
    total = 0
    for broker in cluster.names("broker"):
        with grpc.insecure_channel(cluster.address(broker)) as channel:
            request = broker_pb2.GetOffsetsRequest(group=group, topic=topic)
            stub = stubs.BrokerStub(channel)
            answer = stub.GetOffsets(request, timeout=WAIT_S, wait_for_ready=True)
            total += sum(max(each.offset, 0) for each in answer.queues)
    return total


class Journal:
    """What a consumer in this process has processed."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def receive(self, message: Message) -> None:
        self.places.append((message.broker, message.queue, message.offset))


def check_order(places: list[Place]) -> None:
    """Offsets of a queue in a list that is in the order of a key, or queue, only go up."""
    last: dict[tuple[str, int], int] = {}
    for broker, queue, offset in places:
        assert offset > last.get((broker, queue), -1)
        last[broker, queue] = offset


@pytest.mark.parametrize("order", [pytest.param("queue", marks=pytest.mark.long), "key"])
def test_a_member_stopped_for_longer_than_its_session_starts_and_commits_nothing_of_what_it_lost(
    cluster: EmbeddedCluster, order: str
) -> None:
    topic = group = topic_name()
    journal = Journal()
    arguments = {"group": group, "topics": topic, "order": order, "nameserver": cluster.nameserver}
    survivor = PushConsumer(
        callback=journal.receive, settings=ConsumerSettings(**PATIENT), **arguments
    )
    sent = send(cluster, topic, 5)
    with ExitStack() as running:
        running.enter_context(survivor)
        until(lambda: len(survivor.queues) == 8)
        zombie = running.enter_context(member(settings=SETTINGS, threads=THREADS, **arguments))
        until(lambda: len(survivor.queues) == 4)
        sent += send(cluster, topic, 3, b"slow")
        until(lambda: len(zombie.places("begin")) > len(zombie.places("end")))
        zombie.signal(signal.SIGSTOP)  # in the middle of callbacks
        until(lambda: len(survivor.queues) == 8)
        sent += send(cluster, topic, 2)
        until(lambda: committed(cluster, group, topic) == len(sent))
        count = len(zombie.events)
        zombie.signal(signal.SIGCONT)
        until(lambda: len(survivor.queues) == 4)
        # All had been committed by the survivor: the zombie was left with what it was doing.
        assert committed(cluster, group, topic) == len(sent)
        more = send(cluster, topic, 5)
        until(lambda: committed(cluster, group, topic) == len(sent) + len(more))
        until(lambda: set(journal.places) | set(zombie.places("end")) >= {*sent, *more})
        until(lambda: len(zombie.places("begin")) == len(zombie.places("end")))
        assert Counter(zombie.places("begin")).most_common(1)[0][1] == 1
        # What a worker had been allowed to begin when the process was stopped it may begin: one
        # each.  The group's new queues start behind what is committed.
        assert len(set(zombie.places("begin", count)) - set(more)) <= THREADS
    for places in by_key(sent + more, journal.places), by_key(sent + more, zombie.places("end")):
        for each in places.values():
            check_order(each)


def by_key(sent: list[Place], processed: list[Place]) -> dict[str, list[Place]]:
    """What was processed, key by key (messages were sent in turns)."""
    key_of = {place: KEYS[number % len(KEYS)] for number, place in enumerate(sent)}
    found: dict[str, list[Place]] = {key: [] for key in KEYS}
    for place in processed:
        found[key_of[place]].append(place)
    return found


def test_after_kill9_a_broadcast_member_goes_on_from_its_file(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    topic = topic_name()
    arguments: dict[str, Any] = {
        "group": f"{topic}-group",
        "topics": topic,
        "broadcast": True,
        "nameserver": cluster.nameserver,
    }
    saving = SETTINGS | {"offsets_dir": str(tmp_path)}
    never_saving = saving | {"commit_interval_s": 3_600}
    first = send(cluster, topic, 5)
    with (
        member(settings=saving, member_name="one", **arguments) as one,
        member(settings=saving, member_name="two", **arguments) as two,
    ):
        for each in one, two:
            until(lambda each=each: len(each.places("end")) >= len(first))
        until(lambda: _saved(tmp_path, topic, "one") == len(first))
        one.kill()
        assert Counter(one.places("end")) == Counter(two.places("end")) == Counter(first)
    tail = send(cluster, topic, 3)
    for settings in never_saving, saving:  # the second comes after the kill -9 of the first
        with member(settings=settings, member_name="one", **arguments) as again:
            until(lambda again=again: len(again.places("end")) >= len(tail))
            again.kill()
        assert Counter(again.places("end")) == Counter(tail)


def _saved(directory: Path, topic: str, member: str) -> int:
    file = directory / f"{topic}-group" / f"{member}.json"
    return sum(offset for *_, offset in json.loads(file.read_text())["queues"])
