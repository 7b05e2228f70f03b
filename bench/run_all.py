"""`python -m duemq_server.bench.run_all FILE` runs every benchmark; `make bench` calls it."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click

from duemq import tune_process
from duemq.errors import DuemqError
from duemq_cli.exits import Exit
from duemq_server.bench import suite
from duemq_server.bench.harness.results import Report
from duemq_server.local_cluster import ClusterFailed

# Benchmark, its parameters, and those of them that --scale reduces.
PLAN: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("send", {"call": "list", "count": 2_000_000, "size": 1024}, ("count",)),
    ("send", {"call": "each", "count": 1_000_000, "size": 1024}, ("count",)),
    ("latency", {"count": 10_000, "size": 1024}, ("count",)),
    ("e2e", {"rate": 5_000, "seconds": 20.0, "size": 1024}, ("seconds",)),
    ("consume", {"callback": "batch", "count": 1_000_000, "size": 1024}, ("count",)),
    ("consume", {"callback": "each", "count": 1_000_000, "size": 1024}, ("count",)),
    ("group", {"members": 3, "queues": 48, "count": 1_000_000, "size": 1024}, ("count",)),
    (
        "rebalance",
        {
            "members": 3,
            "queues": 48,
            "rate": 5_000,
            "seconds": 40.0,
            "every_s": 10.0,
            "session_timeout_s": 10.0,
            "size": 1024,
        },
        ("seconds",),
    ),
    ("filter", {"by": "tag", "keep": 1_000, "count": 1_000_000, "size": 1024}, ("count",)),
    ("filter", {"by": "sql", "keep": 1_000, "count": 500_000, "size": 1024}, ("count",)),
    ("timers", {"count": 200_000, "size": 256, "spread_s": 5.0, "others": 0}, ("count",)),
    ("timers", {"count": 1_000_000, "size": 256, "spread_s": 1.0, "others": 50}, ("count",)),
    *(
        ("lateness", {"rate": rate, "seconds": 20.0, "size": 256, **more}, ("seconds",))
        for rate, more in (
            (5_000, {"delay_ms": 3_000, "others": 0}),
            (50, {"delay_ms": 3_000, "others": 0}),
            (50, {"delay_ms": 5, "others": 0}),
            (50, {"delay_ms": 5, "others": 500}),
        )
    ),
    ("pending", {"count": 1_000_000, "size": 256, "days": 30}, ("count",)),
    *(
        (
            "timers-matrix",
            {"pending": pending, "fires": 100_000, "rate": 50, "size": 256, "days": 30},
            ("pending",),
        )
        for pending in (10_000, 1_000_000)
    ),
    (
        "cancel",
        {
            "count": 1_000_000,
            "near": 100_000,
            "size": 64,
            "days": 30,
            "list_size": 10_000,
            "callers": 16,
            "seconds": 5.0,
        },
        ("count",),
    ),
    ("restart", {"log_bytes": 5 * 10**9, "size": 1024}, ("log_bytes",)),
    ("idle", {"seconds": 30.0}, ("seconds",)),
    ("failover", {"rate": 500, "times": 10, "size": 256, "min_insync": 1}, ("times",)),
    (
        "catch-up",
        {
            "log_bytes": 10**9,
            "rate": 200,
            "seconds": 10.0,
            "size": 1024,
            "min_insync": 2,
            "catch_up_rate": 64 << 20,
        },
        ("log_bytes",),
    ),
    ("tracing", {"count": 200_000, "size": 1024, "rounds": 4}, ("count",)),
]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--scale",
    type=click.FloatRange(0.001, 1.0),
    default=1.0,
    show_default=True,
    help="Reduces counts and durations, for a quick look.",
)
@click.option("--only", metavar="NAME", multiple=True, help="Only these benchmarks.")
@click.option("--data", metavar="DIR", help="Folder for the clusters' data.")
def main(file: Path, scale: float, only: tuple[str, ...], data: str | None) -> None:
    """Run every benchmark, each on a cluster of its own, and write FILE (JSON).

    A benchmark that fails is noted in FILE and makes the exit code 1; the others still run.
    """
    tune_process()  # as sdk/README.md advises who moves many messages
    results = []
    for bench, parameters, scaled in PLAN:
        if only and bench not in only:
            continue
        reduced = {
            n: type(v)(max(1, v * scale)) if n in scaled else v for n, v in parameters.items()
        }
        results.append(_result(bench, reduced, data))
        file.write_text(json.dumps({"machine": _machine(), "results": results}, indent=2) + "\n")
    sys.exit(Exit.FAILED if any(result.get("faults") for result in results) else Exit.OK)


def _result(bench: str, parameters: dict[str, Any], data: str | None) -> dict[str, Any]:
    try:
        place = suite.BenchPlace(
            directory=data,
            brokers=suite.BROKERS.get(bench, 1),
            replicas=suite.REPLICAS.get(bench, 1),
        )
        report = suite.run(bench, parameters, place, before=Report.print_parameters)
    except (DuemqError, ClusterFailed) as error:
        click.echo(f"  FAILED: {error}")
        return {"bench": bench, "parameters": parameters, "faults": [str(error)]}
    report.print_figures()
    for fault in report.faults:
        click.echo(f"  FAILED: {fault}")
    return report.as_dict() | {"faults": report.faults}


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
