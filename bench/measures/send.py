"""`duemq bench send`: durable sends of one producer, by lists or one call a message."""

from __future__ import annotations

import time
from collections import deque

from duemq import PendingReceipt, Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies, fill

# Receipts asked for this much behind the send: the producer is never kept waiting.
RECEIPTS_BEHIND = 20_000


def run(target: Target, report: Report, *, call: str, count: int, size: int) -> None:
    """Sends, then receives all of it for the count."""
    topic = target.new_topic("send")
    cpu = CpuMeter(target.cluster)
    if call == "list":
        seconds = fill(target.nameserver, topic, count, size)
    else:
        seconds = _send_each(target.nameserver, topic, count, size)
    report.figures["msgs_per_s"] = round(count / seconds)
    report.figures |= cpu.figures(count)
    floor = floors.durable_writes(target.directory, size, floors.FRAME_BYTES // size or 1, count)
    report.floor(floor.msgs_per_s)
    with Receiver(target.nameserver, topic, count) as receiver:
        receiver.wait()
    report.figures |= receiver.figures()


def _send_each(nameserver: str, topic: str, count: int, size: int) -> float:
    pending: deque[PendingReceipt] = deque()
    with Producer(nameserver) as producer:
        submit = producer.submit
        began = time.perf_counter()
        for body in bodies(count, size):
            pending.append(submit(topic, body))
            if len(pending) > RECEIPTS_BEHIND:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        return time.perf_counter() - began
