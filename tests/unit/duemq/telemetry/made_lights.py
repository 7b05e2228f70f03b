"""Light spans of sends, one by one."""

from typing import NamedTuple

from opentelemetry.trace import SpanContext

from duemq.tracing.sends import Lights


class Light(NamedTuple):
    """An entry of `Lights`."""

    trace_id: bytes
    span_id: bytes
    start_ns: int
    body_bytes: int
    key: str | None
    tag: str | None
    parent: SpanContext | None


def lights_of(each_one: list[tuple[int, Light]]) -> Lights:
    """Of these messages: (index, span)."""
    indexes, lights = zip(*each_one, strict=True)
    trace_ids, span_ids, *rest = zip(*lights, strict=True)
    return Lights(indexes, b"".join(trace_ids), b"".join(span_ids), *rest)
