"""`duemq bench consume`: draining a backlog."""

from __future__ import annotations

import time

from duemq_server.bench.harness import floors
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, fill


def run(target: Target, report: Report, *, callback: str, count: int, size: int) -> None:
    """Fills a topic, then measures from the consumer's start to the last message."""
    topic = target.new_topic("consume")
    fill(target.nameserver, topic, count, size)
    receiver = Receiver(target.nameserver, topic, count, each=callback == "each")
    cpu = CpuMeter(target.cluster)
    began = time.perf_counter()
    with receiver:
        receiver.wait()
        seconds = receiver.last_arrival - began
        report.figures["msgs_per_s"] = round(count / seconds)
        report.figures |= cpu.figures(count)
    report.floor(floors.decoded_reads(target.directory, size, count).msgs_per_s)
    report.figures |= receiver.figures()
