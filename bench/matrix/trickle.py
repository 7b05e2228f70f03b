"""A trickle of timers of another topic, while the timer service is busy: how late they are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import tenacity

from duemq import Message, Producer, PushConsumer
from duemq_server.bench.harness.arrivals import NUMBER_BYTES, number_of
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.target import group_of
from duemq_server.bench.harness.traffic import STALL_S, bodies

DELAY_MS = 1_000
# More than a day of them at any rate that is a trickle.
COUNT_MAX = 10_000_000
POLL_S = 0.05


class Trickle:
    """Sends `rate` a second, each due a second later, until it is left; a context manager."""

    def __init__(self, nameserver: str, topic: str, rate: float) -> None:
        self._topic = topic
        self._rate = rate
        self._nameserver = nameserver
        self._sent = 0
        self._early = 0
        self._seen: Counter[int] = Counter()
        self._late: list[tuple[int, int]] = []  # due time, and by how much
        self._failure: Exception | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trickle")
        self._consumer: PushConsumer = PushConsumer(
            group_of(topic),
            [topic],
            self._receive,
            nameserver=nameserver,
            batch=True,
            threads=1,
            start_from="earliest",
        )

    def __enter__(self) -> Self:
        self._consumer.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        if kind is None and self._failure is None:
            self._drain()
        self._consumer.close()
        if kind is None and self._failure is not None:
            raise self._failure

    def figures(self, since_ms: int = 0) -> dict[str, Any]:
        """Lateness of the broker's store time against the due time, and what was wrong.

        Of one that was left.  `since_ms`: of those that were due then or later.
        """
        return {
            **summary([late_ms for due_ms, late_ms in self._late if due_ms >= since_ms]),
            "trickled": self._sent,
            "lost": self._sent - len(self._seen),
            "twice": self._seen.total() - len(self._seen),
            "early": self._early,
        }

    def _run(self) -> None:
        try:
            with Producer(self._nameserver) as producer:
                numbered = zip(
                    paced(self._rate, COUNT_MAX), bodies(COUNT_MAX, NUMBER_BYTES), strict=True
                )
                for _, body in numbered:
                    if self._end.is_set():
                        break
                    due_ms = time.time_ns() // 1_000_000 + DELAY_MS
                    producer.submit(self._topic, body, deliver_at=due_ms)
                    self._sent += 1
                producer.flush()
        except Exception as error:  # told by the main thread
            self._failure = error

    def _drain(self) -> None:
        """Until all have come, or for as long as `figures` calls the rest lost."""
        tenacity.Retrying(
            stop=tenacity.stop_after_delay(STALL_S),
            wait=tenacity.wait_fixed(POLL_S),
            retry=tenacity.retry_if_result(lambda missing: missing > 0),
            retry_error_callback=lambda state: None,
        )(lambda: self._sent - len(self._seen))

    def _receive(self, messages: Sequence[Message]) -> None:
        for message in messages:
            due_ms = message.due_ms or 0
            late_ms = message.store_ms - due_ms
            self._early += late_ms < 0
            self._late.append((due_ms, late_ms))
            self._seen[number_of(message.body)] += 1
