"""Span processor and exporter of a process, put together and taken apart."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from duemq.protocol.names import TRACE_TOPIC
from duemq.settings import Tls
from duemq.telemetry.exporter import CountingExporter, DueMQSpanExporter, Sink
from duemq.telemetry.queue import SpanQueue
from duemq.telemetry.sink import TraceSink
from duemq.transport import channel

_logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 10.0
"""For one batch to become durable; OpenTelemetry's default for exporters."""

INTERRUPT_TIMEOUT_S = 0.5
"""For an export that was broken off to end."""


class Provider(TracerProvider):
    """Knows who looks at its spans, so that ours need not be OpenTelemetry's (`sink`)."""

    sink: SpanQueue | None = None
    """Takes the light ones."""
    _others = False

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """As TracerProvider's."""
        super().add_span_processor(span_processor)
        if isinstance(span_processor, SpanQueue):
            self.sink = span_processor
        else:
            self._others = True
        if self.sink is not None:
            self.sink.alone = not self._others


class Pipeline:
    """Spans on their way out of this process."""

    def __init__(self, provider: TracerProvider, exporter: CountingExporter) -> None:
        self._exporter = exporter
        self._processor = SpanQueue(exporter, provider.resource)
        self.provider = provider
        provider.add_span_processor(self._processor)

    @property
    def dropped(self) -> int:
        """Spans lost so far, for whatever reason."""
        return self._exporter.dropped

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """Spans lost so far by reason: `queue_full`, `export_failed`, `shutdown`."""
        return self._exporter.counts.dropped

    @property
    def exported(self) -> int:
        """Spans handed over so far; stored ones, if they go to DueMQ."""
        return self._exporter.counts.exported

    def flush(self) -> None:
        """Exports what waits; returns when it is stored or dropped."""
        self._processor.force_flush()

    def shutdown(self, timeout_s: float) -> None:
        """Exports what waits for at most about `timeout_s`; later spans go nowhere."""
        self._exporter.stop_at(time.monotonic() + timeout_s)
        # A thread, for the export that is under way may take longer than there is time.
        stopping = threading.Thread(
            target=self._processor.shutdown, name="duemq-trace-stop", daemon=True
        )
        stopping.start()
        stopping.join(timeout_s)
        if stopping.is_alive():
            self._exporter.interrupt()
            stopping.join(INTERRUPT_TIMEOUT_S)
        self._exporter.counts.close()
        if self.dropped:
            _logger.warning("%d spans were dropped, %d exported", self.dropped, self.exported)


def start(
    service: str, exporter: str, *, nameserver: str, instance: str, tls: Tls | None
) -> Pipeline:
    """A running pipeline on the process's tracer provider, which is made if there is none."""
    to = _exporter(exporter, nameserver, tls)  # first: what it refuses leaves no provider behind
    return Pipeline(_provider(service, instance), to)


def _exporter(name: str, nameserver: str, tls: Tls | None) -> CountingExporter:
    if name == "duemq":
        channel.check(tls)

        def make_sink() -> Sink:
            return TraceSink(nameserver, TRACE_TOPIC, EXPORT_TIMEOUT_S, tls)

        return DueMQSpanExporter(make_sink)
    # Here: its packages are an extra of their own.
    from duemq.telemetry.otlp import OtlpSpanExporter

    return OtlpSpanExporter()


def _provider(service: str, instance: str) -> TracerProvider:
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        return provider
    named: dict[str, str] = {"service.instance.id": instance or f"{service}-{os.getpid()}"}
    detected = Resource.create()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
    if str(detected.attributes.get("service.name", "")).startswith("unknown_service"):
        named["service.name"] = service
    provider = Provider(resource=detected.merge(Resource(named)))
    trace.set_tracer_provider(provider)
    return provider
