"""Threads that send to a topic, at once and delayed, alone and in bursts, and record it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from duemq import Producer
from duemq.settings import ProducerSettings
from tests.cluster.history import History

DELAY_S_MAX = 2.0
BURST = 200


@contextmanager
def senders(
    nameserver: str,
    topic: str,
    history: History,
    seeds: Sequence[float],
    *,
    pause_s: float,
    delay_s_max: float = DELAY_S_MAX,
    burst: int = BURST,
    settings: ProducerSettings | None = None,
) -> Iterator[None]:
    """One sender a seed is at work; `pause_s` between its bursts."""
    stop = threading.Event()

    def send(name: int, seed: float) -> None:
        randomness = random.Random(seed)
        with Producer(nameserver, settings=settings) as producer:
            number = 0
            while not stop.is_set():
                delay = randomness.choice([None, randomness.uniform(0, delay_s_max)])
                # Delayed messages come in the order of their due times: only others have a key.
                key = None if delay is not None else f"sender-{name}"
                # Alone, or many in flight at once: a kill then hits batches in every state.
                count = randomness.choice([1, 1, burst])
                ids = [f"{name}-{number + offset}" for offset in range(count)]
                history.send_burst(producer, topic, ids, delay=delay, ordering_key=key)
                number += count
                stop.wait(pause_s)

    threads = [threading.Thread(target=send, args=each) for each in enumerate(seeds)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
