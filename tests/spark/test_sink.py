"""Frames written to topics of a cluster that runs."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException

from duemq import Admin, Outgoing, Producer
from duemq_analytics.sink.write_options import ROW_ID_PROPERTY
from tests.cluster.harness import cluster, topic_name, until

pytestmark = pytest.mark.spark

__all__ = ["cluster"]


def load(spark, cluster, topic):
    reader = spark.read.format("duemq").option("nameserver", cluster.nameserver)
    return reader.option("topic", topic).load()


def rows(spark, cluster, topic):
    return [row.asDict(recursive=True) for row in load(spark, cluster, topic).collect()]


def write(frame, cluster, mode="append", **options):
    writer = frame.write.format("duemq").mode(mode).option("nameserver", cluster.nameserver)
    writer.options(**options).save()


def row_ids(found):
    return [row["properties"][ROW_ID_PROPERTY] for row in found]


@pytest.mark.long
def test_rows_become_messages_and_can_be_written_again(spark, cluster):
    first, second = topic_name(), topic_name()
    frame = spark.sql(
        "SELECT concat('b', id) AS body, concat('k', id) AS key, 'red' AS tag,"
        " concat('o', id % 3) AS ordering_key, map('n', string(id)) AS properties"
        " FROM range(0, 2500, 1, 3)"
    )
    write(frame, cluster, topic=first)
    found = rows(spark, cluster, first)
    assert sorted(row["body"] for row in found) == sorted(b"b%d" % i for i in range(2500))
    row = next(row for row in found if row["body"] == b"b7")
    assert (row["key"], row["tag"], row["ordering_key"]) == ("k7", "red", "o1")
    assert row["properties"]["n"] == "7"
    assert len(set(row_ids(found))) == 2500
    assert {each.split("-")[1] for each in row_ids(found)} == {"0", "1", "2"}
    write(load(spark, cluster, first), cluster, topic=second)
    again = rows(spark, cluster, second)
    kept = ("body", "key", "tag", "ordering_key")
    assert Counter(tuple(row[name] for name in kept) for row in again) == Counter(
        tuple(row[name] for name in kept) for row in found
    )
    assert set(row_ids(again)).isdisjoint(row_ids(found))


@pytest.mark.long
def test_the_topic_may_be_a_column(spark, cluster):
    one, other = topic_name(), topic_name()
    frame = spark.createDataFrame(
        [(one, b"1"), (other, b"2"), (one, b"3")], "topic string, body binary"
    )
    write(frame, cluster, rowIdProperty="")
    assert sorted(row["body"] for row in rows(spark, cluster, one)) == [b"1", b"3"]
    assert [row["body"] for row in rows(spark, cluster, other)] == [b"2"]
    assert all(not row["properties"] for row in rows(spark, cluster, one))


@pytest.mark.long
def test_delayed_rows_come_at_their_time(spark, cluster):
    topic = topic_name()
    at = datetime.now(UTC) + timedelta(seconds=2)
    frame = spark.createDataFrame(
        [("at", at, None, "t-1"), ("after", None, "50ms", None), ("now", None, None, None)],
        "body string, deliver_at timestamp, delay string, timer_key string",
    )
    write(frame, cluster, topic=topic)
    until(lambda: load(spark, cluster, topic).count() == 3)
    found = {row["body"]: row for row in rows(spark, cluster, topic)}
    assert found[b"at"]["timer_key"] == "t-1"
    assert found[b"at"]["due_ts"].replace(tzinfo=UTC) >= at
    assert found[b"at"]["store_ts"] >= found[b"at"]["due_ts"]
    assert found[b"after"]["due_ts"] is not None
    assert found[b"now"]["due_ts"] is None
    write(spark.sql("SELECT 'soon' AS body, INTERVAL 0 MINUTE AS delay"), cluster, topic=topic)
    until(lambda: load(spark, cluster, topic).where("body = 'soon'").count() == 1)


@pytest.mark.parametrize(
    ("select", "options", "said"),
    [
        ("'x' AS body", {}, "column topic .missing."),
        ("1 AS body", {"topic": "t"}, "column body .int. is not of type binary or string"),
        ("'x' AS body, 1.5D AS price", {"topic": "t"}, "column price"),
        ("'x' AS body", {"topic": "t", "acks": "1"}, "option acks"),
        (
            "if(id = 3, null, 'x') AS body",
            {"topic": "t"},
            "column body of row 3 of partition 0: null is not allowed",
        ),
        (
            "'x' AS body, if(id = 2, 'soon', '1h') AS delay",
            {"topic": "t"},
            "column delay of row 2 of partition 0: .*'soon'",
        ),
        (
            "'x' AS body, repeat('k', id * 20000) AS key",
            {"topic": "t"},
            "row 2 of partition 0: key, tag, ordering key and properties have",
        ),
    ],
)
def test_what_is_wrong_is_said(spark, cluster, select, options, said):
    with pytest.raises(PySparkException, match=said):
        write(spark.sql(f"SELECT {select} FROM range(0, 5, 1, 1)"), cluster, **options)


def test_only_appending_is_possible(spark, cluster):
    frame = spark.sql("SELECT 'x' AS body")
    with pytest.raises(PySparkException, match="can only be appended to"):
        write(frame, cluster, "overwrite", topic="t")
    for mode in ("errorifexists", "ignore"):
        with pytest.raises(PySparkException, match=r"(?i)append"):
            write(frame, cluster, mode, topic="t")


@pytest.mark.long
def test_a_write_that_is_named_has_the_same_ids_again(spark, cluster):
    topic = topic_name()
    frame = spark.sql("SELECT string(id) AS body FROM range(0, 40, 1, 2)")
    for _ in range(2):
        write(frame, cluster, topic=topic, writeId="night-7")
    found = rows(spark, cluster, topic)
    assert len(found) == 80
    by_id = Counter((row["properties"][ROW_ID_PROPERTY], row["body"]) for row in found)
    assert set(by_id.values()) == {2}
    assert len({row_id for row_id, _ in by_id}) == 40
    assert all(each.startswith("night-7-") for each in row_ids(found))


@pytest.mark.long
def test_a_micro_batch_that_runs_again_has_the_same_ids(spark, cluster, tmp_path):
    """Of two partitions one is sent, the other fails: the restart sends both."""
    source, target = topic_name(), topic_name()
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(source, queues=1)
        admin.create_topic(target, queues=1)
        messages = [Outgoing(b"%d" % i, ordering_key=str(i)) for i in range(200)]
        places = [each.broker for each in producer.send_many(source, messages)]
    assert set(places) == {"broker-0", "broker-1"}
    poison = b"%d" % places.index("broker-1")
    nameserver, mark = cluster.nameserver, tmp_path / "failed-once"
    other = places.count("broker-0")

    def stumble(body):
        from duemq import Admin
        from tests.cluster.harness import until

        if bytes(body) == poison and not mark.exists():
            with Admin(nameserver) as admin:
                until(
                    lambda: sum(q.max_offset for q in admin.describe_topic(target).queues) >= other,
                    timeout_s=200,
                )
            mark.touch()
            raise RuntimeError("the first time")
        return bytes(body)

    def run():
        from pyspark.sql.functions import udf

        reader = spark.readStream.format("duemq").option("nameserver", nameserver)
        frame = reader.option("topic", source).schema("body binary").load()
        frame = frame.select(udf(stumble, "binary", useArrow=False)("body").alias("body"))
        writer = frame.writeStream.format("duemq").option("nameserver", nameserver)
        writer = writer.option("topic", target).option("checkpointLocation", str(tmp_path / "c"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    with pytest.raises(PySparkException, match="the first time"):
        run()
    query = run()
    found = rows(spark, cluster, target)
    by_id = Counter((row["properties"][ROW_ID_PROPERTY], row["body"]) for row in found)
    assert {body for _, body in by_id} == {b"%d" % i for i in range(200)}
    assert len(by_id) == len({row_id for row_id, _ in by_id}) == 200
    assert len(found) == 200 + other
    assert all(row_id.startswith(f"{query.id}-0-") for row_id, _ in by_id)


@pytest.mark.parametrize(
    ("mode", "said"), [("complete", "can only be appended to"), ("update", r"(?i)update")]
)
def test_a_stream_can_only_append(spark, cluster, tmp_path, mode, said):
    frame = spark.readStream.format("rate").load().groupBy("value").count()
    frame = frame.selectExpr("string(value) AS body")
    writer = frame.writeStream.format("duemq").option("nameserver", cluster.nameserver)
    writer = writer.option("topic", "t").option("checkpointLocation", str(tmp_path))
    with pytest.raises(PySparkException, match=said):
        writer.outputMode(mode).start().awaitTermination()
