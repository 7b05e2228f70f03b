"""Processes are stopped under load, for longer than the others wait for them, and then go on.

Who sleeps (SIGSTOP) is taken for dead: its routes expire, sends and fires go elsewhere, its answers
are given up.  When it wakes (SIGCONT) it finds in its sockets what had been sent to it before, and
believes that it is who it was.  SLEEPS (by default 4) times, by CRASH_SEED, one or two of a
cluster's processes at once; for longer than a registration, and the fourth time for longer than a
channel's keepalive.  A process may be killed while another one sleeps.  Producers send, at once and
delayed; a canceller takes some back; two consumers receive.  Judged as test_kill9.py: nothing
acknowledged is lost, stored twice, early, or out of order, and what was cancelled never comes.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from duemq import Admin, CancelOutcome, Producer, Receipt
from duemq.errors import Unavailable
from duemq.settings import ProducerSettings
from duemq.transport.channel import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from duemq_server.local_cluster.cluster import HEARTBEAT_PERIOD_S
from duemq_server.serving.registration import EXPIRY_PERIODS
from tests.cluster.checker import dump, judge
from tests.cluster.harness import WAIT_S, topic_name, until
from tests.cluster.history import History
from tests.cluster.judging import judged

SLEEPS = int(os.environ.get("SLEEPS", "4"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
EXPIRY_S = EXPIRY_PERIODS * HEARTBEAT_PERIOD_S
KEEPALIVE_S = (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1000
AWAKE_S_MAX = 1.5
DELAY_S_MAX = 4.0
WAITS_S_MAX = 1.0
REGRETTERS = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(300 + SLEEPS * 2 * KEEPALIVE_S)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Two nameservers, two brokers, one timer service."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), nameservers=2) as embedded:
        yield embedded


def test_who_wakes_after_it_was_given_up_loses_and_repeats_nothing(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    randomness = random.Random(f"{SEED}-sleepers")
    names = sorted(cluster.processes)
    # Each alone or with another one, before any comes again.
    deck = randomness.sample(names, len(names))
    with (
        taking_back(cluster, tmp_path, randomness.random()),
        judged(cluster, tmp_path, randomness, timeout_s=2 * WAIT_S),
    ):
        for number in range(SLEEPS):
            time.sleep(randomness.uniform(0.2, AWAKE_S_MAX))
            first = deck[number % len(deck)]
            others = randomness.sample([each for each in names if each != first], 2)
            long = number % 4 == 3
            seconds = KEEPALIVE_S + 3 if long else randomness.uniform(1.1, 2.0) * EXPIRY_S
            _sleep(cluster, [first, *others[: number % 2]], seconds, randomness, others[1])


def _sleep(
    cluster: EmbeddedCluster,
    sleepers: Sequence[str],
    seconds: float,
    randomness: random.Random,
    victim: str,
) -> None:
    """One after the other, as one machine does not know of the other one; perhaps another dies."""
    killed = randomness.random() < 0.3
    print(f"{sleepers} for {seconds:.2f} s{f', {victim} is killed' * killed}", flush=True)
    pids = [cluster.processes[name] for name in sleepers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds / 2)
        if killed:
            cluster.kill(victim)
        time.sleep(seconds / 2)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(randomness.uniform(0.0, 0.5))
    cluster.wait_ready(WAIT_S)


@contextmanager
def taking_back(cluster: EmbeddedCluster, tmp_path: Path, seed: float) -> Iterator[None]:
    """Delayed messages, half of them under timer keys, are cancelled or replaced; judged."""
    topic, history, over = topic_name(), History(), threading.Event()
    with Admin(cluster.nameserver) as admin:
        admin.create_topic(topic)
    with ThreadPoolExecutor(REGRETTERS) as threads:
        work = [
            threads.submit(_take_back, cluster, topic, history, f"{seed}-{each}", over)
            for each in range(REGRETTERS)
        ]
        try:
            yield
        finally:
            over.set()
    for each in work:
        each.result()
    cluster.wait_ready(WAIT_S)
    gone = {e["id"] for e in history.events if e.get("outcome") == CancelOutcome.CANCELLED}
    dump(history.events, tmp_path / "cancels.jsonl")
    until(lambda: stored_ids(cluster, topic) >= history.ids("acked") - gone)
    until(lambda: nothing_pends(cluster))
    history.stored(read_topic(cluster.nameserver, topic))
    assert gone
    verdict = judge(history.events)
    print(f"{verdict.acked} delayed, {len(gone)} of them cancelled")
    assert verdict.faults == []


def stored_ids(cluster: EmbeddedCluster, topic: str) -> set[str]:
    """Of what the topic's log holds."""
    return {message.key or "" for message in read_topic(cluster.nameserver, topic)}


def nothing_pends(cluster: EmbeddedCluster) -> bool:
    """Whether no more can come of what was taken over."""
    with Admin(cluster.nameserver) as admin:
        return not any(each.pending or each.in_flight for each in admin.timer_stats())


def _take_back(
    cluster: EmbeddedCluster, topic: str, history: History, seed: str, over: threading.Event
) -> None:
    """One after the other; a cancel is repeated until it is answered."""
    randomness = random.Random(seed)
    settings = ProducerSettings(send_timeout_s=2 * WAIT_S)
    waiting = ""  # under the key
    with Producer(cluster.nameserver, settings=settings) as producer:
        for number in itertools.count():
            if over.is_set():
                return
            id, keyed = f"{seed}-{number}", randomness.random() < 0.5
            options = {"delay": randomness.uniform(0.0, DELAY_S_MAX)}
            options |= {"timer_key": seed} if keyed else {}
            receipt = history.send(producer, topic, id, **options)
            assert receipt is not None
            if keyed and waiting:
                outcome = CancelOutcome.CANCELLED if receipt.replaced else CancelOutcome.FIRED
                history.add("cancelled", waiting, outcome=outcome)
            waiting = id if keyed else waiting
            over.wait(randomness.uniform(0.0, WAITS_S_MAX))
            if randomness.random() < 0.5:
                history.add("cancelled", id, outcome=_cancelled(producer, receipt))
                waiting = "" if keyed else waiting


def _cancelled(producer: Producer, receipt: Receipt) -> CancelOutcome:
    while True:
        with suppress(Unavailable):  # it may have been cancelled all the same
            return producer.cancel(receipt)
