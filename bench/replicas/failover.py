"""`duemq bench failover`: how long sends and deliveries stand still when a leader dies.

Needs a cluster of its own, whose brokers have replicas.  While messages are sent at a steady rate,
and consumed, the replica that leads is stopped by SIGTERM, by kill -9, and by SIGSTOP, and comes
back when another one leads, `times` each; the next one dies when all replicas are in sync again.
Where too few are left to accept anything (`min_insync`), the dead one comes back at once, and the
stopped one after PAUSE_S.

send_gap_ms_…: the longest time without an acknowledgement around each death, of all deaths p50 and
the longest; delivery_gap_ms_max: without a delivery.  floor_…: the same while nobody died.  lost:
acknowledged and never delivered; twice: stored more than once; repeated: delivered once more.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import tenacity

from duemq.errors import InvalidArgument, Timeout
from duemq_server.bench.harness.arrivals import number_of
from duemq_server.bench.harness.gaps import longest_gap_ms
from duemq_server.bench.harness.percentiles import percentile
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.steady import Steady
from duemq_server.bench.harness.target import Target
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster

GROUP = "broker-0"
# Undisturbed, before each death.
CALM_S = 1.0
# For another one to lead, at most; then the one that died comes back all the same.
SUCCESSOR_S = 15.0
# Of a stop, where those who are left must wait for the one that is stopped.
PAUSE_S = 7.0
FLOW_S = 60.0
WHOLE_S = 120.0
POLL_S = 0.02


@dataclass
class Deaths:
    """What one way of dying did, each time."""

    numbers: range = range(0)
    """Of the messages sent meanwhile."""
    send_gaps_ms: list[float] = field(default_factory=list)
    delivery_gaps_ms: list[float] = field(default_factory=list)
    calm_send_gaps_ms: list[float] = field(default_factory=list)
    calm_delivery_gaps_ms: list[float] = field(default_factory=list)


class _Dying:
    """Has a member die and come back."""

    def __init__(self, cluster: EmbeddedCluster, min_insync: int) -> None:
        replicas = len(cluster.replicas(GROUP))
        self._cluster = cluster
        self._enough_left = replicas > (min_insync or replicas // 2 + 1)
        self.ways: dict[str, Callable[[str], None]] = {
            "sigterm": self._terminate,
            "sigkill": self._kill,
            "sigstop": self._suspend,
        }

    def _terminate(self, name: str) -> None:
        self._cluster.stop_member(name)
        self._succeeded(name)
        self._cluster.start_member(name)

    def _kill(self, name: str) -> None:
        self._cluster.kill(name, restart=False)
        self._succeeded(name)
        self._cluster.start_member(name)

    def _suspend(self, name: str) -> None:
        pid = self._cluster.processes[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            self._succeeded(name)
            if not self._enough_left:
                time.sleep(PAUSE_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    def _succeeded(self, name: str) -> None:
        """Returns when another one leads, if one can."""
        if not self._enough_left:
            return
        tenacity.Retrying(
            stop=tenacity.stop_after_delay(SUCCESSOR_S),
            wait=tenacity.wait_fixed(POLL_S),
            retry=tenacity.retry_if_result(lambda leader: leader in ("", name)),
            retry_error_callback=lambda state: None,
        )(self._cluster.leader, GROUP)


def run(
    target: Target, report: Report, *, rate: int, times: int, size: int, min_insync: int
) -> None:
    """Has leaders die while messages flow.  `min_insync`: what the brokers were told."""
    cluster = target.cluster
    assert cluster is not None
    if len(cluster.replicas(GROUP)) < 2:
        raise InvalidArgument("replicas must be at least 2", field="replicas", limit=2)
    topic = target.new_topic("failover")
    ways = _Dying(cluster, min_insync).ways
    with Steady(target.nameserver, topic, rate, size) as stream:
        stream.flowing(FLOW_S)
        found = {name: _measure(cluster, stream, die, times) for name, die in ways.items()}
        stream.end()
        stream.drain()
        stored = Counter(number_of(one.body) for one in read_topic(target.nameserver, topic))
    for name, deaths in found.items():
        report.figures[name] = _figures(deaths, stream, stored)
    report.figures |= _figures(_together(list(found.values())), stream, stored)


def _measure(
    cluster: EmbeddedCluster, stream: Steady, die: Callable[[str], None], times: int
) -> Deaths:
    deaths = Deaths()
    first = stream.sent
    for _ in range(times):
        calm_ns = time.perf_counter_ns()
        time.sleep(CALM_S)
        leader = cluster.leader(GROUP)
        if not leader:
            raise Timeout(f"nobody leads {GROUP} although all replicas are in sync")
        began_ns = time.perf_counter_ns()
        die(leader)
        stream.flowing(FLOW_S)
        cluster.wait_ready(WHOLE_S)
        stream.flowing(FLOW_S)
        ended_ns = time.perf_counter_ns()
        sends, deliveries = stream.answered_ns, stream.received_ns
        deaths.calm_send_gaps_ms.append(longest_gap_ms(sends, calm_ns, began_ns))
        deaths.calm_delivery_gaps_ms.append(longest_gap_ms(deliveries, calm_ns, began_ns))
        deaths.send_gaps_ms.append(longest_gap_ms(sends, began_ns, ended_ns))
        deaths.delivery_gaps_ms.append(longest_gap_ms(deliveries, began_ns, ended_ns))
    deaths.numbers = range(first, stream.sent)
    return deaths


def _together(found: list[Deaths]) -> Deaths:
    return Deaths(
        range(found[-1].numbers.stop),
        [gap for each in found for gap in each.send_gaps_ms],
        [gap for each in found for gap in each.delivery_gaps_ms],
        [gap for each in found for gap in each.calm_send_gaps_ms],
        [gap for each in found for gap in each.calm_delivery_gaps_ms],
    )


def _figures(deaths: Deaths, stream: Steady, stored: Counter[int]) -> dict[str, float]:
    numbers = deaths.numbers
    return {
        "send_gap_ms_p50": round(percentile(sorted(deaths.send_gaps_ms), 0.5), 1),
        "send_gap_ms_max": round(max(deaths.send_gaps_ms), 1),
        "delivery_gap_ms_max": round(max(deaths.delivery_gaps_ms), 1),
        "floor_send_gap_ms_max": round(max(deaths.calm_send_gaps_ms), 1),
        "floor_delivery_gap_ms_max": round(max(deaths.calm_delivery_gaps_ms), 1),
        "sent": len(numbers),
        "failed": sum(number in stream.failed for number in numbers),
        "lost": len(stream.missing(numbers)),
        "twice": sum(stored[number] - 1 for number in numbers if stored[number] > 1),
        "repeated": sum(stream.seen[number] - 1 for number in numbers if stream.seen[number] > 1),
    }
