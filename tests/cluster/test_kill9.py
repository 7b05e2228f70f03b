"""kill -9 of members under load: what was acknowledged is delivered, once in the log, never early.

CRASH_ROUNDS repeats each case; the history of a round that fails is kept beside the cluster's logs.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from duemq import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import dump, judge
from tests.cluster.harness import topic_name, until
from tests.cluster.history import History
from tests.cluster.senders import senders

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
SENDERS = 3
LOAD_S = 3.0
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
        seeds = [randomness.random() for _ in range(SENDERS)]
        with senders(cluster.nameserver, topic, history, seeds, pause_s=PAUSE_S):
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
