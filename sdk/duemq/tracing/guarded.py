"""Where the application's sampler, span processors, meters and exceptions run.

What they raise costs the span and nothing else: the message is on its way, or was processed.
"""

from __future__ import annotations

import logging
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, Tracer

log = logging.getLogger("duemq.tracing")

_told: set[type[Exception]] = set()


def start(tracer: Tracer, name: str, **options: Any) -> Span:
    """As the tracer's `start_span`; a span that records nothing where that raises."""
    try:
        return tracer.start_span(name, **options)
    except Exception as error:
        tell(error, name)
        return INVALID_SPAN


def end(span: Span, at_ns: int | None = None) -> None:
    """As the span's own."""
    try:
        span.end(at_ns)
    except Exception as error:
        tell(error, getattr(span, "name", "span"))


def record(span: Span, error: BaseException, at_ns: int | None = None) -> None:
    """As the span's `record_exception`, which asks the application's exception for its text."""
    try:
        span.record_exception(error, timestamp=at_ns)
    except Exception as raised:
        tell(raised, getattr(span, "name", "span"))


def tell(error: Exception, name: str) -> None:
    """Of a span of that name, or of metrics."""
    if type(error) not in _told:  # once, not once a message
        _told.add(type(error))
        log.error("%r: sampler, span processor, meter or exception failed", name, exc_info=error)
