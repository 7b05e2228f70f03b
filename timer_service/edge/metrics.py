"""Prometheus metrics of a timer shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from duemq_server.timer_service.scheduling.holding import changes as holding
from duemq_server.timer_service.scheduling.topic_lateness import BUCKETS_MS, TopicLateness

if TYPE_CHECKING:
    from duemq_server.storage.writer import Commit
    from duemq_server.timer_service.edge.broker_links import BrokerLinks
    from duemq_server.timer_service.shard import Shard

SYNC_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)


class ShardCollector(Collector):
    """Reads a shard when Prometheus asks."""

    def __init__(self, shard: Shard, lag: Callable[[], int]) -> None:
        self._shard = shard
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        """The figures as of now."""
        scheduler = self._shard.scheduler
        ledger = scheduler.ledger
        for name, text, value in (
            ("accepted", "Delayed messages taken over from brokers", ledger.accepted),
            ("fired", "Delayed messages on their way or delivered", ledger.fired),
            ("cancelled", "Delayed messages cancelled", ledger.cancelled),
            ("replaced", "Delayed messages replaced or rescheduled", ledger.replaced),
            ("dropped", "Delayed messages held, and left out when resumed", ledger.dropped),
            ("lost", "Delayed messages damaged on the disk and set aside", ledger.lost),
            (
                "early",
                "Fires stored before their due time; must stay 0",
                self._shard.lateness.early,
            ),
            (
                "past_due",
                "Fires that were due when they were accepted; not part of the lateness",
                self._shard.lateness.past_due,
            ),
        ):
            yield CounterMetricFamily(f"duemq_timer_{name}", text, value=value)
        log = self._shard.directory.log
        for name, text, value in (
            ("pending", "Delayed messages not yet due", ledger.pending),
            ("in_flight", "Fired and not yet answered by a broker", ledger.in_flight),
            ("overdue", "Due and not yet on their way, wherever they lie", self._shard.overdue()),
            ("held", "Fell due and kept back by a hold", holding.waiting(scheduler).total()),
            ("refused_lanes", "Queues whose broker refuses fires", self._refused_lanes()),
            ("near", "Delayed messages in memory", scheduler.near.pending),
            ("near_bytes", "Bodies in memory", scheduler.near.bytes),
            ("far_blocks", "Blocks of far timers on disk", len(scheduler.segments.blocks())),
            ("far_files", "Files of far timers", len(scheduler.segments.lengths)),
            ("log_bytes", "Timer log kept on disk", log.end_position - log.start_position),
            ("ingest_lag", "Delayed messages at brokers, not yet fetched", self._lag()),
        ):
            yield GaugeMetricFamily(f"duemq_timer_{name}", text, value=value)
        yield lateness_of(self._shard.topic_lateness)

    def _refused_lanes(self) -> int:
        return sum(1 for lane in self._shard.scheduler.dispatcher.lanes() if lane.failures)


def lateness_of(lateness: TopicLateness) -> Metric:
    """Of all topics together."""
    bounds = [*map(str, BUCKETS_MS), "+Inf"]
    return HistogramMetricFamily(
        "duemq_timer_lateness_ms",
        "From the due time to the broker's answer that the message is durable",
        buckets=list(zip(bounds, map(float, lateness.total_buckets()), strict=True)),
        sum_value=float(lateness.total_sum_ms()),
    )


class LinksCollector(Collector):
    """Reads what a shard knows of brokers when Prometheus asks."""

    def __init__(self, links: BrokerLinks) -> None:
        self._links = links

    def collect(self) -> Iterator[Metric]:
        """The figures as of now."""
        yield GaugeMetricFamily(
            "duemq_timer_refused_by_brokers",
            "Brokers where another timer service has queues of this shard; must be 0",
            value=len(self._links.refusals),
        )
        yield GaugeMetricFamily(
            "duemq_timer_queues_waiting",
            "Queues of this shard that another one has not handed over; 0 but while their number"
            " changes",
            value=self._links.waiting,
        )
        clocks = GaugeMetricFamily(
            "duemq_timer_clock_ahead_seconds",
            "How far this machine's clock is ahead of a broker's",
            labels=("broker",),
        )
        for broker, ahead_ms in self._links.clocks().items():
            clocks.add_metric((broker,), ahead_ms / 1000)
        yield clocks


class Meters:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sync = Histogram(
            "duemq_timer_sync_seconds",
            "Duration of fdatasync of the timer log",
            buckets=SYNC_BUCKETS_S,
            registry=registry,
        )

    def committed(self, commit: Commit) -> None:
        """A group commit of the timer log."""
        self._sync.observe(commit.sync_seconds)
