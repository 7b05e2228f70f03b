"""What the aggregations say about spans made up here; no broker."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from duemq_analytics.answers import errors as kinds
from duemq_analytics.answers.buckets import WHOLE_S, bucketed
from duemq_analytics.answers.end_to_end import end_to_end, journeys
from duemq_analytics.answers.lateness import lateness
from duemq_analytics.answers.operations import operations
from duemq_analytics.page.waterfalls import KINDS
from duemq_analytics.source import schema
from duemq_analytics.waterfall.places import PLACES_MAX, Place
from duemq_analytics.waterfall.spans_of import frame_spans

pytestmark = pytest.mark.spark

MS = 1_000_000
T0_MS = 1_700_000_040_000  # on a minute
MINUTE = datetime.fromtimestamp(T0_MS / 1_000, UTC)
ALWAYS = [(0, 2**63 - 1)]


def span(operation, at_ms, **columns):
    """A span of the topic `orders` that starts `at_ms` after the minute and takes 1 ms."""
    start_ms = T0_MS + at_ms
    row = dict.fromkeys(column.name for column in schema.SPANS)
    return row | {
        "name": f"{operation} orders",
        "operation": operation,
        "topic": "orders",
        "start_ns": start_ms * MS,
        "start_ts": datetime.fromtimestamp(start_ms / 1_000, UTC),
        "duration_ns": MS,
        "status": "UNSET",
        "attempt": 0,
        **columns,
    }


def send(message_id, at_ms, **columns):
    return span("send", at_ms, message_id=message_id, **columns)


def process(message_id, at_ms, group="g", **columns):
    return span("process", at_ms, message_id=message_id, consumer_group=group, **columns)


def frame(spark, *rows):
    return spark.createDataFrame(
        pa.Table.from_pylist(list(rows), schema=schema.arrow_schema(schema.SPANS))
    )


def rows_of(table):
    keys = ("bucket_ts", "topic", "operation", "stage", "consumer_group")
    rows = table.toArrow().to_pylist()
    return sorted(rows, key=lambda row: [str(row.get(key) or "") for key in keys])


def test_operations_are_counted_per_topic_group_and_minute(spark):
    table = operations(
        frame(
            spark,
            *[send(f"m{i}", i * 10, duration_ns=(i + 1) * MS) for i in range(100)],
            send("m100", 60_000, status="ERROR"),
            span("store", 5, batch_count=64, body_bytes=65_536),
            span("store", 6, batch_count=36, topic="other"),
            process("m0", 5, "a"),
            process("m0", 6, "b", status="ERROR"),
        )
    )
    rows = rows_of(table)
    told = [
        (
            (row["bucket_ts"] - MINUTE).total_seconds(),
            row["topic"],
            row["operation"],
            row["consumer_group"],
            row["spans"],
            row["messages"],
            row["errors"],
            row["error_rate"],
        )
        for row in rows
    ]
    assert told == [
        (0, "orders", "process", "a", 1, 1, 0, 0.0),
        (0, "orders", "process", "b", 1, 1, 1, 1.0),
        (0, "orders", "send", None, 100, 100, 0, 0.0),
        (0, "orders", "store", None, 1, 64, 0, 0.0),
        (0, "other", "store", None, 1, 36, 0, 0.0),
        (60, "orders", "send", None, 1, 1, 1, 1.0),
    ]
    sent = next(row for row in rows if row["operation"] == "send")
    assert (sent["p50_ms"], sent["p95_ms"], sent["p99_ms"], sent["max_ms"]) == (50, 95, 99, 100)


def test_spans_of_other_instrumentation_are_left_out(spark):
    foreign = span(None, 0, topic=None, name="GET /")
    assert rows_of(operations(frame(spark, foreign))) == []


def test_what_a_frame_says_of_its_end_stops_no_look_for_a_message(spark):
    most = 2**63 - 1
    lies = {"queue": 0, "broker": "b", "batch_count": 9}
    rows = [
        span("receive", 1, queue_offset=0, attributes=[("duemq.last_offset", "soon")], **lies),
        span("receive", 2, queue_offset=most, **lies),
        span("receive", 3, queue_offset=4, **lies),
    ]
    places = [Place("orders", False, "b", 0, offset) for offset in (4, most)]
    found = frame_spans(frame(spark, *rows), [("a" * 32, "b" * 16)], places, ALWAYS)
    assert [row["queue_offset"] for row in found.toArrow().to_pylist()] == [0, 4]


def test_all_places_of_the_messages_of_a_page_are_looked_at_at_once(spark):
    rows = [span("store", 1, queue=0, queue_offset=0, broker="b", batch_count=9)]
    places = [
        Place("orders", False, "b", 0, offset) for offset in range(sum(KINDS.values()) * PLACES_MAX)
    ]
    assert frame_spans(frame(spark, *rows), [("a" * 32, "b" * 16)], places, ALWAYS).count() == 1


def test_frames_of_other_times_are_not_of_the_messages(spark):
    rows = [span("store", at, parent_span_id="b" * 16, trace_id="a" * 32) for at in range(9)]
    at = [(T0_MS + ms) * MS for ms in range(9)]
    times = [(at[1], at[2]), (at[6] + 1, at[8] - 1)]
    found = frame_spans(frame(spark, *rows), [("a" * 32, "b" * 16)], [], times)
    # To the microsecond, as Spark knows times.
    assert [row["start_ns"] for row in found.toArrow().to_pylist()] == [at[n] for n in (1, 2, 6, 7)]


def test_end_to_end_is_from_the_send_to_the_first_callback_of_each_group(spark):
    table = journeys(
        frame(
            spark,
            send("m1", 0),
            process("m1", 40, "a"),
            process("m1", 7, "b", status="ERROR"),
            process("m1", 90, "b", attempt=1, duration_ns=5 * MS),
            send("m2", 10),
            process("m2", 15, "a"),
            process("m2", 25, "a"),
            send("never", 20),
            process("unsent", 30, "a"),
        )
    )
    told = {
        (row["message_id"], row["consumer_group"]): (
            (row["first_ns"] - row["sent_ns"]) / MS,
            row["calls"],
            row["retries"],
            row["failed"],
            row["processed_ms"],
        )
        for row in rows_of(table)
    }
    assert told == {
        ("m1", "a"): (40, 1, 0, False, 1),
        ("m1", "b"): (7, 2, 1, True, 5),
        ("m2", "a"): (5, 2, 0, False, 1),
    }
    summed = {row["consumer_group"]: row for row in rows_of(end_to_end(table))}
    assert (summed["a"]["messages"], summed["a"]["repeated"]) == (2, 1)
    assert (summed["a"]["max_ms"], summed["b"]["p50_ms"]) == (40, 7)
    assert summed["a"]["bucket_ts"] == MINUTE


def heard(message_id, at_ms, member, **columns):
    """A call in broadcast."""
    own = {"client_id": member, "attributes": [("duemq.broadcast", "true")]}
    return process(message_id, at_ms, "news", **own, **columns)


def test_members_that_get_everything_have_a_journey_each_and_nothing_repeated(spark):
    calls = [heard("m1", at, name) for at, name in ((5, "one"), (7, "two"), (9, "three"))]
    table = end_to_end(journeys(frame(spark, send("m1", 0), *calls, heard("m1", 90, "two"))))
    (row,) = rows_of(table)
    assert (row["messages"], row["repeated"], row["max_ms"]) == (3, 1, 9)


def test_any_number_of_calls_may_have_one_message_s_id(spark):
    """Gathered, millions of them were more than Java had memory for."""
    plan = journeys(frame(spark, send("m1", 0)))._jdf.queryExecution().toString()
    assert "Window" in plan
    assert "collect_list" not in plan


def test_a_retry_s_due_time_is_not_the_message_s(spark):
    retried = {"attempt": 1, "due_ms": T0_MS + 10_050, "lateness_ms": 2}
    table = journeys(
        frame(
            spark,
            *[send(f"m{i}", i) for i in range(3)],
            *[process(f"m{i}", i + 5, "a", status="ERROR") for i in range(2)],
            *[process(f"m{i}", 10_052 + i, "a", **retried) for i in range(2)],
            process("m2", 7, "a"),
            *[process(f"m{i}", i + 9, "b") for i in range(3)],
        )
    )
    summed = {row["consumer_group"]: row for row in rows_of(end_to_end(table))}
    assert {name: (row["messages"], row["repeated"]) for name, row in summed.items()} == {
        "a": (3, 2),
        "b": (3, 0),
    }
    assert (summed["a"]["max_ms"], summed["b"]["max_ms"]) == (5, 9)


def test_a_delayed_message_stays_one_when_its_send_had_no_answer(spark):
    due = {"due_ms": T0_MS + 5_000, "lateness_ms": 3}
    spans = frame(spark, send("m1", 0, status="ERROR"), process("m1", 5_003, **due))
    assert rows_of(end_to_end(journeys(spans))) == []


def test_delayed_messages_have_lateness_and_no_end_to_end_time(spark):
    due = T0_MS + 5_000
    spans = frame(
        spark,
        send("m1", 0, due_ms=due),
        span("fire", 5_000, batch_count=99, due_ms=due, lateness_ms=1),
        span("fire", 5_000, due_ms=due, lateness_ms=80),
        span("fire", 5_000, due_ms=due, status="ERROR"),
        process("m1", 5_003, due_ms=due, lateness_ms=3),
        process("m1", 9_000, due_ms=due, lateness_ms=4_000, attempt=1),
    )
    assert rows_of(end_to_end(journeys(spans))) == []
    fire, seen = rows_of(lateness(spans))
    assert (fire["stage"], fire["consumer_group"], fire["messages"]) == ("fire", None, 100)
    assert (fire["p50_ms"], fire["p95_ms"], fire["max_ms"], fire["early"]) == (1, 1, 80, 0)
    assert 1 <= fire["p99_ms"] < 80
    assert (seen["stage"], seen["consumer_group"], seen["messages"]) == ("process", "g", 1)
    assert (seen["p50_ms"], seen["max_ms"], seen["bucket_ts"]) == (3, 3, MINUTE)


def test_an_early_fire_is_counted_with_its_messages(spark):
    early = span("fire", 0, batch_count=5, due_ms=T0_MS, lateness_ms=-2)
    (row,) = rows_of(lateness(frame(spark, early), [WHOLE_S]))
    assert set(row.pop("curve")) == {-2.0}
    assert row == {
        "bucket_s": WHOLE_S,
        "bucket_ts": None,
        "topic": "orders",
        "stage": "fire",
        "consumer_group": None,
        "messages": 5,
        "early": 5,
        "p50_ms": -2.0,
        "p95_ms": -2.0,
        "p99_ms": -2.0,
        "max_ms": -2.0,
    }


def test_a_row_is_in_one_bucket_of_each_length(spark):
    spans = frame(spark, span("send", 61_500))
    rows = spans.select(bucketed(spans.start_ts, [1, 60, WHOLE_S])).toArrow().to_pylist()
    assert [(row["bucket_s"], row["bucket_ts"]) for row in rows] == [
        (1, MINUTE + timedelta(seconds=61)),
        (60, MINUTE + timedelta(seconds=60)),
        (WHOLE_S, None),
    ]


def test_errors_are_counted_by_kind_and_the_rarest_are_one(spark, monkeypatch):
    monkeypatch.setattr(kinds, "KINDS_MAX", 2)
    failed = {"status": "ERROR"}
    rows = [process(f"a{i}", i, error_type="Timeout", **failed) for i in range(3)]
    rows += [process(f"b{i}", i, error_type="x" * 1_000, **failed) for i in range(2)]
    rows += [process("c", 8, error_type="Rare", **failed), process("d", 9, **failed)]
    rows += [span("store", 1, error_type="Full", **failed), process("e", 60_000, **failed)]
    rows += [process("f", 2, error_type="Not", status="OK"), send("g", 2, topic=None, **failed)]
    table = kinds.errors(frame(spark, *rows)).orderBy("bucket_ts", "operation", "error_type")
    told = [
        (r["operation"], r["error_type"], r["errors"], r["message_id"], r["last_ts"] - MINUTE)
        for r in table.toArrow().to_pylist()
    ]
    ms = timedelta(milliseconds=1)
    assert told == [
        ("process", "(others)", 2, "d", 9 * ms),
        ("process", "Timeout", 3, "a2", 2 * ms),
        ("process", "x" * kinds.KIND_CHARACTERS, 2, "b1", ms),
        ("store", "(others)", 1, None, ms),
        ("process", None, 1, "e", 60_000 * ms),
    ]
