"""The benchmarks by name: what each is called with, and what it needs.

`duemq bench` offers them one by one, `make bench` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from duemq.protocol import checks
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import target
from duemq_server.bench.matrix import row
from duemq_server.bench.measures import (
    cancel,
    consume,
    e2e,
    filter,
    group,
    idle,
    latency,
    lateness,
    pending,
    rebalance,
    restart,
    send,
    timers,
    tracing,
)
from duemq_server.bench.replicas import catch_up, failover

Runner = Callable[..., None]
RUNNERS: dict[str, Runner] = {
    "send": send.run,
    "latency": latency.run,
    "consume": consume.run,
    "e2e": e2e.run,
    "filter": filter.run,
    "group": group.run,
    "rebalance": rebalance.run,
    "timers": timers.run,
    "lateness": lateness.run,
    "pending": pending.run,
    "timers-matrix": row.run,
    "cancel": cancel.run,
    "restart": restart.run,
    "idle": idle.run,
    "failover": failover.run,
    "catch-up": catch_up.run,
    "tracing": tracing.run,
}
# They kill or weigh processes, which a cluster of somebody else's does not allow.
OWN_CLUSTER_ONLY = frozenset(
    {"pending", "timers-matrix", "restart", "idle", "failover", "catch-up", "tracing"}
)
# Of a benchmark's own cluster, where it is not one.
BROKERS = {"group": 2, "rebalance": 2}
REPLICAS = {"failover": 2, "catch-up": 3}
# Parameters that are settings of the brokers.
BROKER_SETTINGS = ("min_insync", "catch_up_rate")


@dataclass(frozen=True)
class BenchPlace:
    """Where to run: the cluster at `nameserver`, or one of our own with its data in `directory`."""

    nameserver: str | None = None
    directory: str | None = None
    brokers: int = 1
    replicas: int = 1
    """Of each broker."""
    keep_topics: bool = False
    """Of a cluster that is not ours."""


def run(
    bench: str,
    parameters: dict[str, Any],
    place: BenchPlace,
    before: Callable[[Report], None] = lambda report: None,
    tell_left: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs one benchmark; `before` is shown the report when its parameters are known.

    `tell_left` is told what stays at a cluster that is not ours, and should not.
    """
    if place.nameserver is None:
        checks.at_most("min_insync", parameters.get("min_insync", 0), place.replicas)
    given = [name for name in BROKER_SETTINGS if name in parameters]
    flags = {"broker": [f"--{n.replace('_', '-')}={parameters[n]}" for n in given]}
    with target(
        place.nameserver,
        directory=place.directory,
        brokers=place.brokers,
        replicas=place.replicas,
        flags=flags,
        keep_topics=place.keep_topics,
        tell_left=tell_left,
    ) as measured:
        where: dict[str, Any] = {"nameserver": measured.nameserver}
        if measured.cluster is not None:
            where = {
                "brokers": place.brokers,
                "replicas": place.replicas,
                "directory": str(measured.directory),
            }
        flush = {} if measured.cluster is None else {"flush_mode": "sync"}
        report = Report(bench, {**parameters, **flush, **where})
        before(report)
        RUNNERS[bench](measured, report, **parameters)
    return report
