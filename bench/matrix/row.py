"""One row of `duemq bench timers-matrix`: a timer service with so many timers pending.

Needs a cluster of its own.  `accepted_per_s`: far timers, from the first send until the timer
service has the last.  `fired_per_s`: `fires` more, all due at one moment, from then to the last
store time.  `p50_ms` …: lateness at the broker of a trickle of another topic during both.
`rss_mb`: the timer service at rest before the burst, `rss_peak_mb` the most until the kill.  After
kill -9, from the start of the process: `restart_accepts_s` until a send under a timer key was
acknowledged, `restart_fires_s` until what fell due meanwhile was stored.  `index_bytes_per_timer`:
of period files, without bodies; none while all is in memory and log.
"""

from __future__ import annotations

import time
from pathlib import Path

import tenacity

from duemq import Admin, Producer
from duemq.errors import Timeout
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.processes import rss_mb, rss_peak_mb
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target
from duemq_server.bench.matrix.segments import index_size
from duemq_server.bench.matrix.trickle import Trickle
from duemq_server.bench.measures.pending import PROBE_DELAY_S, TIMER, far, rested_rss_mb
from duemq_server.bench.measures.timers import TimedReceiver, phase
from duemq_server.local_cluster import EmbeddedCluster

POLL_S = 0.1
INGEST_TIMEOUT_S = 300.0
# The slowest that is still waited for beyond that.
INGESTED_PER_S_LEAST = 2_000
RESTART_TIMEOUT_S = 120.0


def run(
    target: Target, report: Report, *, pending: int, fires: int, rate: int, size: int, days: float
) -> None:
    """Fills the timer service, fires a burst, weighs, kills, and counts what is left."""
    cluster = target.cluster
    assert cluster is not None
    topic = target.new_topic("far")
    figures = report.figures
    trickle = Trickle(target.nameserver, target.new_topic("trickle", queues=1), rate)
    with Admin(target.nameserver) as admin:
        with trickle:
            figures["accepted_per_s"] = round(
                pending / _fill(target, admin, topic, pending, size, days)
            )
            figures["rss_mb"] = rested_rss_mb(cluster.processes[TIMER])
            burst = phase(target, fires, size, 0.0).receiver
        fired_s = (max(burst.stored_late_ms) + 1) / 1000
        figures["fired_per_s"] = round(len(burst.store_ms) / fired_s)
        figures["rss_peak_mb"] = rss_peak_mb(cluster.processes[TIMER])
        figures["index_bytes_per_timer"] = index_size(Path(cluster.data_dir(TIMER))).bytes_per_timer
        figures |= trickle.figures()
        figures |= _restart(cluster, target)
        figures["rss_restarted_mb"] = rss_mb(cluster.processes[TIMER])
        (count,) = admin.count_timers(topic)
    figures["lost"] += pending - count.pending + burst.figures()["lost"]
    figures["twice"] += burst.figures()["twice"]
    figures["early"] += burst.early + count.fired


def _fill(target: Target, admin: Admin, topic: str, count: int, size: int, days: float) -> float:
    """Seconds until the timer service has them.  Raises Timeout."""
    began = time.perf_counter()
    with Producer(target.nameserver) as producer:
        producer.send_many(topic, far(count, size, days))
    limit_s = INGEST_TIMEOUT_S + count / INGESTED_PER_S_LEAST
    retry = tenacity.Retrying(
        stop=tenacity.stop_after_delay(limit_s),
        wait=tenacity.wait_fixed(POLL_S),
        retry=tenacity.retry_if_result(lambda there: there < count),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else 0,
    )
    there = retry(lambda: sum(each.pending for each in admin.count_timers(topic)))
    if there < count:
        raise Timeout(
            f"the timer service holds {there:,} of {count:,} after {limit_s:g} s", limit=limit_s
        )
    return time.perf_counter() - began


def _restart(cluster: EmbeddedCluster, target: Target) -> dict[str, float]:
    """kill -9, and start when the probe is due: from then on all that passes is the restart's."""
    probe, keyed = target.new_topic("probe", queues=1), target.new_topic("keyed", queues=1)
    with TimedReceiver(target.nameserver, probe, 1) as receiver:
        with Producer(target.nameserver) as producer:
            receipt = producer.send(probe, bytes(8), delay=PROBE_DELAY_S)
        time.sleep(PROBE_DELAY_S / 3)
        cluster.kill(TIMER, restart=False)
        time.sleep(max(0.0, (receipt.due_ms or 0) / 1000 - time.time()))
        started_ms, began = time.time() * 1000, time.perf_counter()
        cluster.start_member(TIMER)
        settings = ProducerSettings(send_timeout_s=RESTART_TIMEOUT_S)
        with Producer(target.nameserver, settings=settings) as producer:
            producer.send(keyed, b"first", timer_key="first", delay="1d")
        accepts_s = time.perf_counter() - began
        receiver.wait()
    return {
        "restart_accepts_s": round(accepts_s, 3),
        "restart_fires_s": round((receiver.store_ms[0] - started_ms) / 1000, 3),
    }
