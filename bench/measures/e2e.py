"""`duemq bench e2e`: from `submit` to the push consumer's callback, at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Sequence

from duemq import Message, Producer
from duemq_server.bench.harness.arrivals import number_of
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies

# Joining the group, connecting and warming up; sent and counted, and not measured.
WARM_UP_S = 2.0


class _Timed(Receiver):
    """Notes when each message came."""

    def __init__(self, nameserver: str, topic: str, count: int) -> None:
        super().__init__(nameserver, topic, count)
        self.received_ns = [0] * count

    def observe(self, messages: Sequence[Message]) -> None:
        """Takes the time."""
        now_ns = time.perf_counter_ns()
        for message in messages:
            number = number_of(message.body)
            if number < len(self.received_ns):
                self.received_ns[number] = now_ns


def run(target: Target, report: Report, *, rate: int, seconds: float, size: int) -> None:
    """Sends at `rate` for `seconds` while a consumer receives."""
    topic = target.new_topic("e2e")
    warm_up = int(rate * WARM_UP_S)
    count = warm_up + int(rate * seconds)
    sent_ns = [0] * count
    with (
        _Timed(target.nameserver, topic, count) as receiver,
        Producer(target.nameserver) as producer,
    ):
        cpu = CpuMeter(target.cluster)
        began = time.perf_counter()
        for number, body in zip(paced(rate, count), bodies(count, size), strict=True):
            sent_ns[number] = time.perf_counter_ns()
            producer.submit(topic, body)
        took = time.perf_counter() - began
        producer.flush()
        receiver.wait()
        report.figures |= cpu.figures(count)
    pairs = zip(sent_ns[warm_up:], receiver.received_ns[warm_up:], strict=True)
    report.figures["msgs_per_s"] = round(count / took)
    report.figures |= summary([(received - sent) / 1e6 for sent, received in pairs])
    report.figures |= receiver.figures()
