"""`duemq bench pending`: memory and restart of a timer service that holds a large backlog.

Needs a cluster of its own.  `rss_full_mb` is the timer service's memory when it has just taken the
last one, `rss_mb` when it is at rest, `rss_restarted_mb` after the restart; `restart_s` is from its
start after kill -9 to the first fire.  `inside_cpu_ms`: CPU of the timer service for one look
inside: a count, the first histogram, each further one, a page of 500 timers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import tenacity

from duemq import Admin, Outgoing, Producer
from duemq.errors import Timeout
from duemq_server.bench.harness.processes import cpu_s, rss_mb
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.traffic import bodies
from duemq_server.bench.measures.timers import TimedReceiver
from duemq_server.local_cluster import EmbeddedCluster

DAY_MS = 86_400_000
INGEST_TIMEOUT_S = 300.0
POLL_S = 0.2
# Without a change of its memory the timer service is at rest.
REST_S = 3.0
# The probe falls due while the timer service is down: its fire is the first after the restart.
PROBE_DELAY_S = 3.0
TIMER = "timer-0"
LOOKS = 20  # of a kind; CPU time comes in steps of 10 ms
PAGE = 500


def run(target: Target, report: Report, *, count: int, size: int, days: int) -> None:
    """Fills the timer service, kills it, measures its first fire."""
    cluster = target.cluster
    assert cluster is not None
    topic = target.new_topic("pending")
    began = time.perf_counter()
    with Producer(target.nameserver) as producer:
        producer.send_many(topic, far(count, size, days))
    report.figures["accepted_per_s"] = round(count / (time.perf_counter() - began))
    with Admin(target.nameserver) as admin:
        wait_pending(admin, count)
        report.figures["rss_full_mb"] = rss_mb(cluster.processes[TIMER])
        report.figures["rss_mb"] = rested_rss_mb(cluster.processes[TIMER])
        report.figures["inside_cpu_ms"] = _inside_cpu_ms(admin, topic, cluster.processes[TIMER])
        probe = target.new_topic("probe", queues=1)
        report.figures["restart_s"] = _first_fire_s(cluster, target.nameserver, probe)
        report.figures["rss_restarted_mb"] = rss_mb(cluster.processes[TIMER])
        stats = admin.timer_stats()
        report.figures["lost"] = count - sum(shard.pending for shard in stats)
        report.figures["early"] = sum(shard.fired for shard in stats) - 1


def _inside_cpu_ms(admin: Admin, topic: str, pid: int) -> dict[str, float]:
    def page() -> object:
        return sum(1 for _ in admin.list_timers(topic, limit=PAGE))

    looks = {
        "count": (admin.count_timers, LOOKS),
        "first_histogram": (admin.timer_histogram, 1),
        "histogram": (admin.timer_histogram, LOOKS),
        "page": (page, LOOKS),
    }
    found = {}
    for name, (look, times) in looks.items():
        before = cpu_s(pid)
        for _ in range(times):
            look()
        found[name] = round((cpu_s(pid) - before) * 1000 / times, 2)
    return found


def rested_rss_mb(pid: int) -> float:
    """Once it has given back what it needed for the work."""
    least, since = rss_mb(pid), time.monotonic()
    while time.monotonic() < since + REST_S:
        time.sleep(POLL_S)
        if (now := rss_mb(pid)) < least:
            least, since = now, time.monotonic()
    return least


def far(count: int, size: int, days: float) -> Iterator[Outgoing]:
    """Due from a tenth of a day from now on, evenly."""
    begin_ms = time.time_ns() // 1_000_000 + DAY_MS // 10
    step_ms = (days * DAY_MS - DAY_MS // 10) / count
    for number, body in enumerate(bodies(count, size)):
        yield Outgoing(body, deliver_at=begin_ms + int(number * step_ms))


def wait_pending(admin: Admin, count: int) -> int:
    """Until the timer service holds so many; how many it does.  Raises Timeout."""
    retry = tenacity.Retrying(
        stop=tenacity.stop_after_delay(INGEST_TIMEOUT_S),
        wait=tenacity.wait_fixed(POLL_S),
        retry=tenacity.retry_if_result(lambda pending: pending < count),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else 0,
    )
    pending = retry(lambda: sum(shard.pending for shard in admin.timer_stats()))
    if pending < count:
        raise Timeout(
            f"the timer service holds {pending:,} of {count:,} after {INGEST_TIMEOUT_S:g} s",
            limit=INGEST_TIMEOUT_S,
        )
    return pending


def _first_fire_s(cluster: EmbeddedCluster, nameserver: str, topic: str) -> float:
    with TimedReceiver(nameserver, topic, 1) as receiver:
        with Producer(nameserver) as producer:
            receipt = producer.send(topic, bytes(8), delay=PROBE_DELAY_S)
        time.sleep(PROBE_DELAY_S / 3)
        cluster.kill(TIMER, restart=False)
        time.sleep(max(0.0, (receipt.due_ms or 0) / 1000 - time.time()))
        started_ms = time.time() * 1000
        cluster.start_member(TIMER)
        receiver.wait()
        return round((receiver.store_ms[0] - started_ms) / 1000, 3)
