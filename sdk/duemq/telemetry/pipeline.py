"""Span processor and exporter of a process, put together and taken apart."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from duemq.protocol.names import TRACE_TOPIC
from duemq.telemetry.counts import QUEUE_FULL
from duemq.telemetry.exporter import CountingExporter, DueMQSpanExporter, Sink
from duemq.telemetry.sink import TraceSink

_logger = logging.getLogger(__name__)

BATCH_SPANS_MAX = 512
"""Spans in one SpanBatch (protos/duemq/v1/trace.proto)."""

QUEUE_SPANS_MAX = 16_384
"""Spans that wait for export, about 3 KB each; more are dropped and counted."""

EXPORT_PERIOD_MS = 1_000

EXPORT_TIMEOUT_S = 10.0
"""For one batch to become durable; OpenTelemetry's default for exporters."""


INTERRUPT_TIMEOUT_S = 0.5
"""For an export that was broken off to end."""


class Pipeline:
    """Spans on their way out of this process."""

    def __init__(self, provider: TracerProvider, exporter: CountingExporter) -> None:
        self._exporter = exporter
        self._processor = BoundedSpanProcessor(exporter)
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
        return self._exporter.exported

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


class BoundedSpanProcessor(BatchSpanProcessor):
    """A batch span processor that refuses and counts what its queue cannot hold.

    OpenTelemetry's own drops the oldest and counts only with a metrics SDK.
    """

    def __init__(self, exporter: CountingExporter) -> None:
        self._counts = exporter.counts
        self._overflowing = False  # only for the log: a line too many does no harm
        self._pending_max = _from_env("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS_MAX)
        super().__init__(
            _Counted(exporter, self._take),
            max_queue_size=self._pending_max,
            schedule_delay_millis=_from_env("OTEL_BSP_SCHEDULE_DELAY", EXPORT_PERIOD_MS),
            max_export_batch_size=min(
                BATCH_SPANS_MAX,
                self._pending_max,
                _from_env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS_MAX),
            ),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a sampled span, or counts it as dropped."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        dropped = self._counts.admit(self._pending_max)
        if dropped is None:
            super().on_end(span)
        elif dropped == QUEUE_FULL and not self._overflowing:  # Said once per overflow.
            self._overflowing = True
            _logger.warning("%d spans wait for export, further ones are dropped", self._pending_max)

    def shutdown(self) -> None:
        """Exports what waits; what the exporter did not take in time is dropped."""
        super().shutdown()
        self._counts.close()

    def _take(self, count: int) -> None:
        self._counts.take(count)
        self._overflowing &= self._counts.waiting > self._pending_max // 2


class _Counted(SpanExporter):
    def __init__(self, exporter: SpanExporter, take: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._take = take

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._take(len(spans))
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def start(service: str, exporter: str, *, nameserver: str, instance: str) -> Pipeline:
    """A running pipeline on the process's tracer provider, which is made if there is none."""
    to = _exporter(exporter, nameserver)  # first: what it refuses leaves no provider behind
    return Pipeline(_provider(service, instance), to)


def _exporter(name: str, nameserver: str) -> CountingExporter:
    if name == "duemq":

        def make_sink() -> Sink:
            return TraceSink(nameserver, TRACE_TOPIC, EXPORT_TIMEOUT_S)

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
    provider = TracerProvider(resource=detected.merge(Resource(named)))
    trace.set_tracer_provider(provider)
    return provider


def _from_env(name: str, default: int) -> int:
    """A number from OpenTelemetry's own setting; what is not a positive number is ignored."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default
