"""Spans to an OpenTelemetry collector: OTLP over gRPC, by OpenTelemetry's own exporter.

Endpoint, headers, certificates, compression and timeout are OpenTelemetry's settings, the
variables OTEL_EXPORTER_OTLP_… (trace_analytics/README.md).  The exporter tries a batch again while
its timeout (10 s) lasts.  It logs every failure of every batch; here that is one line an outage,
as with every exporter of this package.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from duemq.errors import InvalidArgument, Unavailable
from duemq.telemetry.exporter import CountingExporter

_THEIR_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"


class OtlpSpanExporter(CountingExporter):
    """Hands batches to a collector."""

    def __init__(self) -> None:
        """Raises InvalidArgument for what OpenTelemetry's settings cannot be."""
        super().__init__()
        try:
            self._exporter = OTLPSpanExporter()
        except Exception as error:  # of whatever kind: the settings are theirs, so is the check
            raise InvalidArgument(
                f"tracing otlp: an OTEL_EXPORTER_OTLP_ variable is wrong: {error}",
                field="tracing",
                value="otlp",
            ) from error
        self._complaints = _Complaints()
        self._ending = threading.Lock()  # guards _ended
        self._ended = False
        # The first filter: another of them drops what resembles the line before.
        logging.getLogger(_THEIR_LOGGER).filters.insert(0, self._complaints)

    def deliver(self, spans: Sequence[ReadableSpan]) -> None:
        """Returns when the collector has taken them."""
        with self._complaints.kept() as said:
            result = self._exporter.export(list(spans))
        if result is not SpanExportResult.SUCCESS:
            reason = said[-1] if said else "the collector did not take them"
            raise Unavailable(reason, field="tracing", value="otlp")

    def interrupt(self) -> None:
        """Breaks off the call that is under way."""
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the connection."""
        with self._ending:
            ended, self._ended = self._ended, True
        if not ended:
            self._exporter.shutdown()
            logging.getLogger(_THEIR_LOGGER).removeFilter(self._complaints)


class _Complaints(logging.Filter):
    """Keeps what their exporter logs in a thread of ours, instead of writing it.

    Exporters of the application's own log as ever: they run in other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    @contextmanager
    def kept(self) -> Iterator[list[str]]:
        """What is logged by this thread meanwhile; a handful of lines a batch."""
        said: list[str] = []
        self._of_thread.said = said
        try:
            yield said
        finally:
            self._of_thread.said = None

    def filter(self, record: logging.LogRecord) -> bool:
        """False: not to be written."""
        said: list[str] | None = getattr(self._of_thread, "said", None)
        if said is None:
            return True
        said.append(record.getMessage())
        return False
