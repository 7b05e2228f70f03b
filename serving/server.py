"""What every server of DueMQ does alike.

Bind, services (methods.py), health, reflection, metrics, drain.

A second port, `external_listen`, has the same for clients that cannot reach the first, but for what
`add` is told: one process, one set of limits, metrics and permissions, one drain.

Health: the name "" tells that the process serves (liveness); a service's full name that it is ready
for clients (readiness).  Clean stop, in this order: leave the nameservers (registration.py),
`drain()` (health says NOT_SERVING, streams end), `stop()` (calls end), then the owner's last sync.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import CollectorRegistry

from duemq.errors import DuemqError
from duemq.settings import Tls
from duemq.transport.channel import (
    MESSAGE_BYTES_MAX,
    NAMESERVER_KEEPALIVE_MS,
    PING_TIMEOUT,
)
from duemq_server.serving import health
from duemq_server.serving.methods import Codec, LaterServices, add_handlers, method_handlers
from duemq_server.serving.metrics import MetricsPage, RpcMetrics, new_registry
from duemq_server.serving.permissions.access import Permissions
from duemq_server.serving.permissions.permissions_file import PermissionsFile
from duemq_server.serving.resources import connections, memory
from duemq_server.serving.settings import WILDCARDS, ProcessSettings, check_address, joined
from duemq_server.serving.tls import server_credentials
from duemq_server.serving.unsent import Unsent

log = logging.getLogger(__name__)

# Per connection.  A client has a few streams and calls; its parked pulls are the most of it.
STREAMS_PER_CONNECTION_MAX = 10_000
# A client that vanished without a word is noticed then.
CLIENT_SILENCE_MS = 40_000
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    # Two servers on one port would share its connections without an error.
    ("grpc.so_reuseport", 0),
    # Clients ping so often, idle ones too; pings that come twice as often are an abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", NAMESERVER_KEEPALIVE_MS // 2),
    ("grpc.keepalive_time_ms", CLIENT_SILENCE_MS // 2),
    ("grpc.keepalive_timeout_ms", CLIENT_SILENCE_MS // 2),
    (PING_TIMEOUT, CLIENT_SILENCE_MS // 2),
)
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# Between two looks at what clients have not read, while there is any.
UNSENT_CHECK_S = 1.0


def announce(address: str, metrics_address: str = "", external_address: str = "") -> None:
    """Tells the starter of this process, on stdout, where it listens."""
    told = {"event": "listening", "address": address}
    if metrics_address:
        told["metrics"] = metrics_address
    if external_address:
        told["external"] = external_address
    print(json.dumps(told), flush=True)


class Server:
    """A gRPC server with health, reflection and metrics.  Used from one event loop."""

    def __init__(
        self, settings: ProcessSettings, registry: CollectorRegistry | None = None
    ) -> None:
        """Raises InvalidArgument where its file of permissions is of no use."""
        self.registry = registry if registry is not None else new_registry()
        """Where the process's own metrics go, too."""
        self.draining = asyncio.Event()
        """Set by `drain()`: streams that never end by themselves must end."""
        self.address = ""
        """HOST:PORT listened on; known after `start()`."""
        self.advertised = ""
        """HOST:PORT for others; known after `start()`."""
        self.external_address = ""
        """HOST:PORT listened on for clients outside; known after `start()`; empty: off."""
        self.metrics_address = ""
        self.health_address = ""
        self._settings = settings
        self._metrics = RpcMetrics(self.registry)
        self.unsent = Unsent(
            settings.unsent_bytes_max,
            settings.unread_timeout,
            on_refused=self._metrics.refused_answers.inc,
        )
        """Answers that clients have not read yet."""
        self._metrics.show(self.unsent)
        self._permissions: Permissions | None = None
        if settings.permissions:
            self._permissions = Permissions(PermissionsFile(settings.permissions).policy)
        self._watching: list[asyncio.Task[None]] = []
        self._cannot_cut = False  # which is told once, and not at each look
        self._server = grpc.aio.server(options=list(OPTIONS))
        self._external: grpc.aio.Server | None = None
        if settings.external_listen:
            self._external = grpc.aio.server(options=list(OPTIONS))
        self._health = health.Health()
        self._probes: grpc.aio.Server | None = None
        self._page: MetricsPage | None = None
        self._services: list[str] = []
        self._later: dict[grpc.aio.Server, LaterServices] = {}

    def add(
        self,
        service: ServiceDescriptor,
        servicer: object,
        overrides: Mapping[str, Codec] | None = None,
        *,
        outside: object | None = None,
        inside_only: bool = False,
    ) -> None:
        """Serves `service`; see `method_handlers`.  It is NOT_SERVING until `ready()`.

        `outside`: the servicer of the external port, where it is another one.  `inside_only`: it
        has none there.
        """
        for server, one in ((self._server, servicer), (self._external, outside or servicer)):
            if server is None or (inside_only and server is self._external):
                continue
            handlers = method_handlers(
                service, one, overrides, self._metrics, self.unsent, self._permissions
            )
            later = self._later.get(server)
            if later is not None and later.expects(service):
                later.add(handlers)
            else:
                add_handlers(server, service, handlers)
        if service.full_name not in self._services:
            self._services.append(service.full_name)

    def expect(
        self,
        services: Sequence[ServiceDescriptor],
        refuse: Callable[[], DuemqError | None],
        *,
        outside: Callable[[], DuemqError | None] | None = None,
    ) -> None:
        """Before `start`: these come by `add` later.  Their calls get what `refuse` answers.

        `outside`: the same for the external port, where it is another answer.
        """
        names = [each.full_name for each in services]
        for server in self._servers():
            answer = (outside or refuse) if server is self._external else refuse
            self._later[server] = LaterServices(names, answer)
            server.add_generic_rpc_handlers((self._later[server],))
        self._services += names

    def _servers(self) -> list[grpc.aio.Server]:
        return [self._server] if self._external is None else [self._server, self._external]

    async def start(self, *, announced: bool = True) -> None:
        """Binds and serves.  Raises OSError if the address cannot be had."""
        # Behind the same guard as our own services, but not counted: probes are no calls.
        names = (*self._services, health.SERVICE.full_name, reflection.SERVICE_NAME)
        mirror = reflection.aio.ReflectionServicer(names)
        for service, servicer in ((health.SERVICE, self._health), (_REFLECTION, mirror)):
            handlers = method_handlers(service, servicer, unsent=self.unsent)
            for server in self._servers():
                add_handlers(server, service, handlers)
        for name in self._services:
            self._health.tell(name, serving=False)
        if self._settings.metrics_listen:
            self._page = MetricsPage(self.registry, self._settings.metrics_listen)
            self.metrics_address = self._page.address
        try:
            self._bind()
            await self._serve_probes()
            for server in self._servers():
                await server.start()
        except BaseException:
            await self._close_probes()
            await self._close_page()
            raise
        self._watching = [
            asyncio.create_task(self._watch_unsent(), name="unsent answers"),
            asyncio.create_task(memory.watch(), name="spare memory"),
        ]
        self._health.tell("", serving=True)
        log.info("listening on %s, advertised as %s", self.address, self.advertised)
        if self.external_address:
            log.info("listening on %s for clients outside", self.external_address)
        if announced:
            announce(self.address, self.metrics_address, self.external_address)

    def _bind(self) -> None:
        host, _ = check_address("listen", self._settings.listen, port_min=0)
        port = self._port(self._server, self._settings.listen, self._settings.tls)
        wildcard = host in WILDCARDS
        self.address = joined("127.0.0.1" if wildcard else host, port)
        self.advertised = self._settings.advertise or self.address
        if wildcard and not self._settings.advertise:
            log.warning(
                "advertising %s: only this machine can reach it; see --advertise", self.address
            )
        if self._external is not None:
            listen = self._settings.external_listen
            host, _ = check_address("external_listen", listen, port_min=0)
            port = self._port(self._external, listen, self._settings.tls)
            self.external_address = joined(host, port)

    def _port(self, server: grpc.aio.Server, listen: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                return server.add_insecure_port(listen)
            verify = self._settings.tls_verify_clients
            return server.add_secure_port(listen, server_credentials(tls, verify_clients=verify))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error

    async def _serve_probes(self) -> None:
        """Health alone, without TLS: Kubernetes' probes know none."""
        listen = self._settings.health_listen
        if listen:
            self._probes = grpc.aio.server(options=list(OPTIONS))
            add_handlers(
                self._probes, health.SERVICE, method_handlers(health.SERVICE, self._health)
            )
            host, _ = check_address("health_listen", listen, port_min=0)
            self.health_address = joined(host, self._port(self._probes, listen, None))
            await self._probes.start()

    def ready(self, *services: ServiceDescriptor, serving: bool = True) -> None:
        """These services, by default all, are ready for clients; or are not, for now."""
        for name in [each.full_name for each in services] or self._services:
            self._health.tell(name, serving=serving)

    def drain(self) -> None:
        """Health says NOT_SERVING from now on, and `draining` is set."""
        self.draining.set()
        self._health.drain()

    async def stop(self) -> None:
        """Takes no new calls; those that run may end within the drain timeout."""
        if not self.draining.is_set():
            self.drain()
        timeout_s = self._settings.drain_timeout
        await asyncio.gather(*(server.stop(timeout_s) for server in self._servers()))
        await self._close_probes()
        for task in self._watching:
            task.cancel()
        await self._close_page()

    async def _close_probes(self) -> None:
        if self._probes is not None:
            await self._probes.stop(0)
            self._probes = None

    async def _close_page(self) -> None:
        if self._page is not None:
            await asyncio.to_thread(self._page.close)
            self._page = None

    async def _watch_unsent(self) -> None:
        """Cuts off who does not read; for ever."""
        unsent = self.unsent
        while True:
            await unsent.busy.wait()
            await asyncio.sleep(UNSENT_CHECK_S)
            for peer in unsent.stuck():
                await self._cut_off(peer)
            if not unsent.held:
                unsent.busy.clear()

    async def _cut_off(self, peer: str) -> None:
        try:
            found = await asyncio.to_thread(connections.shut, peer)
        except (OSError, RuntimeError) as error:  # too many files or threads: it is tried again
            if not self._cannot_cut:
                log.error("%s does not read, and could not be cut off: %s", peer, error)
            self._cannot_cut = True
            return
        self._cannot_cut = False
        if found:
            timeout_s = self.unsent.timeout_s
            log.warning("%s has not read an answer for %g s: connection closed", peer, timeout_s)
            self._metrics.cut_connections.inc()
