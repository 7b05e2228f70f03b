from prometheus_client import CollectorRegistry, generate_latest

from duemq import telemetry
from duemq_server.serving.metrics import TraceCollector


def test_lost_spans_are_told_by_reason(monkeypatch):
    registry = CollectorRegistry()
    registry.register(TraceCollector())
    monkeypatch.setattr(telemetry, "exported", lambda: 7)
    monkeypatch.setattr(telemetry, "dropped", lambda: {"queue_full": 3, "shutdown": 0})
    page = generate_latest(registry).decode()
    assert "duemq_trace_spans_exported_total 7.0" in page
    assert 'duemq_trace_spans_dropped_total{reason="queue_full"} 3.0' in page
    assert 'duemq_trace_spans_dropped_total{reason="shutdown"} 0.0' in page
