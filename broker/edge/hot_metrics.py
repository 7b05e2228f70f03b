"""Histogram and counter for the hot path: those of `prometheus_client` cost ten times as much.

Each is observed by one thread; the thread that serves the metrics may read while it is.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class HotHistogram(Collector):
    """How many observations fell into each bucket, and their sum."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: upper bounds, inclusive, ascending; one without bound is added."""
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The histogram as of now."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class HotCounter(Collector):
    """A counter for the hot path, without a lock: of one thread."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The counter as of now."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)
