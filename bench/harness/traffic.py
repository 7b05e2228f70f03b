"""What several benchmarks do with a topic: fill it, and receive it all, counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from duemq import Message, Producer, PushConsumer
from duemq.errors import Timeout
from duemq.protocol import checks
from duemq_server.bench.harness.arrivals import NUMBER_BYTES, Arrivals, numbered
from duemq_server.bench.harness.target import group_of

# A run whose messages stop coming for this long has lost some.
STALL_S = 30.0


def bodies(count: int, size: int) -> Iterator[bytes]:
    """Numbered bodies of `size` bytes.  Their rest is random, so that nothing compresses it."""
    checks.at_least("size", size, NUMBER_BYTES)  # a message carries its number
    filler = os.urandom(size - NUMBER_BYTES)
    return (numbered(number, filler) for number in range(count))


def fill(nameserver: str, topic: str, count: int, size: int) -> float:
    """Sends numbered messages, durably; returns the seconds it took."""
    with Producer(nameserver) as producer:
        began = time.perf_counter()
        producer.send_many(topic, bodies(count, size))
        return time.perf_counter() - began


class Receiver:
    """A push consumer that counts a topic's messages from its beginning; a context manager.

    each: whether the callback gets one message or a list.
    """

    def __init__(self, nameserver: str, topic: str, count: int, *, each: bool = False) -> None:
        self.arrivals = Arrivals(count)
        self.last_arrival = time.perf_counter()
        self._complete = threading.Event()
        callback: Callable[[Any], None] = self._receive_one if each else self._receive
        self._consumer: PushConsumer = PushConsumer(
            group_of(topic),
            [topic],
            callback,
            nameserver=nameserver,
            batch=not each,
            # The count is one thread's; with more the interpreter would only switch among them.
            threads=1,
            start_from="earliest",
        )

    def __enter__(self) -> Self:
        self._consumer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._consumer.close()

    def wait(self) -> None:
        """Until as many came as were sent.  Raises Timeout when they stop coming."""
        while not self._complete.wait(STALL_S):
            if time.perf_counter() - self.last_arrival > STALL_S:
                raise Timeout(
                    f"{self.arrivals.lost:,} messages did not come; none came for {STALL_S:g} s"
                )

    def figures(self) -> dict[str, int]:
        """What was lost or came twice."""
        return {"lost": self.arrivals.lost, "twice": self.arrivals.twice}

    def observe(self, messages: Sequence[Message]) -> None:
        """For benchmarks that measure more."""

    def _receive(self, messages: Sequence[Message]) -> None:
        self.observe(messages)
        self.arrivals.add([message.body for message in messages])
        self._note()

    def _receive_one(self, message: Message) -> None:
        self.arrivals.add((message.body,))
        self._note()

    def _note(self) -> None:
        self.last_arrival = time.perf_counter()
        if self.arrivals.complete:
            self._complete.set()
