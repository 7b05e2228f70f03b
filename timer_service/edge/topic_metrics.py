"""Prometheus metrics of a timer shard, by topic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from duemq_server.timer_service.scheduling.topic_lateness import BUCKETS_MS, OTHERS, SHOWN_MAX

if TYPE_CHECKING:
    from duemq_server.timer_service.shard import Shard


class TopicCollector(Collector):
    """Reads a shard when Prometheus asks: the first `SHOWN_MAX` topics, and the rest together."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def collect(self) -> Iterator[Metric]:
        """The figures as of now."""
        pending = GaugeMetricFamily(
            "duemq_timer_topic_pending", "Delayed messages not yet due", labels=("topic",)
        )
        fired = CounterMetricFamily(
            "duemq_timer_topic_fired",
            "Delayed messages on their way or delivered",
            labels=("topic",),
        )
        topics = [(name, each.pending, each.fired) for name, each in self._shard.scheduler.topics]
        named = [each for each in topics if each[0] != OTHERS]
        rest = [*named[SHOWN_MAX:], *(each for each in topics if each[0] == OTHERS)]
        shown = named[:SHOWN_MAX]
        if rest:
            shown.append((OTHERS, sum(each[1] for each in rest), sum(each[2] for each in rest)))
        for name, waiting, gone in shown:
            pending.add_metric((name,), waiting)
            fired.add_metric((name,), gone)
        yield pending
        yield fired
        yield self._lateness()

    def _lateness(self) -> Metric:
        lateness = self._shard.topic_lateness
        family = HistogramMetricFamily(
            "duemq_timer_topic_lateness_ms",
            "From the due time to the broker's answer that the message is durable",
            labels=("topic",),
        )
        bounds = [*map(str, BUCKETS_MS), "+Inf"]
        for topic in lateness.topics():
            buckets = list(zip(bounds, map(float, lateness.buckets(topic)), strict=True))
            family.add_metric((topic,), buckets, sum_value=float(lateness.sum_ms(topic)))
        return family
