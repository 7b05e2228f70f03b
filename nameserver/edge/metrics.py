"""What a nameserver tells Prometheus of itself, read from the registry when it is asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from duemq_server.nameserver.edge.servicer import NameserverServicer
from duemq_server.nameserver.outside import unreachable
from duemq_server.nameserver.registry import Registry


class _Collector(Collector):
    def __init__(self, registry: Registry, servicer: NameserverServicer) -> None:
        self._registry = registry
        self._servicer = servicer

    def collect(self) -> Iterator[GaugeMetricFamily]:
        instances = GaugeMetricFamily(
            "duemq_nameserver_instances", "Live instances", labels=("kind",)
        )
        instances.add_metric(("broker",), len(self._registry.brokers))
        instances.add_metric(("timer",), len(self._registry.timers))
        yield instances
        lost = GaugeMetricFamily(
            "duemq_nameserver_lost", "Instances that vanished lately", labels=("kind",)
        )
        lost.add_metric(("broker",), sum(not one.forgotten for one in self._registry.lost_brokers))
        lost.add_metric(("timer",), sum(not one.forgotten for one in self._registry.lost_timers))
        yield lost
        if self._servicer.tells_outside:
            hidden = GaugeMetricFamily(
                "duemq_nameserver_without_external_address",
                "Live instances that have told none, so that clients outside take them for lost",
                labels=("kind",),
            )
            hidden.add_metric(("broker",), len(unreachable(self._registry.brokers)))
            hidden.add_metric(("timer",), len(unreachable(self._registry.timers)))
            yield hidden
        yield GaugeMetricFamily(
            "duemq_nameserver_topics", "Topics with a route", value=len(self._registry.topics)
        )
        yield GaugeMetricFamily(
            "duemq_nameserver_watchers", "Open WatchRoutes streams", value=self._servicer.watchers
        )
        yield GaugeMetricFamily(
            "duemq_nameserver_revision", "Changes of routes so far", value=self._registry.revision
        )


def expose(registry: Registry, servicer: NameserverServicer, page: CollectorRegistry) -> None:
    """Adds the nameserver's figures to a process's metrics."""
    page.register(_Collector(registry, servicer))
