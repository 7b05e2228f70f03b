"""The data sources against a cluster in memory: real gRPC, real Spark."""

import json
import pkgutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.errors import PySparkException, utils
from pyspark.sql.pandas.types import to_arrow_schema

from duemq.protocol.names import TRACE_TOPIC
from duemq.telemetry import columns
from duemq.tracing import spans
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics import options, report, session
from duemq_analytics.source import schema
from duemq_analytics.source.client import QueueClient
from duemq_server.serving.tracing import spans as services
from tests.service.blocking_cluster import STORE_MS, FakeCluster, FakeQueue, serving

pytestmark = pytest.mark.spark


def test_a_session_may_be_without_the_sources(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_formats", lambda: pytest.fail("it has them"))
    session.start("another", tmp_path, sources=False)


def test_no_operation_on_a_column_notes_the_line_it_came_from(spark, monkeypatch):
    monkeypatch.setattr(utils, "_enable_debugging_cache", None)  # asks the session again
    assert not utils.is_debugging_enabled()


@pytest.fixture
def cluster():
    with serving(FakeCluster()) as served:
        yield served


def numbered(count, prefix="m"):
    return [Record(message_id=f"{prefix}{i}", body=b"%d" % i) for i in range(count)]


def load(spark, cluster, source="duemq", **options):
    reader = spark.read.format(source).option("nameserver", cluster.address)
    return reader.options(**{"timeoutSeconds": 5} | options)


def ids(frame):
    return sorted(row["message_id"] for row in frame.select("message_id").toArrow().to_pylist())


@pytest.mark.parametrize("table", [schema.MESSAGES, schema.SPANS], ids=["messages", "spans"])
def test_spark_and_arrow_agree_on_every_type(spark, table):
    from pyspark.sql.types import StructType

    of_spark = to_arrow_schema(StructType.fromDDL(schema.ddl(table)), timezone="UTC")
    assert of_spark.names == schema.arrow_schema(table).names
    assert of_spark.types == schema.arrow_schema(table).types


def test_a_read_can_begin_with_what_was_stored_since(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(50, "a"), 100), FakeQueue(numbered(9, "b"))]
    given = options.parse({"nameserver": cluster.address, "topic": "orders"})
    with QueueClient(given.nameservers, 5) as client:
        # A queue's messages are stored a millisecond an offset after each other.
        starts = client.starts_since("orders", client.queues(given), STORE_MS + 147)
    assert starts == {cluster.broker: {"0": 147, "1": 9}}
    frame = load(spark, cluster, topic="orders", startingOffsets=json.dumps(starts)).load()
    assert ids(frame) == ["a47", "a48", "a49"]


def test_a_topic_is_read_whole_in_pieces(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(50, "a")), FakeQueue(numbered(9, "b"), 100)]
    frame = load(spark, cluster, topic="orders", maxRecordsPerPartition=20).load()
    assert frame.rdd.getNumPartitions() == 4
    assert ids(frame) == sorted([f"a{i}" for i in range(50)] + [f"b{i}" for i in range(9)])
    last = frame.where("queue = 1").orderBy("offset").toArrow().to_pylist()[-1]
    assert (last["offset"], last["broker"], last["body"]) == (108, "broker-0", b"8")
    assert last["store_ts"] == datetime.fromtimestamp((STORE_MS + 107) / 1_000, UTC)


def test_an_empty_topic_has_no_rows(spark, cluster):
    cluster.topics["orders"] = [FakeQueue([])]
    assert load(spark, cluster, topic="orders").load().count() == 0


def test_a_view_can_be_made_in_sql(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(5))]
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW orders USING duemq "
        f"OPTIONS (nameserver '{cluster.address}', topic 'orders')"
    )
    assert spark.sql("SELECT count(*) AS n FROM orders").first().n == 5


def test_only_the_columns_of_the_schema_come(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(3))]
    frame = load(spark, cluster, topic="orders").schema("offset bigint, message_id string").load()
    assert frame.toArrow().column_names == ["offset", "message_id"]
    with pytest.raises(PySparkException, match="no column offset int"):
        load(spark, cluster, topic="orders").schema("offset int").load().count()


def test_offsets_bound_what_is_read(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(50))]
    frame = load(
        spark,
        cluster,
        topic="orders",
        startingOffsets='{"broker-0": {"0": 10}}',
        endingOffsets='{"broker-0": {"0": 13}}',
    ).load()
    assert ids(frame) == ["m10", "m11", "m12"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "nowhere"}, "topic 'nowhere' does not exist"),
        ({}, "option topic"),
        ({"topic": "orders", "startingOffset": "1"}, "a known option"),
        ({"topic": "orders", "startingOffsets": '{"broker-0":{"0":99}}'}, "offset 99 of queue 0"),
    ],
)
def test_what_is_wrong_is_said(spark, cluster, options, said):
    cluster.topics["orders"] = [FakeQueue(numbered(5))]
    with pytest.raises(PySparkException, match=said):
        load(spark, cluster, **options).load().count()


def test_records_that_are_gone_fail_the_query(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(20), first=30)]
    assert load(spark, cluster, topic="orders").load().count() == 20
    old = {"topic": "orders", "startingOffsets": '{"broker-0":{"0":0}}'}
    with pytest.raises(PySparkException, match="offset 0 of queue 0"):
        load(spark, cluster, **old).load().count()
    assert load(spark, cluster, failOnDataLoss="false", **old).load().count() == 20


def test_a_server_that_stumbles_is_asked_again(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(20))]
    cluster.unavailable_calls = 2
    assert load(spark, cluster, topic="orders").load().count() == 20


def traced_records():
    """Trace messages of one delayed message's life, as the exporter writes them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.use(provider)
    try:
        sending = spans.start_send("orders", "m1", key="k", body_bytes=4)
        sending.stored("broker-0", 2, 7)
        frame = RecordBatch(records=[Record(properties=sending.properties)] * 3)
        services.record_store(
            "orders",
            "broker-0",
            2,
            7,
            3,
            start_ns=10,
            end_ns=20,
            records=frame.SerializeToString(),
        )
    finally:
        spans.use(None)
    sent, stored = exporter.get_finished_spans()
    return [Record(body=columns.encode([sent])), Record(body=columns.encode([stored, stored]))]


def test_traces_are_read_as_spans(spark, cluster):
    cluster.topics[TRACE_TOPIC] = [FakeQueue(traced_records(), 5)]
    frame = load(spark, cluster, "duemq-spans").load()
    rows = frame.orderBy("trace_offset", "trace_row").toArrow().to_pylist()
    assert [(row["trace_offset"], row["trace_row"]) for row in rows] == [(5, 0), (6, 0), (6, 1)]
    assert [row["operation"] for row in rows] == ["send", "store", "store"]
    assert (rows[0]["key"], rows[0]["queue"], rows[0]["queue_offset"]) == ("k", 2, 7)
    assert (rows[1]["start_ns"], rows[1]["duration_ns"], rows[1]["batch_count"]) == (10, 10, 3)
    narrow = load(spark, cluster, "duemq-spans").schema("topic string, trace_row int").load()
    assert narrow.toArrow().to_pylist()[0] == {"topic": "orders", "trace_row": 0}


@pytest.mark.parametrize(
    "fail_on_data_loss", [pytest.param("true", marks=pytest.mark.long), "false"]
)
def test_what_is_no_trace_is_set_aside_and_stops_nothing(
    spark, cluster, tmp_path, fail_on_data_loss
):
    good, more = traced_records()
    garbage = [Record(body=b"\xff"), Record(), Record(body=SpanBatch(rows=9).SerializeToString())]
    cluster.topics[TRACE_TOPIC] = [FakeQueue([good, *garbage, more], 5), FakeQueue([garbage[0]])]
    source = load(spark, cluster, "duemq-spans", failOnDataLoss=fail_on_data_loss)
    assert source.load().count() == 3
    rows = source.option("undecodable", "rows").load()
    landed = report.land(spark, rows, str(tmp_path))
    assert landed.spans.columns == [column.name for column in schema.SPANS]
    assert (landed.spans.count(), landed.undecodable) == (3, 4)
    quarantine = spark.read.parquet(str(tmp_path / "quarantine"))
    told = quarantine.orderBy("trace_queue", "trace_offset").toArrow().to_pylist()
    places = [tuple(row[name] for name in schema.PLACE) for row in told]
    assert places == [("broker-0", 0, offset) for offset in (6, 7, 8)] + [("broker-0", 1, 0)]
    assert [row["undecodable_body"] for row in told] == [g.body for g in (*garbage, garbage[0])]
    assert told[0]["undecodable_reason"].startswith("trace message broker-0/0/6 is no SpanBatch")
    page = Path(report.write(landed, str(tmp_path), now=datetime.now(UTC)).html).read_text()
    assert "4 messages of the trace topic could not" in page


def test_an_earlier_report_s_quarantine_does_not_stay(spark, cluster, tmp_path):
    for records, count in (([Record(body=b"\xff")], 1), (traced_records(), 0)):
        cluster.topics[TRACE_TOPIC] = [FakeQueue(records)]
        rows = load(spark, cluster, "duemq-spans", undecodable="rows").load()
        assert report.land(spark, rows, str(tmp_path)).undecodable == count
        assert spark.read.parquet(str(tmp_path / "quarantine")).count() == count


def test_the_formats_are_found_without_registering():
    root = Path(schema.__file__).parents[2]
    found = {module.name for module in pkgutil.iter_modules([str(root)])}
    assert {"pyspark_duemq", "pyspark_duemq_spans"} <= found
    import pyspark_duemq
    import pyspark_duemq_spans

    assert pyspark_duemq.DefaultSource.name() == "duemq"
    assert pyspark_duemq_spans.DefaultSource.name() == "duemq-spans"


def test_an_arrow_table_of_messages_is_what_the_schema_says(spark, cluster):
    cluster.topics["orders"] = [FakeQueue(numbered(1))]
    table = load(spark, cluster, topic="orders").load().toArrow()
    assert table.schema.field("properties").type == pa.map_(pa.string(), pa.string())
