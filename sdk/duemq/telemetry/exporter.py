"""Where a process's spans go: `CountingExporter`, and the one to the %TRACE% topic.

Owned by: the span processor's worker thread, which alone calls `export`.  A batch that cannot
be sent within its deadline is dropped and counted: telemetry never holds up the application.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from duemq.errors import DuemqError, TooLarge
from duemq.telemetry import columns
from duemq.telemetry.counts import EXPORT_FAILED, SHUTDOWN, SpanCounts

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where encoded batches go."""

    def send(self, *bodies: bytes) -> None:
        """Returns when they are stored; raises DuemqError otherwise."""

    def close(self) -> None:
        """Gives up its connection."""


class CountingExporter(SpanExporter):
    """Counts what becomes of spans; an outage is said once, and so is its end."""

    batches_max = 1
    """How many batches of BATCH_SPANS_MAX may be exported in one go."""

    def __init__(self) -> None:
        self._stop_at: float | None = None  # time.monotonic(); None: not stopping
        self._failing = False
        self.counts = SpanCounts()

    @property
    def dropped(self) -> int:
        """Spans lost so far, for whatever reason."""
        return sum(self.counts.dropped.values())

    @abstractmethod
    def deliver(self, spans: Sequence[ReadableSpan]) -> None:
        """Returns when they are where they should be; raises DuemqError, TooLarge for too many."""

    def interrupt(self) -> None:
        """From another thread: the delivery under way shall fail soon, if it can."""

    def stop_at(self, monotonic_s: float) -> None:
        """From then on batches are dropped: the process wants to end."""
        self._stop_at = monotonic_s

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends the spans; FAILURE after the drop was counted.

        Too large a batch is halved, and one of which a span cannot be written: it is found so.
        """
        if not spans:
            return SpanExportResult.SUCCESS
        if self._stops():
            return self._drop(len(spans), "shutting down")
        try:
            self.deliver(spans)
        except (TooLarge, TypeError, ValueError) as error:
            return self._halve(spans, error)
        except Exception as error:  # Of whatever kind: what is lost is counted.
            return self._drop(len(spans), str(error) or type(error).__name__)
        self.counts.export(len(spans))
        if self._failing:
            self._failing = False
            _logger.info("trace export works again", extra={"dropped": self.dropped})
        return SpanExportResult.SUCCESS

    def _halve(self, spans: Sequence[ReadableSpan], error: Exception) -> SpanExportResult:
        if len(spans) == 1:
            return self._drop(1, str(error))
        half = len(spans) // 2
        results = [self.export(spans[:half]), self.export(spans[half:])]
        failed = SpanExportResult.FAILURE in results
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def _stops(self) -> bool:
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _drop(self, count: int, error: str) -> SpanExportResult:
        self.counts.drop(count, SHUTDOWN if self._stops() else EXPORT_FAILED)
        if not self._failing:  # Said once per outage, not once per batch.
            self._failing = True
            _logger.warning("spans dropped: %s", error, extra={"spans": count})
        return SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here: `export` returns when its batch is stored."""
        return True


class DueMQSpanExporter(CountingExporter):
    """Writes each batch of spans as one message."""

    batches_max = 8

    def __init__(self, make_sink: Callable[[], Sink]) -> None:
        super().__init__()
        self._make_sink = make_sink
        self._sink: Sink | None = None
        self._parents: Sink | None = None  # kept: to close it would disturb that process
        self._made_in = 0

    def deliver(self, spans: Sequence[ReadableSpan]) -> None:
        """Returns when all is stored."""
        if self._sink is None or self._made_in != os.getpid():
            # Under a parent process's numbers, brokers would take our batches for its own.
            self._parents, self._sink = self._sink, self._make_sink()
            self._made_in = os.getpid()
        step = columns.BATCH_SPANS_MAX
        parts = (spans[at : at + step] for at in range(0, len(spans), step))
        self._sink.send(*map(columns.encode, parts))

    def shutdown(self) -> None:
        """Closes the sink; called by the processor when all is exported."""
        sink, self._sink = self._sink, None
        if sink is not None and self._made_in == os.getpid():
            try:
                sink.close()
            except DuemqError as error:
                _logger.warning("trace sink did not close: %s", error)
