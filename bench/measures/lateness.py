"""`duemq bench lateness`: how late messages are at a steady rate of fires.

p50_ms, p99_ms, max_ms: when the broker took the fired message in, against its due time.
consumer_…: at the callback.  `where_p50_ms` tells where the time goes, from the due time until the
`broker` took it in (tick, stream), it was `durable` (the broker's sync and answer, of the timer
service's last minute), and the `callback` began (pull, worker).
"""

from __future__ import annotations

import time

from duemq import Admin, Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import bodies
from duemq_server.bench.measures.timers import TimedReceiver

DELAY_S = 3.0
FLOOR_S = 3.0


def run(target: Target, report: Report, *, rate: int, seconds: float, size: int) -> None:
    """Sends at `rate`, each due DELAY_S later, while a consumer receives."""
    topic = target.new_topic("lateness")
    count = int(rate * seconds)
    with TimedReceiver(target.nameserver, topic, count) as receiver:
        cpu = CpuMeter(target.cluster)
        with Producer(target.nameserver) as producer:
            for _, body in zip(paced(rate, count), bodies(count, size), strict=True):
                producer.submit(
                    topic, body, deliver_at=time.time_ns() // 1_000_000 + int(DELAY_S * 1000)
                )
        receiver.wait()
        report.figures |= cpu.figures(count)
        with Admin(target.nameserver) as admin:
            durable_ms = [shard.lateness_p50_ms for shard in admin.timer_stats()]
    report.figures["msgs_per_s"] = rate
    report.figures |= summary(receiver.stored_late_ms)
    report.figures |= {
        f"consumer_{name}": value for name, value in summary(receiver.received_late_ms).items()
    }
    report.figures["where_p50_ms"] = {
        "broker": report.figures["p50_ms"],
        "durable": max(durable_ms, default=0.0),
        "callback": report.figures["consumer_p50_ms"],
    }
    floor = floors.timed_writes(target.directory, size, rate, min(seconds, FLOOR_S))
    report.figures |= {f"floor_{name}": value for name, value in floor.latency.items()}
    report.figures["early"] = receiver.early
    report.figures |= receiver.figures()
