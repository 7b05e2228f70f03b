"""A steady stream of numbered messages through a topic: when each was answered, and came."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import tenacity

from duemq import Message, PendingReceipt, Producer, PushConsumer
from duemq.errors import DuemqError, Timeout
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.arrivals import number_of
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.target import group_of
from duemq_server.bench.harness.traffic import STALL_S, bodies

COUNT_MAX = 10_000_000
POLL_S = 0.01
# More than any outage that is measured.
SEND_TIMEOUT_S = 120.0


class Steady:
    """Sends at a rate until it is closed, while a consumer receives; a context manager."""

    def __init__(self, nameserver: str, topic: str, rate: int, size: int) -> None:
        self.sent = 0
        self.failed: set[int] = set()
        """Not acknowledged: nobody promised anything."""
        self.answered = 0
        self.answered_ns: list[int] = []
        self.received_ns: list[int] = []
        self.seen: Counter[int] = Counter()
        self._rate = rate
        self._size = size
        self._topic = topic
        self._nameserver = nameserver
        self._end = threading.Event()
        # Bounded by the producer's buffer: `submit` waits for room.
        self._pending: SimpleQueue[PendingReceipt | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._send, name="steady-send"),
            threading.Thread(target=self._note_answers, name="steady-answers"),
        ]
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
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._consumer.close()

    def flowing(self, timeout_s: float) -> None:
        """Returns when something sent from now on was answered and has come.  Raises Timeout."""
        number = self.sent
        self._wait(lambda: self.answered > number and self.seen[number] > 0, timeout_s)

    def end(self) -> None:
        """Sends no more, and returns when all is answered."""
        self._end.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def drain(self) -> None:
        """After `end`: until all that was acknowledged has come, or nothing comes any more."""
        total = -1
        while total < (total := self.seen.total()) and self.missing(range(self.sent)):
            try:
                self._wait(lambda: not self.missing(range(self.sent)), STALL_S)
            except Timeout:
                continue

    def missing(self, numbers: range) -> list[int]:
        """What was acknowledged and has not come."""
        return [each for each in numbers if not self.seen[each] and each not in self.failed]

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        retry = tenacity.Retrying(
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_fixed(POLL_S),
            retry=tenacity.retry_if_result(lambda fulfilled: not fulfilled),
            retry_error_callback=lambda state: False,
        )
        if not retry(condition):
            raise Timeout(f"messages do not flow: none within {timeout_s:g} s")

    def _send(self) -> None:
        settings = ProducerSettings(send_timeout_s=SEND_TIMEOUT_S, close_timeout_s=SEND_TIMEOUT_S)
        with Producer(self._nameserver, settings=settings) as producer:
            numbered = zip(paced(self._rate, COUNT_MAX), bodies(COUNT_MAX, self._size), strict=True)
            for number, body in numbered:
                if self._end.is_set():
                    break
                self._pending.put(producer.submit(self._topic, body))
                self.sent = number + 1
            producer.flush()
        self._pending.put(None)

    def _note_answers(self) -> None:
        while (receipt := self._pending.get()) is not None:
            try:
                receipt.result()
                self.answered_ns.append(time.perf_counter_ns())
            except DuemqError:
                self.failed.add(self.answered)
            self.answered += 1

    def _receive(self, messages: Sequence[Message]) -> None:
        self.received_ns.append(time.perf_counter_ns())
        self.seen.update([number_of(message.body) for message in messages])
