"""`duemq bench lateness`: how late messages are at a steady rate of fires.

p50_ms, p99_ms, max_ms: when the broker took the fired message in, against its due time.
consumer_…: at the callback.  `where_p50_ms` tells where the time goes, from the due time until the
`broker` took it in (tick, stream), it was `durable` (the broker's sync and answer, of the timer
service's last minute), and the `callback` began (pull, worker).

With `others` so many messages a second of other topics come all the while, each due a second later.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from duemq import Admin, Producer
from duemq_server.bench.harness import floors
from duemq_server.bench.harness.pace import paced
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import bodies
from duemq_server.bench.matrix.trickle import Trickle
from duemq_server.bench.measures.timers import TimedReceiver

FLOOR_S = 3.0
OTHER_TOPICS = 4  # so that every queue of %TIMER% for what is due soon has some


def run(
    target: Target,
    report: Report,
    *,
    rate: int,
    seconds: float,
    size: int,
    delay_ms: int,
    others: int,
) -> None:
    """Sends at `rate`, each due `delay_ms` after that, while a consumer receives."""
    topic = target.new_topic("lateness")
    count = int(rate * seconds)
    with ExitStack() as around:
        for number in range(OTHER_TOPICS if others else 0):
            other = target.new_topic(f"others-{number}")
            around.enter_context(Trickle(target.nameserver, other, others / OTHER_TOPICS))
        receiver = around.enter_context(TimedReceiver(target.nameserver, topic, count))
        cpu = CpuMeter(target.cluster)
        with Producer(target.nameserver) as producer:
            for _, body in zip(paced(rate, count), bodies(count, size), strict=True):
                producer.submit(topic, body, deliver_at=time.time_ns() // 1_000_000 + delay_ms)
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
