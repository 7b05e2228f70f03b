import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from duemq import telemetry
from duemq.errors import TopicNotFound
from duemq_server.serving.metrics import READ_TIMES, TraceCollector, new_registry


def test_lost_spans_are_told_by_reason(monkeypatch):
    registry = CollectorRegistry()
    registry.register(TraceCollector())
    monkeypatch.setattr(telemetry, "exported", lambda: 7)
    monkeypatch.setattr(telemetry, "dropped", lambda: {"queue_full": 3, "shutdown": 0})
    page = generate_latest(registry).decode()
    assert "duemq_trace_spans_exported_total 7.0" in page
    assert 'duemq_trace_spans_dropped_total{reason="queue_full"} 3.0' in page
    assert 'duemq_trace_spans_dropped_total{reason="shutdown"} 0.0' in page


class Changing(Collector):
    """Its table is changed by somebody else while it is read, so many times."""

    def __init__(self, times, error=None):
        """`error`: what it finds then; by default Python's own."""
        self.table, self.times, self.error = {"a": 1.0, "b": 2.0}, times, error

    def describe(self):
        return [GaugeMetricFamily(f"rows_{name}", "") for name in self.table]

    def collect(self):
        for name, value in self.table.items():
            yield GaugeMetricFamily(f"rows_{name}", "", value=value)
            if self.times:
                self.times -= 1
                self.table[f"more{self.times}"] = 0.0
                if self.error is not None:
                    raise self.error


@pytest.fixture(params=["all", "named"])
def read(request):
    """Reads the page of a registry, or the part of it that a request names."""

    def page(registry):
        wanted = registry.restricted_registry(["rows_b"]) if request.param == "named" else registry
        return generate_latest(wanted).decode()

    return page


@pytest.mark.parametrize("error", [None, KeyError("orders"), TopicNotFound("orders is gone")])
def test_a_table_that_changes_while_it_is_read_is_read_again(read, error):
    registry = new_registry()
    registry.register(Changing(READ_TIMES - 1, error))
    assert read(registry).count("\nrows_b 2.0") == 1
    registry = new_registry()
    registry.register(Changing(READ_TIMES, error))
    with pytest.raises(type(error or RuntimeError()), match=r"changed size|orders"):
        read(registry)
