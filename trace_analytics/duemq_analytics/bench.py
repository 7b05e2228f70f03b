"""`bench` of `python -m duemq_analytics`: what landing and reporting cost.

Made-up spans are sent to a topic of its own; each step is the command that a user runs, a process
of its own, start of Spark included.  The floor, in the same run: the same messages decoded and
written by Arrow in one process, without Spark and without a broker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from duemq import Producer
from duemq.errors import Rejected
from duemq.settings import default_nameserver
from duemq.v1.trace_pb2 import SpanBatch, StringColumn
from duemq_analytics import java_archive, session
from duemq_analytics.lake.span_writer import write_messages

SPANS = 5_000_000
MORE_SPANS = 100_000
ROWS = 512
"""Spans of a message, as services send them when they are busy."""
STEP_NS = 720_000
"""From one span's start to the next: 5M spans are an hour."""
HOUR_NS = 3_600_000_000_000
T0_NS = time.time_ns() // HOUR_NS * HOUR_NS - HOUR_NS
"""The hour before: what started long before it was stored lies elsewhere in a lake."""
FLOOR_MESSAGES = 500
SEND_MESSAGES = 200
"""In one call."""
SAMPLE_S = 0.2

_OPERATIONS = ("send", "store", "receive", "process")
_KINDS = ("PRODUCER", "SERVER", "CLIENT", "CONSUMER")
_TOPICS = ("orders", "billing", "mail")


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    seconds: float
    cpu_s: float


def add_bench(commands: Any) -> None:
    """The command `bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure landing and reporting of made-up spans",
        description="Sends made-up spans to a topic of its own on a cluster that runs, lands them, "
        "makes the report, lands some more and makes it again.",
    )
    parser.add_argument("--nameserver", metavar="HOST:PORT[,…]", default=default_nameserver())
    parser.add_argument("--spans", type=int, default=SPANS, help="default: %(default)s")
    parser.add_argument("--more", type=int, default=MORE_SPANS, help="default: %(default)s")
    parser.add_argument(
        "--directory", metavar="DIR", default=tempfile.gettempdir(), help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=bench)


def bench(arguments: argparse.Namespace, scratch: Path) -> int:
    """Runs all steps; answers the exit code."""
    topic = f"bench-traces-{uuid.uuid4().hex[:8]}"
    parameters = {
        "spans": arguments.spans,
        "more_spans": arguments.more,
        "spans_per_message": ROWS,
        "processors": os.cpu_count(),
        "prepared": bool(java_archive.using(java_archive.place(session.require_java()))),
        "nameserver": arguments.nameserver,
        "topic": topic,
        "directory": arguments.directory,
    }
    if not arguments.json:
        print(json.dumps({"parameters": parameters}, indent=1), flush=True)
    with tempfile.TemporaryDirectory(prefix="lake-bench-", dir=arguments.directory) as directory:
        figures = _measure(arguments, topic, Path(directory))
    print(json.dumps({"event": "bench", **parameters, **figures}, indent=1))
    return 0


def _measure(arguments: argparse.Namespace, topic: str, directory: Path) -> dict[str, Any]:
    lake, page = directory / "lake", directory / "report"
    land = ["land", "--once", "--json", "--nameserver", arguments.nameserver]
    land += ["--output", str(lake), "--trace-topic", topic]
    report = ["report", "--json", "--lake", str(lake), "--output", str(page)]
    first = -(-arguments.spans // ROWS)
    floor = _floor(directory / "floor", min(first, FLOOR_MESSAGES))
    message_bytes = _send(arguments.nameserver, topic, range(first))
    landed, landing = run_command(land)
    told, reporting = run_command(report)
    more = -(-arguments.more // ROWS)
    _send(arguments.nameserver, topic, range(first, first + more))
    landed_more, landing_more = run_command(land)
    told_again, again = run_command(report)
    require("spans landed", landed["spans"] + landed_more["spans"], (first + more) * ROWS)
    require("spans reported", told["spans"], first * ROWS)
    require("spans reported again", told_again["spans"], (first + more) * ROWS)
    rate = first * ROWS / landing.cpu_s
    stored = sum(path.stat().st_size for path in (lake / "spans").rglob("*.parquet"))
    return {
        "message_bytes_per_span": round(message_bytes / ROWS, 1),
        "parquet_bytes_per_span": round(stored / ((first + more) * ROWS), 1),
        "floor_spans_per_cpu_s": round(floor),
        "landing_spans_per_cpu_s": round(rate),
        "landing_to_floor": round(rate / floor, 3),
        "landing_s": round(landing.seconds, 1),
        "landing_cpu_s": round(landing.cpu_s, 1),
        "report_from_landed_s": round(reporting.seconds, 1),
        "report_from_landed_cpu_s": round(reporting.cpu_s, 1),
        "topic_to_report_s": round(landing.seconds + reporting.seconds, 1),
        "topic_to_report_cpu_s": round(landing.cpu_s + reporting.cpu_s, 1),
        "more_landing_s": round(landing_more.seconds, 1),
        "more_landing_cpu_s": round(landing_more.cpu_s, 1),
        "incremental_report_s": round(again.seconds, 1),
        "incremental_report_cpu_s": round(again.cpu_s, 1),
    }


def _floor(directory: Path, messages: int) -> float:
    """Spans decoded and written a CPU second, by Arrow alone."""
    bodies = [message(number) for number in range(messages)]
    stored = datetime.now(UTC)
    began = time.process_time()
    rows = write_messages(
        directory, "floor", 0, (("b", 0, i, body, stored) for i, body in enumerate(bodies))
    )
    count = sum(row.get("rows", 0) for row in rows)
    return count / (time.process_time() - began)


def _send(nameserver: str, topic: str, numbers: range) -> int:
    """Sends the messages of these numbers; answers the bytes of the last one."""
    body = b""
    with Producer(nameserver) as producer:
        for begin in range(numbers.start, numbers.stop, SEND_MESSAGES):
            part = range(begin, min(begin + SEND_MESSAGES, numbers.stop))
            bodies = [message(number) for number in part]
            producer.send_many(topic, bodies)
            body = bodies[-1]
    return len(body)


def message(number: int) -> bytes:
    """A trace message of ROWS spans: four of each message's life, in turn."""
    random = np.random.default_rng(number)
    rows = np.arange(ROWS)
    batch = SpanBatch(schema_version=2, rows=ROWS)
    batch.trace_ids, batch.span_ids = random.bytes(16 * ROWS), random.bytes(8 * ROWS)
    batch.start_ns.extend((T0_NS + (number * ROWS + rows) * STEP_NS).tolist())
    batch.duration_ns.extend(random.lognormal(13, 1.2, ROWS).astype(np.int64).tolist())
    kind = rows % 4
    _put(batch.operation, _OPERATIONS, kind)
    _put(batch.kind, _KINDS, kind)
    _put(batch.name, tuple(f"{each} orders" for each in _OPERATIONS), kind)
    _put(batch.status, ("UNSET", "ERROR"), (random.random(ROWS) < 0.01).astype(int))
    _put(batch.service, ("application", "duemq-broker"), kind % 2)
    _put(batch.instance, ("application-1", "broker-0"), kind % 2)
    _put(batch.topic, _TOPICS, rows // 4 % len(_TOPICS))
    first = number * ROWS // 4
    ids = tuple(f"{first + i:028x}" for i in range(ROWS // 4))
    _put(batch.message_id, ("", *ids), np.where((kind == 0) | (kind == 3), rows // 4 + 1, 0))
    _put(batch.consumer_group, ("", "group"), (kind >= 2).astype(int))
    _put(batch.client_id, ("producer-1", "consumer-1"), kind // 2)
    _put(batch.broker, ("broker-0",), np.zeros(ROWS, int))
    batch.queue_id.extend((rows % 4).tolist())
    batch.queue_offset.extend((number * ROWS + rows).tolist())
    batch.body_bytes.extend([1_024] * ROWS)
    return batch.SerializeToString()


def _put(column: StringColumn, values: tuple[str, ...], rows: Any) -> None:
    column.values.extend(values)
    column.rows.extend(rows.tolist())


def run_command(arguments: list[str]) -> tuple[dict[str, Any], Cost]:
    """The last line that a command of ours prints, and what it cost with all its processes."""
    command = [sys.executable, "-m", "duemq_analytics", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # As `duemq trace` does: nothing is imported from the current folder.
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
    ) as process:
        meter = SessionCpu(process.pid)
        out, _ = process.communicate()
        seconds = time.perf_counter() - began
        cpu_s = meter.stop()
    lines = out.splitlines() or ["{}"]
    result: dict[str, Any] = json.loads(lines[-1])
    if process.returncode:
        raise Rejected(f"{arguments[0]} failed: {result.get('error', process.returncode)}")
    return result, Cost(seconds, cpu_s)


class SessionCpu:
    """CPU seconds of all processes of a session, those that end meanwhile included."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._seen: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """So far."""
        self._sample()
        return sum(list(self._seen.values()))

    def stop(self) -> float:
        """The seconds so far, for the last time."""
        self._ended.set()
        self._thread.join()
        return sum(self._seen.values())

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self._session:
                # Of itself alone: children are seen on their own.
                self._seen[int(entry.name)] = (int(fields[11]) + int(fields[12])) / tick


def require(what: str, found: int, expected: int) -> None:
    """Raises Rejected where a step has not done what it is measured for."""
    if found != expected:
        raise Rejected(f"{what}: {found:,}, not {expected:,}")
