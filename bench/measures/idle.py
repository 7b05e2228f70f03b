"""`duemq bench idle`: memory and CPU of each process when nothing happens.

Needs a cluster of its own.  A push consumer waits in long polls meanwhile, as in real life.
"""

from __future__ import annotations

import time

from duemq_server.bench.harness.processes import cpu_s, rss_mb
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import Receiver

SETTLE_S = 5.0


def run(target: Target, report: Report, *, seconds: float) -> None:
    """Measures all members over `seconds`; the figures are those of the largest."""
    cluster = target.cluster
    assert cluster is not None
    topic = target.new_topic("idle")
    with Receiver(target.nameserver, topic, 1):
        time.sleep(SETTLE_S)
        processes = cluster.processes
        before = {name: cpu_s(pid) for name, pid in processes.items()}
        time.sleep(seconds)
        cpu = {
            name: round((cpu_s(pid) - before[name]) * 100 / seconds, 2)
            for name, pid in processes.items()
        }
        rss = {name: rss_mb(pid) for name, pid in processes.items()}
    report.figures |= {"rss_mb": max(rss.values()), "cpu_percent": max(cpu.values())}
    report.figures |= {"rss_mb_by_process": rss, "cpu_percent_by_process": cpu}
