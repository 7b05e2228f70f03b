"""Producers and two consumers at work on a cluster while a test disturbs it, and the judgement."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from duemq import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import dump, judge
from tests.cluster.harness import WAIT_S, topic_name, until
from tests.cluster.history import History
from tests.cluster.senders import senders

SENDERS = 2


@contextmanager
def judged(
    cluster: EmbeddedCluster, tmp_path: Path, randomness: random.Random, timeout_s: float = WAIT_S
) -> Iterator[History]:
    """Nothing acknowledged meanwhile may be lost, stored twice, early, or out of order.

    `timeout_s`: of a send.
    """
    topic, history = topic_name(), History()
    with ExitStack() as running:
        for _ in range(2):
            consumer = PushConsumer(
                topic,
                topic,
                history.receiver(topic),
                nameserver=cluster.nameserver,
                settings=ConsumerSettings(start_from="earliest"),
            )
            running.enter_context(consumer)
        with senders(
            cluster.nameserver,
            topic,
            history,
            [randomness.random() for _ in range(SENDERS)],
            pause_s=0.1,
            burst=50,
            settings=ProducerSettings(send_timeout_s=timeout_s),
        ):
            yield history
        cluster.wait_ready(WAIT_S)
        acked = history.count("acked")
        until(lambda: history.count("received", group=topic) >= acked)
    history.stored(read_topic(cluster.nameserver, topic))
    dump(history.events, tmp_path / "history.jsonl")
    assert acked > 0
    verdict = judge(history.events, [topic])
    print(f"{verdict.acked} acknowledged, {verdict.stored} stored, {verdict.repeated} repeated")
    assert verdict.faults == []
