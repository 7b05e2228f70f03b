"""`duemq bench latency`: one durable send at a time."""

from __future__ import annotations

import time

from duemq import Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver, bodies

# The first sends connect and warm up; they are sent and counted, and not measured.
WARM_UP = 200


def run(target: Target, report: Report, *, count: int, size: int) -> None:
    """Measures each call of `send`."""
    topic = target.new_topic("latency", queues=1)
    latencies = []
    cpu = CpuMeter(target.cluster)
    with Producer(target.nameserver) as producer:
        for number, body in enumerate(bodies(WARM_UP + count, size)):
            if number == WARM_UP:
                cpu = CpuMeter(target.cluster)
            begin = time.perf_counter()
            producer.send(topic, body)
            if number >= WARM_UP:
                latencies.append((time.perf_counter() - begin) * 1000)
        report.figures |= cpu.figures(count)
    report.figures["msgs_per_s"] = round(count * 1000 / sum(latencies))
    report.figures |= summary(latencies)
    floor = floors.durable_writes(target.directory, size, 1, count)
    report.floor(floor.msgs_per_s)
    report.figures["floor_p50_ms"] = floor.latency["p50_ms"]
    report.figures["floor_p99_ms"] = floor.latency["p99_ms"]
    with Receiver(target.nameserver, topic, WARM_UP + count) as receiver:
        receiver.wait()
    report.figures |= receiver.figures()
