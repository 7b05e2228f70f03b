"""Spans of real processes at a collector: an application, two brokers and a timer service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from duemq import Producer, PullConsumer
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import topic_name, until
from tests.service.otlp_collector import Collector, Received, collecting

APPLICATION = """
import sys, threading
from duemq import Producer, PushConsumer, telemetry

nameserver, topic = sys.argv[1:]
telemetry.configure("shop", "otlp", instance="shop-1")
failed, done = [], threading.Event()

def receive(message):
    if message.body == b"again" and not failed:
        failed.append(message)
        raise ValueError("not yet")
    seen.discard(message.body)
    if not seen:
        done.set()

seen = {b"now", b"later", b"again"}
with Producer(nameserver) as producer:
    producer.send(topic, b"now", key="k-1", tag="red")
    producer.send(topic, b"later", delay="300ms")
    producer.send(topic, b"again")
with PushConsumer("readers", topic, receive, nameserver=nameserver, start_from="earliest"):
    if not done.wait(60):
        sys.exit("not all messages were received")
telemetry.shutdown(30)
"""


def variables(collector: Collector, timeout_s: int = 60) -> dict[str, str]:
    """`timeout_s`: what is not exported within is dropped."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": str(timeout_s),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    flags = {kind: ["--tracing", "otlp"] for kind in ("broker", "timer")}
    flags["broker"] += ["--retry-delays", "200ms"]
    directory = tmp_path_factory.mktemp("otlp")
    with EmbeddedCluster(directory, flags=flags, environment=variables(collector)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def traces(traced: EmbeddedCluster, collector: Collector) -> dict[str, list[Received]]:
    """The spans of three messages, by body."""
    topic = topic_name()
    # A process of its own: OpenTelemetry's provider is set once for the life of a process.
    command = [sys.executable, "-c", APPLICATION, traced.nameserver, topic]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, **variables(collector)})

    def of_topic() -> list[Received]:
        found = list(collector.received)
        return [
            each for each in found if each.attributes.get("messaging.destination.name") == topic
        ]

    # Of each: send, store, receive, process; "later" is scheduled, fired and stored again; "again"
    # is settled and processed again (its retry's way through system topics is not spanned).
    until(lambda: len(of_topic()) >= 4 + 7 + 6)
    by_trace: dict[bytes, list[Received]] = defaultdict(list)
    for each in of_topic():
        by_trace[each.span.trace_id].append(each)
    assert len(by_trace) == 3, "one trace a message"
    named = {}
    for found in by_trace.values():
        operations = [each.operation for each in found]
        kind = "again" if "settle" in operations else "later" if "fire" in operations else "now"
        named[kind] = sorted(found, key=lambda each: each.span.start_time_unix_nano)
    return named


def one(found: list[Received], operation: str, index: int = 0) -> Received:
    return [each for each in found if each.operation == operation][index]


def test_a_message_is_one_trace(traces: dict[str, list[Received]]) -> None:
    steps = [each.operation for each in traces["now"]]
    assert sorted(steps) == ["process", "receive", "send", "store"]
    sent = one(traces["now"], "send")
    assert not sent.span.parent_span_id
    for each in traces["now"]:
        if each is not sent:
            assert each.span.parent_span_id == sent.span.span_id
    stored, processed = one(traces["now"], "store"), one(traces["now"], "process")
    assert sent.span.start_time_unix_nano <= stored.span.start_time_unix_nano
    assert stored.span.end_time_unix_nano <= processed.span.start_time_unix_nano


def test_a_delayed_message_is_followed_through_the_timer_service(
    traces: dict[str, list[Received]],
) -> None:
    found = traces["later"]
    steps = ["fire", "process", "receive", "schedule", "send", "store", "store"]
    assert sorted(each.operation for each in found) == steps
    sent = one(found, "send")
    assert {each.span.parent_span_id for each in found} == {b"", sent.span.span_id}
    due_ms = sent.attributes["duemq.due_ms"]
    assert one(found, "fire").attributes["duemq.due_ms"] == due_ms
    lateness = one(found, "process").attributes["duemq.lateness_ms"]
    assert isinstance(lateness, int)
    assert lateness >= 0
    assert one(found, "store").attributes["duemq.timed"] is True


def test_a_message_sent_back_shows_why_and_both_attempts(traces: dict[str, list[Received]]) -> None:
    found = traces["again"]
    sent = one(found, "send")
    assert {each.span.parent_span_id for each in found} == {b"", sent.span.span_id}
    failed, settled, again = one(found, "process"), one(found, "settle"), one(found, "process", 1)
    assert failed.span.status.code == 2
    assert failed.attributes["error.type"] == "ValueError"
    assert settled.attributes["duemq.dead_letter"] is False
    assert (failed.attributes["duemq.attempt"], again.attributes["duemq.attempt"]) == (0, 1)
    assert again.span.status.code == 0
    assert settled.span.end_time_unix_nano <= again.span.start_time_unix_nano


def test_attributes_follow_the_conventions(traces: dict[str, list[Received]]) -> None:
    kinds = {
        "send": Span.SPAN_KIND_PRODUCER,
        "store": Span.SPAN_KIND_SERVER,
        "schedule": Span.SPAN_KIND_INTERNAL,
        "fire": Span.SPAN_KIND_PRODUCER,
        "receive": Span.SPAN_KIND_CLIENT,
        "process": Span.SPAN_KIND_CONSUMER,
        "settle": Span.SPAN_KIND_CLIENT,
    }
    for each in [each for found in traces.values() for each in found]:
        attributes, topic = each.attributes, each.attributes["messaging.destination.name"]
        assert each.span.kind == kinds[each.operation]
        assert each.span.name == f"{each.operation} {topic}"
        assert attributes["messaging.system"] == "duemq"
        if each.operation in ("send", "receive", "process", "settle"):
            assert attributes["messaging.operation.type"] == each.operation
        if each.operation in ("receive", "process", "settle"):
            assert attributes["messaging.consumer.group.name"] == "readers"
            assert str(attributes["messaging.destination.partition.id"]).isdigit()
        if each.operation in ("send", "process", "settle"):
            assert attributes["messaging.message.id"]
        if each.operation in ("store", "schedule", "fire", "receive"):
            assert attributes["messaging.batch.message_count"] == 1
    sent = one(traces["now"], "send").attributes
    assert sent["messaging.message.body.size"] == 3
    assert (sent["duemq.key"], sent["duemq.tag"]) == ("k-1", "red")


def test_every_process_names_itself(traces: dict[str, list[Received]]) -> None:
    services = defaultdict(set)
    for each in [each for found in traces.values() for each in found]:
        services[each.operation].add(each.resource["service.name"])
        assert each.resource["service.instance.id"]
    assert services["send"] == services["receive"] == services["process"] == {"shop"}
    assert services["settle"] == {"shop"}
    assert services["store"] == {"duemq-broker"}
    assert services["schedule"] == services["fire"] == {"duemq-timer"}
    stored = one(traces["now"], "store")
    assert stored.resource["service.instance.id"] == stored.attributes["duemq.broker"]


@pytest.mark.long
def test_messages_go_on_without_a_collector_and_processes_end_in_time(tmp_path: Path) -> None:
    flags = {kind: ["--tracing", "otlp"] for kind in ("broker", "timer")}
    topic = topic_name()
    context = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with collecting() as collector:
        collector.gate.clear()
        with EmbeddedCluster(
            tmp_path, brokers=1, flags=flags, environment=variables(collector, timeout_s=1)
        ) as cluster:
            logs = [cluster.log_file(name) for name in ("broker-0", "timer-0")]
            with Producer(cluster.nameserver) as producer:
                for _ in range(50):
                    producer.send(topic, b"now", properties=context)
                producer.send_many(topic, [b"later"] * 50, delay="200ms", properties=context)
                until(lambda: collector.calls >= 3)
            received = 0
            with PullConsumer(nameserver=cluster.nameserver) as consumer:
                consumer.assign(topic, start_from="earliest")
                while received < 100:
                    messages = consumer.poll(60.0)
                    assert messages
                    received += len(messages)
            # Killed (-9) if it took too long.
            assert [cluster.stop_member(name) for name in ("timer-0", "broker-0")] == [0, 0]
        assert collector.received == []
    for log in logs:
        text = log.read_text()
        assert text.count("spans dropped: Failed to export traces") <= 1, text
        assert "Transient error" not in text
        assert "Traceback" not in text
        assert "spans were dropped, 0 exported" in text
