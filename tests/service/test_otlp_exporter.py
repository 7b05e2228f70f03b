"""The pipeline to a collector that works, is away, stalls, or refuses."""

import logging
import shutil
import subprocess
import sys
import threading

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from duemq import telemetry
from duemq.errors import InvalidArgument, Unavailable
from duemq.telemetry.otlp import OtlpSpanExporter
from duemq.telemetry.pipeline import Pipeline
from duemq.tracing import spans
from tests.service.otlp_collector import collecting, nobody


@pytest.fixture
def collector():
    with collecting() as running:
        yield running


@pytest.fixture
def pipeline_to(monkeypatch):
    """Makes pipelines; spans of `duemq.tracing.spans` go there."""
    made = []

    def make(address, **variables):
        scheme = "https" if "OTEL_EXPORTER_OTLP_CERTIFICATE" in variables else "http"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{scheme}://{address}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        provider = TracerProvider(shutdown_on_exit=False)
        spans.use(provider)
        pipeline = Pipeline(provider, OtlpSpanExporter())
        made.append(pipeline)
        return pipeline

    yield make
    spans.use(None)
    for pipeline in made:
        pipeline.shutdown(timeout_s=0.0)


def send(count, topic="orders"):
    for i in range(count):
        spans.start_send(topic, f"m{i}").stored("broker-0", 0, i)


def lines(caplog):
    """What was logged, by whomever."""
    return [f"{record.name}: {record.message}" for record in caplog.records]


def test_spans_and_headers_arrive(collector, pipeline_to):
    pipeline = pipeline_to(collector.address, OTEL_EXPORTER_OTLP_HEADERS="X-Tenant=shop,api-key=k")
    send(1_100)
    pipeline.shutdown(timeout_s=30)
    ids = [received.attributes["messaging.message.id"] for received in collector.received]
    assert sorted(ids) == sorted(f"m{i}" for i in range(1_100))
    assert {received.scope for received in collector.received} == {"duemq"}
    assert (collector.metadata["x-tenant"], collector.metadata["api-key"]) == ("shop", "k")
    assert (pipeline.exported, pipeline.dropped) == (1_100, 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_collector_with_a_certificate(pipeline_to, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    pair = (key.read_bytes(), certificate.read_bytes())
    with collecting(grpc.ssl_server_credentials([pair])) as collector:
        pipeline = pipeline_to(collector.address, OTEL_EXPORTER_OTLP_CERTIFICATE=str(certificate))
        send(1)
        pipeline.shutdown(timeout_s=30)
        assert len(collector.received) == 1


def test_a_collector_that_is_away_costs_spans_and_one_line(pipeline_to, caplog):
    with nobody() as address, caplog.at_level(logging.INFO):
        pipeline = pipeline_to(address, OTEL_EXPORTER_OTLP_TIMEOUT="0.2")
        for _ in range(3):
            send(100)
            pipeline.flush()
    assert (pipeline.exported, pipeline.dropped) == (0, 300)
    (line,) = lines(caplog)
    assert line.startswith("duemq.telemetry.exporter: spans dropped: Failed to export traces to ")
    assert address in line


def test_what_fails_for_a_while_works_again(collector, pipeline_to, caplog):
    pipeline = pipeline_to(collector.address, OTEL_EXPORTER_OTLP_TIMEOUT="60")
    collector.refuse_with = grpc.StatusCode.INVALID_ARGUMENT
    with caplog.at_level(logging.INFO):
        send(3)
        pipeline.flush()
        collector.refuse_with = None
        send(4)
        pipeline.flush()
    assert (pipeline.exported, pipeline.dropped) == (4, 3)
    said = lines(caplog)
    assert "INVALID_ARGUMENT" in said[0]
    assert said[1:] == ["duemq.telemetry.exporter: trace export works again"]


def test_a_collector_that_stalls_neither_holds_up_the_end_nor_fills_the_memory(
    collector, pipeline_to, caplog
):
    patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}  # nothing is given up before the end
    pipeline = pipeline_to(collector.address, OTEL_BSP_MAX_QUEUE_SIZE="1000", **patient)
    collector.gate.clear()
    with caplog.at_level(logging.INFO):
        send(3_000)
        assert pipeline.dropped >= 1_000
        pipeline.shutdown(timeout_s=0.2)
    assert not collector.gate.is_set()
    said = lines(caplog)
    assert "1000 spans wait for export, further ones are dropped" in said[0]
    assert said[-1].endswith("spans were dropped, 0 exported")
    assert len(said) <= 4
    for thread in threading.enumerate():
        if thread.name == "duemq-trace-stop":
            thread.join()
    assert (pipeline.exported, pipeline.dropped) == (0, 3_000)


def test_every_span_is_exported_or_dropped_when_the_collector_never_answers(collector, pipeline_to):
    patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}  # nothing is given up before the end
    pipeline = pipeline_to(collector.address, OTEL_BSP_MAX_QUEUE_SIZE="2000", **patient)
    collector.gate.clear()
    send(1_900)  # no more than may wait
    assert pipeline.dropped == 0
    pipeline.shutdown(timeout_s=0.2)
    send(100)  # too late
    assert pipeline.exported + pipeline.dropped == 2_000
    # What is told holds, whatever becomes of the call that was broken off.
    collector.gate.set()
    for thread in threading.enumerate():
        if thread.name == "duemq-trace-stop":
            thread.join()
    assert pipeline.exported == 0
    assert pipeline.dropped_by_reason == {"queue_full": 0, "export_failed": 0, "shutdown": 2_000}


def test_exporters_of_the_application_log_as_ever(collector, pipeline_to, caplog):
    pipeline_to(collector.address)
    theirs = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    theirs.warning("of another exporter")
    assert "of another exporter" in caplog.text


def test_wrong_variables_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")
    with pytest.raises(InvalidArgument, match="OTEL_EXPORTER_OTLP_COMPRESSION"):
        OtlpSpanExporter()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "duemq.telemetry.otlp")
    with pytest.raises(Unavailable, match=r"pip install 'duemq\[otlp\]'"):
        telemetry.configure("app", "otlp")
