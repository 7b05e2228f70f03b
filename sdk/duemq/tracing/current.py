"""The span that is current while the callback runs, where spans may be light (sends.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, TraceFlags

from duemq.tracing import spans
from duemq.tracing.sampling import SPAN_ID_BYTES

if TYPE_CHECKING:
    from duemq.message import Message


def _asked(name: str) -> Any:
    def asked(span: CurrentSpan, *given: Any, **named: Any) -> Any:
        return getattr(span.made(), name)(*given, **named)

    return asked


class CurrentSpan(Span):
    """Of a message with a sampled context: OpenTelemetry's once more is asked than who it is."""

    def __init__(
        self, message: Message, span_id: bytes, make: Callable[[Message, int], Span]
    ) -> None:
        """`span_id`: and whatever follows it."""
        self._message = message
        self._span_id = int.from_bytes(span_id[:SPAN_ID_BYTES], "big")
        self._make = make
        self._context: SpanContext | None = None

    def made(self) -> Span:
        """OpenTelemetry's; of two threads that ask at once, one's."""
        known = self.__dict__
        return known.get("made_") or known.setdefault(
            "made_", self._make(self._message, self._span_id)
        )

    def is_made(self) -> bool:
        """Whether anybody asked.  From now on nobody can."""
        return self.__dict__.setdefault("made_", INVALID_SPAN) is not INVALID_SPAN

    def get_span_context(self) -> SpanContext:
        """As of a child of the message's creation context."""
        if self._context is None:
            creation = spans.creation_of(self._message)
            assert creation is not None
            of_all = creation.trace_id, self._span_id, False, TraceFlags(TraceFlags.SAMPLED)
            self._context = SpanContext(*of_all, creation.trace_state)
        return self._context

    def is_recording(self) -> bool:
        """Until it ends."""
        made: Span | None = self.__dict__.get("made_")
        return made is None or made.is_recording()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    end = _asked("end")
    set_attributes = _asked("set_attributes")
    set_attribute = _asked("set_attribute")
    add_event = _asked("add_event")
    add_link = _asked("add_link")
    update_name = _asked("update_name")
    set_status = _asked("set_status")
    record_exception = _asked("record_exception")
