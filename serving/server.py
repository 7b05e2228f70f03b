"""What every server of DueMQ does alike.

    Server             bind, services, health, reflection, metrics, drain
    add_service        a servicer behind the error table and the metrics

Health: the name "" tells that the process serves (liveness); a service's full name that it is ready
for clients (readiness).  Clean stop, in this order: leave the nameservers (registration.py),
`drain()` (health says NOT_SERVING, streams end), `stop()` (calls end), then the owner's last sync.
"""

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import CollectorRegistry, Counter

from duemq.errors import DuemqError, Internal, InvalidArgument
from duemq.transport import status
from duemq.transport.channel import (
    MESSAGE_BYTES_MAX,
    NAMESERVER_KEEPALIVE_MS,
    PING_TIMEOUT,
)
from duemq_server.serving import connections, memory
from duemq_server.serving.metrics import MetricsPage, RpcMetrics, new_registry
from duemq_server.serving.settings import ProcessSettings, check_address
from duemq_server.serving.unsent import SMALL_BYTES, Unsent

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
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# Generic in the stubs only.
RpcMethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Codec: TypeAlias = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]
"""Decodes a method's request, encodes its answer.  Where the answer comes encoded (`bytes`), who
made it takes its share of `Server.unsent`."""
# Between two log lines of one method about errors of one type.
LOG_INTERVAL_S = 60.0
# Between two looks at what clients have not read, while there is any.
UNSENT_CHECK_S = 1.0


def announce(address: str, metrics_address: str = "") -> None:
    """Tells the starter of this process, on stdout, where it listens."""
    told = {"event": "listening", "address": address}
    if metrics_address:
        told["metrics"] = metrics_address
    print(json.dumps(told), flush=True)


class Server:
    """A gRPC server with health, reflection and metrics.  Used from one event loop."""

    def __init__(
        self, settings: ProcessSettings, registry: CollectorRegistry | None = None
    ) -> None:
        self.registry = registry if registry is not None else new_registry()
        """Where the process's own metrics go, too."""
        self.draining = asyncio.Event()
        """Set by `drain()`: streams that never end by themselves must end."""
        self.address = ""
        """HOST:PORT listened on; known after `start()`."""
        self.advertised = ""
        """HOST:PORT for others; known after `start()`."""
        self.metrics_address = ""
        self._settings = settings
        self._metrics = RpcMetrics(self.registry)
        self.unsent = Unsent(
            settings.unsent_bytes_max,
            settings.unread_timeout,
            on_refused=self._metrics.refused_answers.inc,
        )
        """Answers that clients have not read yet."""
        self._metrics.show(self.unsent)
        self._watching: list[asyncio.Task[None]] = []
        self._server = grpc.aio.server(options=list(OPTIONS))
        self._health = health.HealthServicer()
        self._page: MetricsPage | None = None
        self._services: list[str] = []
        self._later: _Later | None = None

    def add(
        self,
        service: ServiceDescriptor,
        servicer: object,
        overrides: Mapping[str, Codec] | None = None,
    ) -> None:
        """Serves `service`; see `add_service`.  It is NOT_SERVING until `ready()`."""
        if self._later is not None and self._later.expects(service):
            self._later.add(
                method_handlers(service, servicer, overrides, self._metrics, self.unsent)
            )
            return
        add_service(self._server, service, servicer, overrides, self._metrics, self.unsent)
        self._services.append(service.full_name)

    def expect(
        self, services: Sequence[ServiceDescriptor], refuse: Callable[[], DuemqError | None]
    ) -> None:
        """Before `start`: these come by `add` later.  Their calls get what `refuse` answers."""
        self._later = _Later([each.full_name for each in services], refuse)
        self._server.add_generic_rpc_handlers((self._later,))
        self._services += self._later.names

    async def start(self, *, announced: bool = True) -> None:
        """Binds and serves.  Raises OSError if the address cannot be had."""
        # Behind the same guard as our own services, but not counted: probes are no calls.
        names = (*self._services, HEALTH_NAME, reflection.SERVICE_NAME)
        mirror = reflection.aio.ReflectionServicer(names)
        for service, servicer in ((_HEALTH, self._health), (_REFLECTION, mirror)):
            add_service(self._server, service, servicer, unsent=self.unsent)
        for name in self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._bind()
        await self._server.start()
        self._watching = [
            asyncio.create_task(self._watch_unsent(), name="unsent answers"),
            asyncio.create_task(memory.watch(), name="spare memory"),
        ]
        if self._settings.metrics_listen:
            self._page = MetricsPage(self.registry, self._settings.metrics_listen)
            self.metrics_address = self._page.address
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        log.info("listening on %s, advertised as %s", self.address, self.advertised)
        if announced:
            announce(self.address, self.metrics_address)

    def _bind(self) -> None:
        host, _ = check_address("listen", self._settings.listen, port_min=0)
        try:
            port = self._server.add_insecure_port(self._settings.listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._settings.listen}: {error}") from error
        wildcard = host in ("0.0.0.0", "::")
        self.address = _joined("127.0.0.1" if wildcard else host, port)
        self.advertised = self._settings.advertise or self.address
        if wildcard and not self._settings.advertise:
            log.warning(
                "advertising %s: only this machine can reach it; see --advertise", self.address
            )

    async def ready(self, *services: ServiceDescriptor) -> None:
        """These services, by default all, are ready for clients."""
        for name in [each.full_name for each in services] or self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def not_ready(self, *services: ServiceDescriptor) -> None:
        """As `ready`: they are not, for now."""
        for name in [each.full_name for each in services] or self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on, and `draining` is set."""
        self.draining.set()
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Takes no new calls; those that run may end within the drain timeout."""
        if not self.draining.is_set():
            await self.drain()
        await self._server.stop(self._settings.drain_timeout)
        for task in self._watching:
            task.cancel()
        if self._page is not None:
            await asyncio.to_thread(self._page.close)

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
        except OSError as error:  # too many open files, say: the next look tries again
            log.error("%s does not read, and could not be cut off: %s", peer, error)
            return
        if found:
            timeout_s = self.unsent.timeout_s
            log.warning("%s has not read an answer for %g s: connection closed", peer, timeout_s)
            self._metrics.cut_connections.inc()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    servicer: object,
    overrides: Mapping[str, Codec] | None = None,
    metrics: RpcMetrics | None = None,
    unsent: Unsent | None = None,
) -> None:
    """Serves `service` by `method_handlers`."""
    handlers = method_handlers(service, servicer, overrides, metrics, unsent)
    by_name = {path.rpartition("/")[2]: handler for path, handler in handlers.items()}
    generic = grpc.method_handlers_generic_handler(service.full_name, by_name)
    server.add_generic_rpc_handlers((generic,))


def method_handlers(
    service: ServiceDescriptor,
    servicer: object,
    overrides: Mapping[str, Codec] | None = None,
    metrics: RpcMetrics | None = None,
    unsent: Unsent | None = None,
) -> dict[str, RpcMethodHandler]:
    """The methods of `servicer` that have the names of the service's rpcs, by their paths.

    A method is a coroutine function (request → answer; a stream of requests as an asynchronous
    iterator; answers of a stream through `context.write`) or, for a stream of answers, an
    asynchronous generator function.  A DuemqError that it raises travels by the table of status.py;
    any other exception is logged and travels as Internal.  gRPC cannot end a call with a status
    while one of its writes is under way: a method that writes raises only between its writes, and
    cancels none unless it is cancelled itself.  `overrides` names, for a method, other (request
    decoder, answer encoder) than the generated classes: the views of the hot path.
    """
    overrides = overrides or {}
    unknown = set(overrides) - set(service.methods_by_name)
    if unknown:
        raise ValueError(f"{service.full_name} has no {', '.join(sorted(unknown))}")
    return {
        f"/{service.full_name}/{method.name}": _handler(
            method, servicer, overrides.get(method.name), metrics, unsent
        )
        for method in service.methods
        if not _is_left_out(getattr(servicer, method.name))
    }


class _Later(grpc.GenericRpcHandler):
    """Services that come, and may be refused, while the server runs."""

    def __init__(self, names: Sequence[str], refuse: Callable[[], DuemqError | None]) -> None:
        self.names = tuple(names)
        self._refuse = refuse
        self._handlers: dict[str, RpcMethodHandler] = {}

    def expects(self, service: ServiceDescriptor) -> bool:
        return service.full_name in self.names

    def add(self, handlers: Mapping[str, RpcMethodHandler]) -> None:
        self._handlers.update(handlers)

    def service(self, details: grpc.HandlerCallDetails) -> "RpcMethodHandler | None":
        path = details.method
        if path[1:].rpartition("/")[0] not in self.names:
            return None
        error = self._refuse()
        return self._handlers.get(path) if error is None else _refused(error)


def _refused(error: DuemqError) -> RpcMethodHandler:
    """Whatever it is called with, streams or not."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(status.status_of(error), status.details(error), status.trailer(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _is_left_out(behaviour: Any) -> bool:
    """It is still the generated one, which only raises: gRPC itself answers UNIMPLEMENTED."""
    return str(behaviour.__module__).endswith("_pb2_grpc")


def _handler(
    method: MethodDescriptor,
    servicer: object,
    codec: Codec | None,
    metrics: RpcMetrics | None,
    unsent: Unsent | None,
) -> RpcMethodHandler:
    behaviour = getattr(servicer, method.name)
    decode, encode = codec or (
        GetMessageClass(method.input_type).FromString,
        GetMessageClass(method.output_type).SerializeToString,
    )
    make = _HANDLERS[method.client_streaming, method.server_streaming]
    unary = not (method.client_streaming or method.server_streaming)
    if not method.client_streaming:
        decode = _never_raising(decode)
    watch = _Watch(method.containing_service.full_name, method.name, unary, metrics)
    if unsent is not None and encode is not bytes:
        behaviour, encode = _counted(behaviour, method, encode, unsent), bytes
    guard = _guard_generator if inspect.isasyncgenfunction(behaviour) else _guard_coroutine
    return make(guard(behaviour, watch), request_deserializer=decode, response_serializer=encode)


def _counted(
    behaviour: Any, method: MethodDescriptor, encode: Callable[[Any], bytes], unsent: Unsent
) -> Any:
    """The same method, whose answers are encoded and take their shares of `unsent`."""

    async def generate(request: Any, context: Any) -> AsyncIterator[bytes]:
        async with aclosing(behaviour(request, context)) as found:
            async for answer in found:
                data = encode(answer)
                if len(data) <= SMALL_BYTES:
                    yield data
                    continue
                share = await unsent.take(context.peer(), len(data))
                try:
                    yield data
                finally:
                    share.give_back()

    async def write(request: Any, context: Any) -> None:
        await behaviour(request, _Counting(context, encode, unsent))

    async def answer(request: Any, context: Any) -> bytes:
        data = encode(await behaviour(request, context))
        if len(data) > SMALL_BYTES:
            share = unsent.take_now(context.peer(), len(data))
            context.add_done_callback(lambda _: share.give_back())
        return data

    if inspect.isasyncgenfunction(behaviour):
        return generate
    return write if method.server_streaming else answer


class _Counting:
    """The context of a method that writes its answers."""

    def __init__(self, context: Any, encode: Callable[[Any], bytes], unsent: Unsent) -> None:
        self._context = context
        self._encode = encode
        self._unsent = unsent

    async def write(self, answer: Any) -> None:
        data = self._encode(answer)
        if len(data) <= SMALL_BYTES:
            await self._context.write(data)
            return
        share = await self._unsent.take(self._context.peer(), len(data))
        try:
            await self._context.write(data)
        finally:
            share.give_back()


class _Malformed:
    """What came in place of a request: bytes that are not one."""

    def __init__(self, error: DecodeError) -> None:
        self.error = error


def _never_raising(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC answers UNKNOWN where a deserializer raises; the guard can say what is wrong."""

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Malformed(error)

    return decoded


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise _undecodable(request.error)
    return request


def _undecodable(error: DecodeError) -> InvalidArgument:
    return InvalidArgument(f"the request cannot be decoded: {error}", field="request")


# By (stream of requests, stream of answers).
_HANDLERS: dict[tuple[bool, bool], Callable[..., RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _guard_coroutine(behaviour: Any, watch: "_Watch") -> Any:
    async def call(request: Any, context: Any) -> Any:
        async with _Guard(watch, context):
            return await behaviour(_checked(request), context)

    return call


def _guard_generator(behaviour: Any, watch: "_Watch") -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _Guard(watch, context), aclosing(behaviour(_checked(request), context)) as found:
            async for answer in found:
                yield answer

    return call


class _Guard:
    """Around one call: counts it, and ends it with the status of the error that it raised."""

    __slots__ = ("_began", "_context", "_watch")

    def __init__(self, watch: "_Watch", context: Any) -> None:
        self._watch = watch
        self._context = context

    async def __aenter__(self) -> None:
        self._began = self._watch.begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = _cause(error)
        if cause is None:
            self._watch.end(self._began, "OK")
        elif isinstance(cause, grpc.aio.InternalError):  # a write: the client went away
            self._watch.end(self._began, "CANCELLED")
            raise asyncio.CancelledError from None
        elif isinstance(cause, Exception) and not isinstance(cause, grpc.aio.AbortError):
            sent = self._watch.to_send(cause)
            code = status.status_of(sent)
            self._watch.end(self._began, code.name)
            await self._context.abort(code, status.details(sent), status.trailer(sent))
        else:  # the client went away, the server stops, or the method aborted by itself
            self._watch.end(self._began, "CANCELLED")
            if cause is not error:
                raise cause


def _cause(error: BaseException | None) -> BaseException | None:
    """What a task group's exception comes down to: its first error, or the cancellation."""
    while isinstance(error, BaseExceptionGroup):
        _, errors = error.split(asyncio.CancelledError)
        if errors is None:
            return asyncio.CancelledError()
        error = errors.exceptions[0]
    return error


class _Watch:
    """The metrics and the log of one method."""

    def __init__(self, service: str, method: str, unary: bool, metrics: RpcMetrics | None) -> None:
        self._labels = (service, method)
        self._metrics = metrics
        self._seconds = metrics.seconds.labels(*self._labels) if metrics and unary else None
        self._running = metrics.running.labels(*self._labels) if metrics else None
        self._handled: dict[str, Counter] = {}
        self._quiet_until_s: dict[type[Exception], float] = {}

    def begin(self) -> float:
        if self._running is not None:
            self._running.inc()
        return time.perf_counter()

    def end(self, began: float, outcome: str) -> None:
        if self._metrics is None or self._running is None:
            return
        self._running.dec()
        if outcome not in self._handled:
            self._handled[outcome] = self._metrics.handled.labels(*self._labels, outcome)
        self._handled[outcome].inc()
        if self._seconds is not None:
            self._seconds.observe(time.perf_counter() - began)

    def _log(self, error: Exception) -> None:
        """In full once a minute: whoever can cause an error can cause thousands."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(type(error), 0.0):
            return
        self._quiet_until_s[type(error)] = now_s + LOG_INTERVAL_S
        log.error("%s/%s failed", *self._labels, exc_info=error)

    def to_send(self, error: Exception) -> DuemqError:
        """The error for the client.  What the server did not expect is logged in full."""
        if isinstance(error, DuemqError) and not isinstance(error, Internal):
            return error
        if isinstance(error, DecodeError):  # servicers catch those of what lies in a request
            return _undecodable(error)
        self._log(error)
        if isinstance(error, DuemqError):
            return error
        method = self._labels[1]
        return Internal(f"{method} failed: {type(error).__name__}; see the server's log")
