"""Every benchmark runs, small, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from duemq_server.bench.matrix.table import COLUMNS
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, rows

LATENCY = {"p50_ms", "p99_ms", "max_ms"}
RATE = {"msgs_per_s", "floor_msgs_per_s", "floor_ratio"}
COUNTS = {"lost", "twice"}
pytestmark = pytest.mark.long

REBALANCE = ("--rate", "200", "--seconds", "2", "--every", "1", "--session-timeout", "1")


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        (("send", "--count", "3000"), RATE | COUNTS),
        (("send", "--call", "each", "--count", "3000"), RATE | COUNTS),
        (("latency", "--count", "50"), RATE | LATENCY | COUNTS),
        (("consume", "--count", "3000"), RATE | COUNTS),
        (("consume", "--callback", "each", "--count", "3000"), RATE | COUNTS),
        (("e2e", "--rate", "200", "--seconds", "1"), LATENCY | COUNTS),
        (("filter", "--count", "3000", "--keep", "100"), RATE | COUNTS),
        (("filter", "--by", "sql", "--count", "3000", "--keep", "100"), RATE | COUNTS),
        (("group", "--count", "3000"), RATE | COUNTS),
        (
            [
                "rebalance",
                "--rate",
                "200",
                "--seconds",
                "2",
                "--every",
                "1",
                "--session-timeout",
                "1",
            ],
            {"leave_ms", "death_ms", "repeated"} | LATENCY | COUNTS,
        ),
        (
            ("timers", "--count", "1000", "--spread", "1", "--others", "20"),
            {"accepted_per_s", "fired_per_s", "early", "drained_s", "disordered", "others_p99_ms"}
            | LATENCY
            | COUNTS,
        ),
        (
            ("lateness", "--rate", "200", "--seconds", "1", "--delay", "20ms", "--others", "40"),
            {"early", "where_p50_ms"} | LATENCY | COUNTS,
        ),
        (
            (
                "cancel",
                "--count",
                "2000",
                "--near",
                "1000",
                "--list-size",
                "100",
                "--seconds",
                "1",
            ),
            {"far_lists_per_s", "far_singly_per_s", "near_lists_per_s", "near_singly_per_s"},
        ),
    ],
    ids=lambda value: None if isinstance(value, set) else " ".join(value),
)
def test_a_benchmark_reports_its_figures(
    cluster: EmbeddedCluster, arguments: tuple[str, ...], figures: set[str]
) -> None:
    (report,) = rows(duemq(cluster.nameserver, "bench", *arguments, "--json"))
    assert report["bench"] == arguments[0]
    assert report["parameters"]
    assert figures <= set(report["figures"])
    assert all(report["figures"].get(name, 0) == 0 for name in ("lost", "twice", "early"))


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        (("pending", "--count", "2000"), {"rss_mb", "restart_s"}),
        (("restart", "--log-bytes", "2000000"), {"restart_s", "lost", "twice"}),
        (("idle", "--seconds", "1"), {"rss_mb", "cpu_percent"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_benchmark_with_its_own_cluster_reports_its_figures(
    arguments: tuple[str, ...], figures: set[str]
) -> None:
    (report,) = rows(duemq("127.0.0.1:1", "bench", *arguments, "--json"))
    assert figures <= set(report["figures"])


MATRIX = ("--pending", "2000", "--pending", "10000", "--fires", "1000")


def test_the_matrix_has_an_object_a_row() -> None:
    reports = rows(duemq("127.0.0.1:1", "bench", "timers-matrix", *MATRIX, "--json"))
    assert [report["parameters"]["pending"] for report in reports] == [2_000, 10_000]
    for report in reports:
        assert set(report["figures"]) >= set(COLUMNS) | COUNTS | {"early"}
        assert all(report["figures"][name] == 0 for name in ("lost", "twice", "early"))


def test_the_suite_writes_its_file_and_can_be_reduced(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "duemq_server.bench.run_all", str(file)]
    done = subprocess.run(
        [*command, "--only", "latency", "--scale", "0.01", "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert result["bench"] == "latency"
    assert result["parameters"]["count"] == 100
    assert result["faults"] == []
    assert set(result["figures"]) >= RATE | LATENCY | COUNTS
