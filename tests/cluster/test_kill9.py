"""kill -9 of members under load: what was acknowledged is delivered, once in the log, never early.

CRASH_ROUNDS repeats each case; the history of a round that fails is kept beside the cluster's logs.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from duemq import Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import dump, judge
from tests.cluster.harness import topic_name, until
from tests.cluster.history import History

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
SENDERS = 3
LOAD_S = 3.0
DELAY_S_MAX = 2.0
BURST = 200
# Between bursts: the machine is shared.  The campaign of many rounds has no rest.
PAUSE_S = 0.05 if ROUNDS == 1 else 0.0


@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize(
    "victims", [("broker-0",), ("timer-0",), ("broker-0", "timer-0"), ("broker-0", "broker-1")]
)
def test_kill9_loses_and_repeats_nothing(
    cluster: EmbeddedCluster, victims: tuple[str, ...], round: int, tmp_path: Path
) -> None:
    print(f"CRASH_SEED={SEED}")
    randomness = random.Random(f"{SEED}-{victims}-{round}")
    topic, history = topic_name(), History()
    settings = ConsumerSettings(start_from="earliest")
    consumers = [
        PushConsumer(
            topic, topic, history.receiver(topic), nameserver=cluster.nameserver, settings=settings
        )
        for _ in range(2)
    ]
    with ExitStack() as running:
        for consumer in consumers:
            running.enter_context(consumer)
        with _load(
            cluster.nameserver, topic, history, [randomness.random() for _ in range(SENDERS)]
        ):
            for victim in victims:
                time.sleep(randomness.uniform(0.2, LOAD_S / len(victims)))
                cluster.kill(victim)
            cluster.wait_ready()
        acked = history.count("acked")
        until(lambda: history.count("received", group=topic) >= acked)
    history.stored(read_topic(cluster.nameserver, topic))
    dump(history.events, tmp_path / "history.jsonl")
    assert acked > 0
    assert judge(history.events, [topic]).faults == []


@contextmanager
def _load(nameserver: str, topic: str, history: History, seeds: Sequence[float]) -> Iterator[None]:
    """Senders are at work."""
    stop = threading.Event()
    senders = [
        threading.Thread(target=_send, args=(nameserver, topic, history, stop, name, seed))
        for name, seed in enumerate(seeds)
    ]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        stop.set()
        for sender in senders:
            sender.join()


def _send(
    nameserver: str, topic: str, history: History, stop: threading.Event, name: int, seed: float
) -> None:
    randomness = random.Random(seed)
    with Producer(nameserver) as producer:
        number = 0
        while not stop.is_set():
            delay = randomness.choice([None, randomness.uniform(0, DELAY_S_MAX)])
            # Delayed messages come in the order of their due times: only the others have a key.
            key = None if delay is not None else f"sender-{name}"
            # Alone, or many in flight at once: the kill then hits batches in every state.
            count = randomness.choice([1, 1, BURST])
            ids = [f"{name}-{number + offset}" for offset in range(count)]
            history.send_burst(producer, topic, ids, delay=delay, ordering_key=key)
            number += count
            stop.wait(PAUSE_S)
