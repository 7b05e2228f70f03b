"""What reading a topic costs: rows a CPU second, of all its processes, and a count's time.

One job reads a topic of a cluster that runs.  A small read comes first, so that the start of Spark
and of its Python workers is in no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duemq import Outgoing, Producer
from duemq.settings import default_nameserver
from duemq_analytics import session
from duemq_analytics.bench import Cost, SessionCpu, require, run_command

ROWS = 1_000_000
FEW_ROWS = 10_000
BODY_BYTES = 256
COLUMNS = "key string, body binary, store_ts timestamp"


def add_source_bench(commands: Any) -> None:
    """The commands `bench-source`, and the job that it measures, `read-rows`."""
    parser = commands.add_parser(
        "bench-source",
        help="measure reading a topic of made-up messages",
        description="Sends made-up messages to topics of its own on a cluster that runs and reads "
        "them: three columns, and a count.",
    )
    parser.add_argument("--body-bytes", type=int, default=BODY_BYTES, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=bench)
    job = commands.add_parser("read-rows", help="read a topic in two ways, once")
    job.add_argument("--topic", required=True)
    job.add_argument("--few", required=True, help="a small topic, which is read first")
    job.set_defaults(run=read_rows)
    for each in (parser, job):
        each.add_argument("--nameserver", metavar="HOST:PORT[,…]", default=default_nameserver())
        each.add_argument("--rows", type=int, default=ROWS, help="default: %(default)s")


def bench(arguments: argparse.Namespace, scratch: Path) -> int:
    """Sends and runs the job; answers the exit code."""
    topic = f"bench-source-{uuid.uuid4().hex[:8]}"
    parameters = {
        "rows": arguments.rows,
        "few_rows": FEW_ROWS,
        "body_bytes": arguments.body_bytes,
        "columns": COLUMNS,
        "processors": os.cpu_count(),
        "nameserver": arguments.nameserver,
        "topic": topic,
    }
    if not arguments.json:
        print(json.dumps({"parameters": parameters}, indent=1), flush=True)
    body = b"x" * arguments.body_bytes
    with Producer(arguments.nameserver) as producer:
        for name, rows in ((topic, arguments.rows), (f"{topic}-few", FEW_ROWS)):
            producer.send_many(name, (Outgoing(body, key=f"k{i}") for i in range(rows)))
    job = ["read-rows", "--nameserver", arguments.nameserver, "--topic", topic]
    figures, _ = run_command([*job, "--few", f"{topic}-few", "--rows", str(arguments.rows)])
    print(json.dumps({"event": "bench-source", **parameters, **figures}, indent=1))
    return 0


def read_rows(arguments: argparse.Namespace, scratch: Path) -> int:
    """The job."""
    spark = session.start("read-rows", scratch)

    def frame(topic: str, columns: str | None = None) -> Any:
        reader = spark.read.format("duemq").option("nameserver", arguments.nameserver)
        reader = reader if columns is None else reader.schema(columns)
        return reader.option("topic", topic).load()

    def three_columns(topic: str) -> None:
        frame(topic, COLUMNS).write.format("noop").mode("overwrite").save()

    require("messages counted", frame(arguments.few).count(), FEW_ROWS)
    three_columns(arguments.few)
    counted = 0

    def count() -> None:
        nonlocal counted
        counted = frame(arguments.topic).count()

    columns = _cost(lambda: three_columns(arguments.topic))
    counting = _cost(count)
    require("messages counted", counted, arguments.rows)
    spark.stop()
    figures = {
        "three_columns_rows_per_cpu_s": round(arguments.rows / columns.cpu_s),
        "three_columns_s": round(columns.seconds, 1),
        "count_s": round(counting.seconds, 1),
        "count_cpu_s": round(counting.cpu_s, 1),
    }
    print(json.dumps(figures))
    return 0


def _cost(run: Callable[[], None]) -> Cost:
    """Of a step, with all processes of this session."""
    meter = SessionCpu(os.getsid(0))
    began, before = time.perf_counter(), meter.seconds()
    run()
    return Cost(time.perf_counter() - began, max(0.01, meter.stop() - before))
