"""Spans that wait for export: bounded, each counted, exported by a thread of its own.

OpenTelemetry's own batch processor drops the oldest, counts only with a metrics SDK, and knows no
span that is not an object of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from duemq.telemetry.columns import BATCH_SPANS_MAX
from duemq.telemetry.counts import QUEUE_FULL
from duemq.telemetry.exporter import CountingExporter
from duemq.telemetry.light_spans import LightRows, LightSpan, ProcessRows, SendRows, rows_of
from duemq.tracing.sends import LightFrame
from duemq.tracing.spans import Finished

_logger = logging.getLogger(__name__)

QUEUE_SPANS_MAX = 16_384
"""Spans that wait for export, about 3 KB each; more are dropped and counted."""

EXPORT_PERIOD_MS = 1_000

SHUTDOWN_TIMEOUT_S = 30.0


class SpanQueue(SpanProcessor):
    """Refuses and counts what it cannot hold.  Thread-safe."""

    def __init__(self, exporter: CountingExporter, resource: Resource) -> None:
        """`resource`: whose spans they are."""
        self.alone = True
        """Nobody else looks at the spans (sends.SendSink)."""
        self._exporter = exporter
        self._resource = resource
        self._counts = exporter.counts
        self._overflowing = False  # only for the log: a line too many does no harm
        self._waiting_max = _from_env("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS_MAX)
        self._period_s = _from_env("OTEL_BSP_SCHEDULE_DELAY", EXPORT_PERIOD_MS) / 1000
        batch_max = _from_env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS_MAX)
        batch_max = min(BATCH_SPANS_MAX, self._waiting_max, batch_max)
        self._batch_max = batch_max
        self._export_max = batch_max * exporter.batches_max
        # Light spans are small: they wait for a full export, if that leaves room for more.
        self._lights_max = min(self._export_max, max(batch_max, self._waiting_max // 4))
        self._begin()
        reference = weakref.ref(self)

        def begin_in_child() -> None:
            queue = reference()
            if queue is not None:
                queue._begin(ended=queue._ended)

        os.register_at_fork(after_in_child=begin_in_child)

    def _begin(self, *, ended: bool = False) -> None:
        self._spans: deque[ReadableSpan] = deque()
        # An export is of one kind, whatever comes in between.
        self._frames: dict[type[LightRows[Any]], deque[LightFrame]] = {
            SendRows: deque(),
            ProcessRows: deque(),
        }
        self._exporting = threading.Lock()  # guards the exporter
        self._wake = threading.Event()
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="duemq-trace-export", daemon=True)
        if ended:
            self._counts.close()
        else:
            self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a sampled span, or counts it as dropped."""
        if span.context and span.context.trace_flags.sampled and self._admit(1):
            self._spans.append(span)
            self._wake_if_full()

    def record(self, span: Finished) -> None:
        """Queues a finished span, or counts it as dropped."""
        if self._admit(1):
            self._spans.append(LightSpan(span, self._resource))
            self._wake_if_full()

    def put(self, frame: LightFrame) -> None:
        """Queues the spans of a frame's messages, or counts them as dropped, all of them."""
        if self._admit(frame.rows):
            self._frames[rows_of(frame)].append(frame)
            self._wake_if_full()

    def _admit(self, count: int) -> bool:
        refused = self._counts.admit(self._waiting_max, count)
        if refused == QUEUE_FULL and not self._overflowing:  # Said once per overflow.
            self._overflowing = True
            _logger.warning("%d spans wait for export, further ones are dropped", self._waiting_max)
        return refused is None

    def _wake_if_full(self) -> None:
        if self._spans_full or self._lights_full:
            self._wake.set()

    @property
    def _spans_full(self) -> bool:
        """They are worth an export."""
        return len(self._spans) >= self._batch_max

    @property
    def _lights_full(self) -> bool:
        return self._counts.waiting - len(self._spans) >= self._lights_max

    def shutdown(self) -> None:
        """Exports what waits; what the exporter did not take in time is dropped."""
        if self._ended:
            return
        self._ended = True
        self._wake.set()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._exporter.shutdown()
        self._counts.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Exports what waits; returns when it is stored or dropped."""
        self._export()
        return True

    # ── the thread ───────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._ended:
            whole_at = monotonic() + self._period_s
            while not self._ended and self._full_before(whole_at):
                self._export(whole=False)
            self._export()
        self._export()

    def _full_before(self, monotonic_s: float) -> bool:
        """Waits until something is worth an export, or the queue ends; False: it is late."""
        left_s = monotonic_s - monotonic()
        if left_s <= 0 or not self._wake.wait(left_s):
            return False
        self._wake.clear()
        return True

    def _export(self, *, whole: bool = True) -> None:
        """What is worth an export, or the `whole`: a small export costs as much.

        All that waits now, of each kind; what comes meanwhile only goes along.
        """
        with self._exporting:
            token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
            kinds: list[tuple[Callable[[bool], int], int]] = [
                (self._export_spans, len(self._spans)),
                *((partial(self._export_frames, k), len(left)) for k, left in self._frames.items()),
            ]
            try:
                for export, left in kinds:
                    while left > 0 and (count := export(whole)):
                        left -= count
            finally:
                detach(token)

    def _export_spans(self, whole: bool) -> int:
        """Answers how many."""
        count = min(len(self._spans), self._export_max) if whole or self._spans_full else 0
        self._hand_over([self._spans.popleft() for _ in range(count)])
        return count

    def _export_frames(self, kind: type[LightRows[Any]], whole: bool) -> int:
        """As many as fit an export, or one that fills several.  Answers how many."""
        waiting = self._frames[kind]
        frames: list[LightFrame] = []
        count = 0
        while waiting and (whole or self._lights_full):
            if frames and count + waiting[0].rows > self._export_max:
                break
            frames.append(waiting.popleft())
            count += frames[-1].rows
        rows = kind(frames, self._resource)
        for first in range(0, count, self._export_max):
            self._hand_over(rows[first : first + self._export_max])
        return len(frames)

    def _hand_over(self, spans: Sequence[ReadableSpan]) -> None:
        if not spans:
            return
        self._counts.take(len(spans))
        self._overflowing &= self._counts.waiting > self._waiting_max // 2
        self._exporter.export(spans)


def _from_env(name: str, default: int) -> int:
    """A number from OpenTelemetry's own setting; what is not a positive number is ignored."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default
