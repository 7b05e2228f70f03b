"""OpenTelemetry metrics of an application's messages (sdk/README.md), by the conventions 1.44.

They exist once the application sets a meter provider.  Callers ask `enabled()` once per frame and
call nothing else while it is false.  Topics of the system are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter

from opentelemetry import metrics
from opentelemetry.util.types import AttributeValue

from duemq.tracing import guarded, spans
from duemq.tracing.attributes import (
    ERROR_TYPE,
    GROUP,
    attributes_of,
    failure,
    filled,
    server_of,
)

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_ATTRIBUTE_SETS_MAX = 1_024  # kept; of more, some are made again each time


class _Meters:
    """The instruments at one meter provider."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        name, version, schema_url = spans.scope()
        meter = provider.get_meter(name, version, schema_url)
        self.counters = {
            "send": meter.create_counter("messaging.client.sent.messages", "{message}"),
            "receive": meter.create_counter("messaging.client.consumed.messages", "{message}"),
        }
        self.operation_s, self.process_s = (
            meter.create_histogram(each, "s", explicit_bucket_boundaries_advisory=_BOUNDS_S)
            for each in ("messaging.client.operation.duration", "messaging.process.duration")
        )


_meters: _Meters | None = None


def use(provider: metrics.MeterProvider | None) -> None:
    """Counts at this provider instead of the process's; None: back to the process's."""
    global _meters
    _meters = None if provider is None else _Meters(provider)


def enabled() -> bool:
    """Whether someone wants metrics.  About 1 us while not: ask per frame, not per message."""
    if _meters is not None:
        return True
    provider = metrics.get_meter_provider()
    if type(provider).__module__.startswith("opentelemetry.metrics"):
        return False  # the API's own: nobody set one
    try:
        use(provider)
    except Exception as error:
        guarded.tell(error, "metrics")
    return _meters is not None


def sent(
    topic: str, count: int, seconds: float, error: BaseException | None, server: str = ""
) -> None:
    """A batch was stored, or given up, so long after its first message.  While `enabled`.

    `server`: the address of the broker that has it.
    """
    _measure(seconds, count, "send", topic, "", server, _kind(error))


def received(topic: str, group: str, count: int, seconds: float, server: str = "") -> None:
    """A pull brought so many messages of a topic.  While `enabled`."""
    _measure(seconds, count, "receive", topic, group, server, "")


def settled(
    topic: str, group: str, seconds: float, error: BaseException | None, server: str = ""
) -> None:
    """A message was sent back, or could not be.  While `enabled`."""
    _measure(seconds, 0, "settle", topic, group, server, _kind(error))


@contextmanager
def processing(topic: str, group: str) -> Iterator[None]:
    """Around one call of the callback.  While `enabled`."""
    began_s, raised = perf_counter(), ""
    try:
        yield
    except BaseException as error:
        raised = _kind(error)
        raise
    finally:
        _measure(perf_counter() - began_s, 0, "process", topic, group, "", raised)


def _measure(seconds: float, count: int, operation: str, topic: str, *named: str) -> None:
    if _meters is None or not spans.traced(topic):
        return
    attributes = _attributes(operation, topic, *named)
    duration_s = _meters.process_s if operation == "process" else _meters.operation_s
    try:
        if count:
            _meters.counters[operation].add(count, attributes)
        duration_s.record(max(0.0, seconds), attributes)
    except Exception as error:
        guarded.tell(error, "metrics")


def _kind(error: BaseException | None) -> str:
    return "" if error is None else failure(error)[0]


@lru_cache(_ATTRIBUTE_SETS_MAX)
def _attributes(
    operation: str, topic: str, group: str, server: str, error_type: str
) -> Mapping[str, AttributeValue]:
    named = filled({GROUP: group, ERROR_TYPE: error_type})
    return attributes_of(operation, topic) | named | server_of(server)
