"""The examples are run as their readers run them."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from duemq import Admin, Outgoing, Producer
from duemq_analytics.source import schema
from tests.cluster.harness import cluster, topic_name, until

__all__ = ["cluster"]

pytestmark = pytest.mark.spark

EXAMPLES = Path(__file__).parents[2] / "trace_analytics" / "examples"
RUN_S_MAX = 250


def test_every_example_is_run():
    assert [file.name for file in EXAMPLES.glob("*.py")] == ["remind_of_slow_orders.py"]


def land(lake, took_ms):
    """Callbacks of messages, as the landing job writes them."""
    rows = [
        {"message_id": each, "operation": "process", "duration_ns": ms * 1_000_000}
        for each, ms in took_ms.items()
    ]
    table = pa.Table.from_pylist(rows, schema=schema.arrow_schema(schema.SPANS))
    folder = lake / "spans" / "date=2026-11-22" / "hour=20"
    folder.mkdir(parents=True)
    parquet.write_table(table, folder / "a.parquet")


@pytest.mark.long
def test_slow_orders_are_reminded_of_once(cluster, tmp_path):
    orders, reminders = topic_name(), topic_name()
    with Producer(cluster.nameserver) as producer:
        sent = producer.send_many(orders, [Outgoing(b"o", key=f"k{i}") for i in range(3)])
        land(
            tmp_path, {sent[0].message_id: 1_500, sent[1].message_id: 10, sent[2].message_id: 2_000}
        )
    command = [sys.executable, str(EXAMPLES / "remind_of_slow_orders.py"), cluster.nameserver]
    command += [str(tmp_path), "--topic", orders, "--to", reminders, "--delay", "1s"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2000" in done.stdout
    with Admin(cluster.nameserver) as admin:
        until(lambda: len(admin.find_messages(reminders).messages) == 2)
        found = {each.key: each for each in admin.find_messages(reminders).messages}
    assert {key: json.loads(each.body) for key, each in found.items()} == {
        "k0": {"order": "k0", "took_ms": 1_500},
        "k2": {"order": "k2", "took_ms": 2_000},
    }
    assert {each.timer_key for each in found.values()} == {"k0", "k2"}
    assert all(each.tag == "slow" and each.due_ms for each in found.values())
