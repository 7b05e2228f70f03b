"""Spans of real processes: from an application, two brokers and a timer service to a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.names import TRACE_TOPIC
from duemq.tracing.contexts import LINKS_MAX
from duemq_analytics.options import Options
from duemq_analytics.source import plan, schema, spans
from duemq_analytics.source.client import QueueClient
from duemq_analytics.waterfall.journeys import journeys
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import duemq, topic_name, until
from tests.cluster.harness import rows as lines

PLAIN, DELAYED = 40, 20
REPORT_S_MAX = 300  # Spark starts slowly where the machine is busy.

COLUMNS = [column.name for column in schema.SPANS]


@pytest.fixture(scope="module")
def traced_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    flags = {kind: ["--tracing", "duemq"] for kind in ("broker", "timer")}
    directory = tmp_path_factory.mktemp("traced")
    with EmbeddedCluster(
        directory, flags=flags, environment={"OTEL_BSP_SCHEDULE_DELAY": "100"}
    ) as c:
        yield c


APPLICATION = """
import sys, threading
from duemq.protocol.names import TRACE_TOPIC
from duemq import Admin, Producer, PushConsumer, telemetry

nameserver, name, plain, delayed = *sys.argv[1:3], *map(int, sys.argv[3:])
pipeline = telemetry.configure("application", nameserver=nameserver)
left, done = [None] * (plain + delayed), threading.Event()

def receive(message):
    left.pop()
    if not left:
        done.set()

with Admin(nameserver) as admin, Producer(nameserver) as producer:
    admin.create_topic(name)
    for number in range(plain):
        producer.send(name, b"plain", key=f"k{number}")
    late = [producer.submit(name, b"later", delay="500ms") for _ in range(delayed // 2)]
    # A list is sampled as a whole, or not at all.
    for _ in range(delayed // 4):
        producer.send_many(name, [b"later"] * 2, delay="500ms")
    for each in late:
        each.result()
group = name + "-g"
with PushConsumer(group, name, receive, nameserver=nameserver, start_from="earliest"):
    if not done.wait(60):
        sys.exit("not all messages were received")
telemetry.shutdown(30)
if pipeline.dropped:
    sys.exit(f"{pipeline.dropped} spans were dropped")
"""


@pytest.fixture(scope="module")
def topic(traced_cluster: EmbeddedCluster) -> str:
    """A topic whose messages have been sent and received, traced."""
    nameserver, name = traced_cluster.nameserver, topic_name()
    # A process of its own: OpenTelemetry's provider is set once for the life of a process.
    command = [sys.executable, "-c", APPLICATION, nameserver, name, str(PLAIN), str(DELAYED)]
    subprocess.run(command, check=True, timeout=100)
    return name


def rows(nameserver: str, topic: str) -> list[dict[str, Any]]:
    """All spans of a topic so far."""
    columns = schema.select(schema.SPANS, COLUMNS)
    options = Options(TRACE_TOPIC)
    with QueueClient((nameserver,), timeout_s=30) as client:
        pieces = plan.ranges(client.queues(options), options)
        batches = [
            spans.to_arrow(record.body, piece, run.offset, columns)
            for piece in pieces
            for run in client.read(options.topic, piece)
            for record in run.records
        ]
    return [row for batch in batches for row in batch.to_pylist() if row["topic"] == topic]


def last_of(found: list[dict[str, Any]]) -> str:
    """The id of the message that was sent last."""
    sent = [row for row in found if row["operation"] == "send"]
    last = max(sent, key=lambda row: (bool(row["due_ms"]), row["queue_offset"]))
    return str(last["message_id"])


def messages(found: list[dict[str, Any]], operation: str) -> int:
    chosen = [row for row in found if row["operation"] == operation]
    return sum(row["sampled_count"] or row["batch_count"] or 1 for row in chosen)


def test_every_step_of_every_message_is_spanned(
    traced_cluster: EmbeddedCluster, topic: str
) -> None:
    count = PLAIN + DELAYED
    # Delayed messages are stored twice: in %TIMER% and, fired, in their topic.
    expected = {"send": count, "process": count, "receive": count, "store": count + DELAYED}
    expected |= {"schedule": DELAYED, "fire": DELAYED}

    def counted() -> dict[str, int]:
        found = rows(traced_cluster.nameserver, topic)
        return {operation: messages(found, operation) for operation in expected}

    until(lambda: counted() == expected)
    found = rows(traced_cluster.nameserver, topic)
    assert {row["service"] for row in found} == {"application", "duemq-broker", "duemq-timer"}
    assert {row["status"] for row in found} == {"UNSET"}


def test_spans_of_a_tenth_of_the_messages_are_of_the_same_tenth(
    traced_cluster: EmbeddedCluster,
) -> None:
    nameserver, name = traced_cluster.nameserver, topic_name()
    command = [sys.executable, "-c", APPLICATION, nameserver, name, "400", "400"]
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    subprocess.run(command, check=True, timeout=100, env={**os.environ, **sampler})
    steps = ("send", "process", "receive", "store", "schedule", "fire")

    def agree() -> bool:
        found = rows(nameserver, name)
        sent, processed, received, stored, scheduled, fired = (
            messages(found, step) for step in steps
        )
        same = sent == processed == received and fired == scheduled and stored == sent + fired
        return same and 0 < fired < sent < 400

    until(agree)


LISTS = """
import sys, threading
from duemq import Producer, PushConsumer, telemetry

nameserver, name, count = *sys.argv[1:3], int(sys.argv[3])
pipeline = telemetry.configure("application", nameserver=nameserver)
left, done = [None] * 2 * count, threading.Event()

def receive(message):
    left.pop()
    if not left:
        done.set()

with Producer(nameserver) as producer:
    texts = [b"%d" % number for number in range(count)]
    producer.send_many(name, texts)
    producer.send_many(name, texts, delay="300ms")
with PushConsumer(name + "-g", name, receive, nameserver=nameserver, start_from="earliest"):
    if not done.wait(60):
        sys.exit("not all messages were received")
telemetry.shutdown(30)
"""


def test_every_message_of_a_list_has_all_its_steps(traced_cluster: EmbeddedCluster) -> None:
    nameserver, name = traced_cluster.nameserver, topic_name()
    count = 10 * LINKS_MAX  # in a frame, of which its span names no more than LINKS_MAX
    command = [sys.executable, "-c", LISTS, nameserver, name, str(count)]
    subprocess.run(command, check=True, timeout=100)
    plain = ("process", "receive", "send", "store")
    delayed = ("fire", "process", "receive", "schedule", "send", "store", "store")

    def told() -> Counter[tuple[object, ...]]:
        found = rows(nameserver, name)
        own = [row for row in found if row["message_id"] is not None]
        frames = [row for row in found if row["message_id"] is None]
        each = journeys(own, frames).values()
        return Counter(tuple(sorted(row["operation"] for row in steps)) for steps in each)

    until(lambda: told() == {plain: count, delayed: count})
    shown = lines(show(traced_cluster, last_of(rows(nameserver, name)), "--json"))
    assert tuple(sorted(row["operation"] for row in shown)) == delayed


def test_a_message_is_one_trace_and_never_early(
    traced_cluster: EmbeddedCluster, topic: str
) -> None:
    until(lambda: messages(rows(traced_cluster.nameserver, topic), "fire") == DELAYED)
    found = rows(traced_cluster.nameserver, topic)
    by_operation = {
        operation: {row["message_id"]: row for row in found if row["operation"] == operation}
        for operation in ("send", "process")
    }
    assert len(by_operation["send"]) == PLAIN + DELAYED
    for message_id, sent in by_operation["send"].items():
        assert by_operation["process"][message_id]["trace_id"] == sent["trace_id"]
        assert by_operation["process"][message_id]["due_ms"] == sent["due_ms"]
    traces = {row["trace_id"] for row in by_operation["send"].values()}
    inside = [row for row in found if row["operation"] in ("store", "schedule", "fire", "receive")]
    assert {row["trace_id"] for row in inside} <= traces
    late = [row["lateness_ms"] for row in found if row["lateness_ms"] is not None]
    assert len(late) >= DELAYED
    assert min(late) >= 0


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(REPORT_S_MAX)
def test_the_report_is_made_of_them(
    traced_cluster: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "duemq_analytics", "report", "--json", "--topic", topic]
    command += ["--nameserver", traced_cluster.nameserver, "--output", str(tmp_path)]
    command += ["--since", "1h"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=REPORT_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["topics"] == [topic]
    page = Path(result["html"]).read_text()
    assert "Lateness, distribution" in page
    assert (tmp_path / "lateness" / "_SUCCESS").exists()


def test_without_traces_the_report_says_how_to_get_them(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "duemq_analytics", "report", "--output", str(tmp_path)]
    command += ["--nameserver", cluster.nameserver, "--trace-topic", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Turn tracing on" in done.stderr
    assert done.stderr.count("\n") == 1


def show(cluster: EmbeddedCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return duemq(cluster.nameserver, "trace", "show", *arguments)


@pytest.mark.long
def test_one_message_is_drawn(traced_cluster: EmbeddedCluster, topic: str) -> None:
    def delayed() -> list[dict[str, Any]]:
        found = rows(traced_cluster.nameserver, topic)
        return [row for row in found if row["operation"] == "process" and row["due_ms"]]

    until(lambda: len(delayed()) == DELAYED)
    message_id = str(delayed()[0]["message_id"])
    steps = ["send", "store", "schedule", "fire", "store", "receive", "process"]

    def spans() -> list[dict[str, Any]]:
        return lines(show(traced_cluster, message_id, "--json"))

    until(lambda: sorted(row["operation"] for row in spans()) == sorted(steps))
    (process,) = (row for row in spans() if row["operation"] == "process")
    assert process["consumer_group"] == f"{topic}-g"
    assert process["lateness_ms"] >= 0
    done = show(traced_cluster, message_id)
    assert done.returncode == 0
    assert sorted(line.split()[0] for line in done.stdout.splitlines()[3:]) == sorted(steps)
    assert done.stdout.count("█") >= len(steps)
    assert "spans stored since" in done.stderr
    assert show(traced_cluster, message_id, "--since", "1ms").returncode == 4
    unknown = show(traced_cluster, "nobody's")
    assert unknown.returncode == 4
    assert "no spans of message nobody's" in unknown.stderr


def test_a_waterfall_without_a_broker_is_partial(
    traced_cluster: EmbeddedCluster, topic: str
) -> None:
    traced_cluster.kill("broker-1", restart=False)
    try:
        done = show(traced_cluster, "nobody's", "--json")
    finally:
        traced_cluster.start_member("broker-1")
        traced_cluster.wait_ready()
    assert done.returncode == 5, done.stdout + done.stderr
    (missing,) = json.loads(done.stdout.splitlines()[-1])["missing_brokers"]
    assert missing["broker"] == "broker-1"


def test_a_cluster_that_nobody_traces_has_no_waterfalls(cluster: EmbeddedCluster) -> None:
    done = show(cluster, "nobody's")
    assert done.returncode == 4
    assert "no spans" in done.stderr
