"""A topic as a DataFrame, SQL over it and the landed traces, and what comes of it sent back.

Orders whose callback took long get a reminder a while later, one for each order: its key is the
timer key, so that a second run replaces the reminders of the first that still wait.

    duemq trace land --output ./lake --once
    python remind_of_slow_orders.py 127.0.0.1:9876 ./lake --delay 1h
"""

import argparse
import tempfile
from pathlib import Path

from duemq_analytics import session

parser = argparse.ArgumentParser()
parser.add_argument("nameserver")
parser.add_argument("lake", help="where `duemq trace land` has landed the spans")
parser.add_argument("--topic", default="orders")
parser.add_argument("--to", default="reminders")
parser.add_argument("--slow-ms", type=int, default=1_000)
parser.add_argument("--delay", default="1h")
wanted = parser.parse_args()

with tempfile.TemporaryDirectory() as scratch:
    # spark-submit's session, or one on this machine; SparkSession.builder does as well.
    spark = session.start("reminders", Path(scratch))

    # From the topic to a table.
    orders = spark.read.format("duemq").option("nameserver", wanted.nameserver)
    orders.option("topic", wanted.topic).load().createOrReplaceTempView("orders")

    # The lake is Parquet, by date and hour.
    spark.read.parquet(f"{wanted.lake}/spans").createOrReplaceTempView("spans")

    slow = spark.sql(f"""
        SELECT orders.key, max(spans.duration_ns) DIV 1000000 AS took_ms
        FROM orders JOIN spans USING (message_id)
        WHERE spans.operation = 'process' AND spans.duration_ns >= {wanted.slow_ms * 1_000_000}
        GROUP BY orders.key
    """)
    slow.orderBy("key").show()

    # And back: a row is a message, a column what it says of it.
    reminders = slow.selectExpr(
        "to_json(struct(key AS order, took_ms)) AS body",
        "key",
        "'slow' AS tag",
        f"'{wanted.delay}' AS delay",
        "key AS timer_key",
    )
    writer = reminders.write.format("duemq").mode("append")
    writer.option("nameserver", wanted.nameserver).option("topic", wanted.to).save()
    spark.stop()
