"""Prometheus metrics of the RPC layer, and the page that serves a process's metrics."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, RestrictedRegistry

from duemq import telemetry
from duemq_server.serving.settings import check_address
from duemq_server.serving.unsent import Unsent

# From a cached answer to a long poll's end.
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

READ_TIMES = 10
# Of the page: for a request to come, and for its answer to be taken.
REQUEST_TIMEOUT_S = 10.0


class Registry(CollectorRegistry):
    """Read by a thread of its own, beside an event loop that changes what is counted."""

    def collect(self) -> Iterator[Metric]:
        """All figures; read again where a table was changed meanwhile.

        Raises what a collector raises, READ_TIMES times.
        """
        return iter(_read(super().collect))

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Only these figures, read in the same way: `/metrics?name[]=…`."""
        return _Restricted(names, self)


class _Restricted(RestrictedRegistry):
    """Some figures of a Registry."""

    def collect(self) -> Iterator[Metric]:
        """As Registry's."""
        return iter(_read(super().collect))


def _read(collect: Callable[[], Iterable[Metric]]) -> list[Metric]:
    for _ in range(READ_TIMES - 1):
        with suppress(RuntimeError):  # a dict, set or deque "changed during iteration"
            return list(collect())
    return list(collect())


def new_registry() -> Registry:
    """A registry with the process's own figures: CPU, memory, open files, collections."""
    registry = Registry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class RpcMetrics:
    """Calls by service, method and status; how long unary calls took; how many are running."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled = Counter(
            "duemq_rpc_handled",
            "Calls that ended, by status",
            ("service", "method", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "duemq_rpc_seconds",
            "Duration of unary calls",
            ("service", "method"),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.running = Gauge(
            "duemq_rpc_running", "Calls running now", ("service", "method"), registry=registry
        )
        self.refused_answers = Counter(
            "duemq_rpc_refused_answers",
            "Answers that were not sent, as clients had not read those before",
            registry=registry,
        )
        self.cut_connections = Counter(
            "duemq_rpc_cut_connections",
            "Connections closed, as the client did not read its answers",
            registry=registry,
        )
        self._unsent_bytes = Gauge(
            "duemq_rpc_unsent_bytes", "Answers that clients have not read yet", registry=registry
        )

    def show(self, unsent: Unsent) -> None:
        """Shows this budget from now on."""
        self._unsent_bytes.set_function(lambda: unsent.held)


class TraceCollector(Collector):
    """What became of this process's spans; zeros while it does not trace."""

    def collect(self) -> Iterator[Metric]:
        """The figures as of now."""
        yield CounterMetricFamily(
            "duemq_trace_spans_exported", "Spans handed over", value=telemetry.exported()
        )
        dropped = CounterMetricFamily(
            "duemq_trace_spans_dropped", "Spans lost, by reason", labels=("reason",)
        )
        for reason, count in telemetry.dropped().items():
            dropped.add_metric((reason,), count)
        yield dropped


def _impatient(kind: Any) -> Any:
    """The same handler; who does not finish a request or read its answer holds no thread."""

    class Impatient(kind):
        timeout = REQUEST_TIMEOUT_S

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return Impatient


class MetricsPage:
    """Serves a registry at http://HOST:PORT/metrics from a thread."""

    def __init__(self, registry: CollectorRegistry, listen: str) -> None:
        """Raises OSError if the address cannot be had."""
        host, port = check_address("metrics_listen", listen, port_min=0)
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(f"metrics_listen: cannot listen on {listen}: {error}") from error
        self._server.RequestHandlerClass = _impatient(self._server.RequestHandlerClass)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
