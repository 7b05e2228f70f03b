"""A group consumes while members, brokers and coordinator are killed, paused and joined by more.

`disturbance` says what happens, `recording_member` writes down what each member does, and
`consumption_checker` proves from that what its docstring lists.  A failed run prints its seed and
leaves the history in the test's folder: `python -m tests.cluster.judge_consumption FOLDER`.

    make crash                                         CRASH_ROUNDS rounds
    CONSUMPTION_SECONDS=600 CRASH_SEED=7 pytest …      one long round, that seed
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import pytest

from duemq import Admin, Message, PendingReceipt, Producer
from duemq.errors import DuemqError, TopicNotFound
from duemq.v1 import broker_pb2, stubs
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.consumption_checker import Event, Queue, Rules, judge
from tests.cluster.consumption_checker import load as read_history
from tests.cluster.disturbance import (
    SESSION_TIMEOUT_S,
    Disturber,
    Group,
    Journal,
    Step,
    brokers_of,
    schedule,
)
from tests.cluster.harness import WAIT_S, leader_of, topic_name, until

SECONDS = float(os.environ.get("CONSUMPTION_SECONDS", "5"))
ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
KEYS = 24
DRAIN_S = 120.0
RETRIES_MAX = 3
RETRY_DELAYS = "200ms 400ms 600ms"
IN_ORDER_MAX = 4
THREADS = 8
# Some callbacks take so long: pauses, releases and the timeout meet them.
SLOW_S = 1.0
TIMEOUT_S = 0.4
STRATEGIES = ("average", "average-by-circle", "consistent-hash", "sticky")
SETTINGS = {
    "start_from": "earliest",
    "threads": THREADS,
    "session_timeout_s": SESSION_TIMEOUT_S,
    "commit_interval_s": 0.3,
    "retry_wait_s_min": 0.05,
    "retry_wait_s_max": 0.5,
}
SETTINGS_IN_ORDER = {"suspend_s": 0.1, "retries_in_order_max": IN_ORDER_MAX}


@dataclass(frozen=True)
class Load:
    """What is sent: enough to keep the members busy.  The machine is shared."""

    messages_per_s: int
    callback_s_max: float
    failures: dict[int, int]
    """How many of 1,000 messages fail once, twice, …; 99 is for ever."""
    slow: int
    """How many of 10,000 keep their first callback for SLOW_S."""


LOADS = (
    Load(200, 0.01, {0: 940, 1: 30, 2: 20, 99: 10}, slow=40),
    # So quick that workers get many messages at a time.
    Load(2_000, 0.0, {0: 994, 1: 3, 2: 2, 99: 1}, slow=4),
)


@dataclass(frozen=True)
class Mode:
    """How the group consumes."""

    order: str | None
    settings: dict[str, object]
    static: bool = False
    calls: tuple[str, ...] = ("each", "awaited")

    @property
    def rules(self) -> Rules:
        return Rules(self.order, RETRIES_MAX, IN_ORDER_MAX, TIMEOUT_S)


MODES = {
    "concurrent": Mode(
        None,
        SETTINGS | {"processing_timeout_s": TIMEOUT_S},
        calls=("each", "each", "awaited", "batched"),
    ),
    "key": Mode("key", SETTINGS | SETTINGS_IN_ORDER),
    "queue": Mode("queue", SETTINGS | SETTINGS_IN_ORDER, static=True),
}


FLAGS = {"broker": ("--retry-delays", RETRY_DELAYS, "--retries-max", str(RETRIES_MAX))}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two brokers with a short retry policy."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), flags=FLAGS) as embedded:
        yield embedded


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """The same, but one broker of three replicas."""
    directory = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(directory, brokers=1, replicas=3, flags=FLAGS) as embedded:
        yield embedded


@pytest.mark.timeout(SECONDS + 3 * DRAIN_S)
@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=[pytest.mark.long] * (each == "key")) for each in MODES]
)
def test_a_disturbed_group_loses_repeats_and_disorders_nothing(
    cluster: EmbeddedCluster, mode: str, round: int, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    seed = f"{SEED}-{mode}-{round}"
    consume(cluster, mode, seed, schedule(seed, SECONDS), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3 * DRAIN_S)
@pytest.mark.parametrize("mode", MODES)
def test_a_member_that_wakes_beside_its_successor_loses_repeats_and_disorders_nothing(
    cluster: EmbeddedCluster, mode: str, tmp_path: Path
) -> None:
    """Under the same name, where it is static; within its session, and after it."""
    print(f"CRASH_SEED={SEED}")
    pauses = (SESSION_TIMEOUT_S / 4, 2 * SESSION_TIMEOUT_S)
    steps = [Step(1.0, "supplant member", draw=0.0, pause_s=pause_s) for pause_s in pauses]
    consume(cluster, mode, f"{SEED}-{mode}-wakes", steps, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3 * DRAIN_S)
@pytest.mark.parametrize("mode", MODES)
def test_a_group_whose_broker_fails_over_loses_repeats_and_disorders_nothing(
    replicated: EmbeddedCluster, mode: str, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    (broker,) = brokers_of(replicated)
    before = leader_of(replicated, broker)
    what = ("join", "kill broker", "kill member", "leave")
    steps = [Step(wait_s=1.0, what=each, draw=0.0, pause_s=0.0) for each in what]
    consume(replicated, mode, f"{SEED}-{mode}", steps, tmp_path)
    assert leader_of(replicated, broker) != before


def consume(
    cluster: EmbeddedCluster, mode: str, seed: str, steps: list[Step], tmp_path: Path
) -> None:
    """A group at work while the steps are taken, and until all is done; judged."""
    load = random.Random(f"{seed}-load").choice(LOADS)
    topic = group = topic_name()
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(topic)
    plan = {
        "nameserver": cluster.nameserver,
        "brokers": {
            cluster.address(name): name.partition("/")[0] for name in cluster.names("broker")
        },
        "topic": topic,
        "group": group,
        "order": MODES[mode].order,
        "static": MODES[mode].static,
        "calls": MODES[mode].calls,
        "settings": MODES[mode].settings | {"strategy": random.Random(seed).choice(STRATEGIES)},
        "callback_s_max": load.callback_s_max,
    }
    rules = MODES[mode].rules
    with closing(Journal(tmp_path / "driver.jsonl")) as journal:
        journal.add("rules", **asdict(rules))
        with Group(tmp_path, journal, plan) as members:
            sender = Sender(cluster.nameserver, topic, journal, seed, load)
            disturber = Disturber(steps, cluster, members, group, journal)
            sender.start()
            disturber.start()
            disturber.join()
            sender.stop.set()
            sender.join()
            assert disturber.error is None, disturber.error
            cluster.wait_ready()
            until(lambda: quiet(cluster, topic), DRAIN_S)
            for name in members.names:
                members.leave(name)
        books = Books(cluster, topic)
        books.enter(journal)
    verdict = judge(read_history([tmp_path / "driver.jsonl", *members.files]), rules)
    print(verdict.summary())
    assert verdict.faults == []
    assert verdict.messages > 0


class Sender(threading.Thread):
    """Sends messages that say what shall become of them, until told to stop."""

    def __init__(
        self, nameserver: str, topic: str, journal: Journal, seed: str, load: Load
    ) -> None:
        super().__init__(name="sender")
        self.stop = threading.Event()
        self._nameserver = nameserver
        self._topic = topic
        self._journal = journal
        self._load = load
        self._random = random.Random(f"{seed}-sender")

    def run(self) -> None:
        pending: list[tuple[str, PendingReceipt]] = []
        with Producer(self._nameserver) as producer:
            number, began = 0, time.monotonic()
            while not self.stop.is_set():
                if number < (time.monotonic() - began) * self._load.messages_per_s:
                    pending.append(self._send(producer, number))
                    number += 1
                else:
                    time.sleep(0.01)
            for id, receipt in pending:
                with suppress(DuemqError):  # then it may be stored or not
                    receipt.result()
                    self._journal.add("acked", id=id)

    def _send(self, producer: Producer, number: int) -> tuple[str, PendingReceipt]:
        key = f"key-{self._random.randrange(KEYS)}"
        id = f"{key}-{number}"
        weights = self._load.failures
        (failures,) = self._random.choices(list(weights), list(weights.values()))
        self._journal.add("sent", id=id, key=key, failures=failures)
        takes_s = SLOW_S if self._random.randrange(10_000) < self._load.slow else 0.0
        body = json.dumps({"id": id, "failures": failures, "takes_s": takes_s}).encode()
        return id, producer.submit(self._topic, body, ordering_key=key)


def quiet(cluster: EmbeddedCluster, topic: str) -> bool:
    """Whether all is done, and no retry is with the timer service or on its way there."""
    delayed = all_fired(cluster)
    return delayed >= 0 and Books(cluster, topic).balanced() and all_fired(cluster) == delayed


def all_fired(cluster: EmbeddedCluster) -> int:
    """How many messages were delayed; -1 unless their shards took all over and stored them."""
    with Admin(cluster.nameserver) as admin:
        sent = admin.describe_topic("%TIMER%").messages
        stats = admin.timer_stats()
    taken = sum(each.accepted for each in stats)
    idle = taken == sent and not any(each.pending or each.in_flight for each in stats)
    return sent if idle else -1


class Books:
    """The logs of a topic, its retries and dead letters, and how far the group is in them."""

    def __init__(self, cluster: EmbeddedCluster, topic: str) -> None:
        self._topic = topic
        names = (topic, f"%RETRY%{topic}", f"%DLQ%{topic}")
        self._logs = {name: _log(cluster.nameserver, name) for name in names}
        self._offsets = _offsets(cluster, topic)

    def balanced(self) -> bool:
        """Whether the group is at the end of each queue."""
        return all(event["offset"] == event["end"] for event in self._progress())

    def enter(self, journal: Journal) -> None:
        """Writes all of it into the history."""
        for event in self._progress():
            journal.add("progress", **event)
        for name in self._logs:
            for event in self._stored(name):
                journal.add("stored", **event)

    def _stored(self, name: str) -> Iterator[Event]:
        for message in self._logs[name]:
            retry = message._record.retry  # as on the wire: the log is audited, not the SDK
            source = [retry.source.topic, retry.source.broker, retry.source.queue_id]
            yield {
                "id": json.loads(message.body)["id"],
                "queue": [name, message.broker, message.queue],
                "offset": message.offset,
                "attempt": message.deliveries,
                "source": [source, retry.source_offset] if name != self._topic else None,
            }

    def _progress(self) -> Iterator[Event]:
        """Of each queue that the group consumes and that holds anything."""
        ends: dict[Queue, int] = {}
        for name in (self._topic, f"%RETRY%{self._topic}"):
            for message in self._logs[name]:
                ends[name, message.broker, message.queue] = message.offset + 1
        for queue, end in ends.items():
            yield {"queue": list(queue), "offset": self._offsets.get(queue, 0), "end": end}


def _log(nameserver: str, topic: str) -> list[Message]:
    try:
        return list(read_topic(nameserver, topic))
    except TopicNotFound:  # nothing was ever sent back
        return []


def _offsets(cluster: EmbeddedCluster, group: str) -> dict[Queue, int]:
    found: dict[Queue, int] = {}
    for broker in brokers_of(cluster):
        with grpc.insecure_channel(cluster.address(leader_of(cluster, broker))) as channel:
            request = broker_pb2.GetOffsetsRequest(group=group)
            stub = stubs.BrokerStub(channel)
            for each in stub.GetOffsets(request, timeout=WAIT_S, wait_for_ready=True).queues:
                found[each.topic, broker, each.queue_id] = max(each.offset, 0)
    return found
