"""An OpenTelemetry collector for tests: OTLP over gRPC on a free port; takes, stalls, refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

Values = dict[str, str | int | bool]

# A stalled call ends when the test is over, at the latest.
STALL_S_MAX = 60.0


@dataclass(frozen=True)
class Received:
    """A span as a collector sees it."""

    span: trace_pb2.Span
    resource: Values
    scope: str

    @property
    def attributes(self) -> Values:
        return values_of(self.span.attributes)

    @property
    def operation(self) -> str:
        return str(self.attributes["messaging.operation.name"])


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.address = ""
        self.received: list[Received] = []
        self.metadata: dict[str, str] = {}
        """Of the last call."""
        self.calls = 0
        self.refuse_with: grpc.StatusCode | None = None
        self.gate = threading.Event()
        """Not set: calls are taken and wait."""
        self.gate.set()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.calls += 1
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        self.gate.wait(STALL_S_MAX)
        if self.refuse_with is not None:
            context.abort(self.refuse_with, "refused")
        for of_resource in request.resource_spans:
            resource = values_of(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.received += [
                    Received(span, resource, of_scope.scope.name) for span in of_scope.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting(credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    """`credentials`: of a collector that speaks TLS."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    listen = "127.0.0.1:0"
    if credentials is None:
        port = server.add_insecure_port(listen)
    else:
        port = server.add_secure_port(listen, credentials)
    collector.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.stop(grace=None).wait()


@contextmanager
def nobody() -> Iterator[str]:
    """An address where connections are refused, for as long as it is held."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def values_of(attributes: object) -> Values:
    pairs: list[KeyValue] = list(attributes)  # type: ignore[call-overload]
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
