"""What the sink costs: rows a CPU second, of all its processes.

Two jobs write rows with a key and a row id to a topic of a cluster that runs; their difference is
the rows without the start of Spark.  Beside it stands the floor: a producer that sends the same
messages without Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from duemq import Outgoing, Producer
from duemq.settings import default_nameserver
from duemq_analytics import session
from duemq_analytics.bench import run_command
from duemq_analytics.sink.write_options import ROW_ID_PROPERTY

ROWS = 1_000_000
FEW_ROWS = 10_000
BODY_BYTES = 200
PARTITIONS = 2


def add_sink_bench(commands: Any) -> None:
    """The commands `bench-sink`, and the job that it measures, `write-rows`."""
    parser = commands.add_parser(
        "bench-sink",
        help="measure writing made-up rows to a topic",
        description="Writes made-up rows to topics of its own on a cluster that runs.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=bench)
    job = commands.add_parser("write-rows", help="write made-up rows to a topic, once")
    job.add_argument("--topic", required=True)
    job.set_defaults(run=write_rows)
    for each in (parser, job):
        each.add_argument("--nameserver", metavar="HOST:PORT[,…]", default=default_nameserver())
        each.add_argument("--rows", type=int, default=ROWS, help="default: %(default)s")
        each.add_argument("--body-bytes", type=int, default=BODY_BYTES, help="default: %(default)s")


def bench(arguments: argparse.Namespace, scratch: Path) -> int:
    """Runs the jobs and the floor; answers the exit code."""
    topic = f"bench-sink-{uuid.uuid4().hex[:8]}"
    parameters = {
        "rows": arguments.rows,
        "few_rows": FEW_ROWS,
        "body_bytes": arguments.body_bytes,
        "partitions": PARTITIONS,
        "processors": os.cpu_count(),
        "nameserver": arguments.nameserver,
        "topic": topic,
    }
    if not arguments.json:
        print(json.dumps({"parameters": parameters}, indent=1), flush=True)
    job = ["write-rows", "--nameserver", arguments.nameserver, "--topic", topic]
    job += ["--body-bytes", str(arguments.body_bytes)]
    _, few = run_command([*job, "--rows", str(FEW_ROWS)])
    _, many = run_command([*job, "--rows", str(arguments.rows)])
    floor_s = _floor(arguments, topic)
    figures = {
        "floor_rows_per_cpu_s": round(arguments.rows / floor_s),
        "rows_per_cpu_s": round(arguments.rows / many.cpu_s),
        "rows_per_cpu_s_without_start": round(
            (arguments.rows - FEW_ROWS) / max(0.01, many.cpu_s - few.cpu_s)
        ),
        "few_cpu_s": round(few.cpu_s, 1),
        "cpu_s": round(many.cpu_s, 1),
        "seconds": round(many.seconds, 1),
    }
    print(json.dumps({"event": "bench-sink", **parameters, **figures}, indent=1))
    return 0


def write_rows(arguments: argparse.Namespace, scratch: Path) -> int:
    """The job."""
    spark = session.start("write-rows", scratch)
    frame = spark.range(0, arguments.rows, 1, PARTITIONS).selectExpr(
        f"repeat('x', {arguments.body_bytes}) AS body", "concat('k', id) AS key"
    )
    writer = frame.write.format("duemq").mode("append")
    writer.option("nameserver", arguments.nameserver).option("topic", arguments.topic).save()
    spark.stop()
    print(json.dumps({"event": "written", "rows": arguments.rows}))
    return 0


def _floor(arguments: argparse.Namespace, topic: str) -> float:
    """CPU seconds of this process for the same messages without Spark."""
    body = b"x" * arguments.body_bytes
    began = time.process_time()
    with Producer(arguments.nameserver) as producer:
        messages = (
            Outgoing(body, key=f"k{i}", properties={ROW_ID_PROPERTY: f"floor-0-{i}"})
            for i in range(arguments.rows)
        )
        producer.send_many(topic, messages)
    return time.process_time() - began
