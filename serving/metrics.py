"""Prometheus metrics of the RPC layer, and the page that serves a process's metrics."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, RestrictedRegistry

from duemq import telemetry
from duemq.errors import DuemqError
from duemq_server.serving.settings import WILDCARDS, check_address, joined
from duemq_server.serving.unsent import Unsent

# From a cached answer to a long poll's end.
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

READ_TIMES = 10
# Of the page: for a request to come, and for its answer to be taken.
REQUEST_TIMEOUT_S = 10.0
# At a time; nobody needs more than a few.
REQUESTS_MAX = 32


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
        # A dict "changed during iteration", or what it had a moment ago is deleted.
        with suppress(RuntimeError, LookupError, DuemqError):
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


class _Request(WSGIRequestHandler):
    """Of the page; who does not finish a request or read its answer holds no thread."""

    server: "_Listener"
    timeout = REQUEST_TIMEOUT_S

    def handle(self) -> None:
        """Who goes in the middle of it, or is sent away, is no error."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def parse_request(self) -> bool:
        """Reads all of it."""
        is_good = super().parse_request()
        self.server.has_come(self.request)
        return is_good

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Listener(ThreadingMixIn, WSGIServer):
    """A thread a request.  Of a wildcard on every address, IPv4 and IPv6, as gRPC listens there."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        # When those that are here began to come; inf: they have come.
        self._since_s: dict[socket.socket, float] = {}
        if host in WILDCARDS:
            host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, _Request)  # type: ignore[arg-type]  # IPv6 has a scope, too

    def process_request(self, request: Any, client_address: Any) -> None:
        """Who comes while REQUESTS_MAX are here is sent away: each holds a thread."""
        if len(self._since_s) >= REQUESTS_MAX:
            self.shutdown_request(request)
            return
        self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """However it ends: answered, sent away, or for want of a thread."""
        self._since_s.pop(request, None)
        super().shutdown_request(request)

    def has_come(self, request: socket.socket) -> None:
        """It is not ended however long the figures take."""
        self._since_s[request] = math.inf

    def service_actions(self) -> None:
        """Twice a second: ends what takes too long to come, also a byte at a time."""
        before_s = time.monotonic() - REQUEST_TIMEOUT_S
        for request, since_s in self._since_s.copy().items():
            if since_s < before_s:
                with suppress(OSError):  # it has ended
                    request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Not as HTTPServer, which asks the network for the name of this machine."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class MetricsPage:
    """Serves a registry at http://HOST:PORT/metrics from a thread."""

    def __init__(self, registry: CollectorRegistry, listen: str) -> None:
        """Raises OSError if the address cannot be had."""
        host, port = check_address("metrics_listen", listen, port_min=0)
        try:
            self._server = _Listener(host, port)
        except OSError as error:
            raise OSError(f"metrics_listen: cannot listen on {listen}: {error}") from error
        self._server.set_app(make_wsgi_app(registry))
        self.address = joined(host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
