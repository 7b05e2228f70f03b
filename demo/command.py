"""`duemq demo`."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from duemq import tune_process
from duemq.errors import DuemqError
from duemq.protocol import checks
from duemq_cli.exits import Exit
from duemq_server.demo.day import SPEED_DEFAULT
from duemq_server.demo.run import Day, Options, ReportFailed, sentences
from duemq_server.local_cluster import ClusterFailed


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--speed",
    type=click.FloatRange(1, 1_000_000),
    default=SPEED_DEFAULT,
    show_default=True,
    help="How much faster than real the day goes; the default makes it a minute.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="For the cluster's data and the report; what an earlier run left there is removed.",
)
@click.option(
    "--replicated",
    is_flag=True,
    help="Two replicas of each broker and of the timer service; those that lead die with their"
    " disks.",
)
@click.option("--inject-loss", is_flag=True, help="Drop one delivery before the audit: it fails.")
@click.option("--report/--no-report", default=True, help="The Spark report of the traces.")
def demo(speed: float, output: Path, replicated: bool, inject_loss: bool, report: bool) -> None:
    """A real day of departures through the whole system, with an audit at its end.

    Every departure of 10 July 2013 from New York's airports becomes a message due at its scheduled
    time; two groups of consumers receive them; half-way a broker and the timer service are killed.
    Flights that left hours late are moved to that time, some change their gate, LaGuardia's are
    held over the outage, and a cron reminder runs beside.  The exit code is 0 if the books balance:
    the demo's own (no flight lost, twice, early by its newest time, with an old gate, or gone while
    it was held), and the timer service's.
    """
    tune_process()  # as sdk/README.md advises: four consumers share this process's interpreter
    console = Console()
    log = output / "demo.log"
    _clear(output, log)
    # What the SDK says of the outage would tear the live table.
    logging.basicConfig(filename=log, filemode="w", level=logging.INFO)
    try:
        audit = Day(
            Options(speed, output, inject_loss, report, 2 if replicated else 1), console
        ).run()
    except (DuemqError, ClusterFailed, ReportFailed, subprocess.TimeoutExpired) as error:
        console.print(f"[bold red]The demo failed:[/] {error}", soft_wrap=True)
        sys.exit(Exit.FAILED)
    for line in sentences(audit):
        console.print(line, soft_wrap=True, highlight=False)
    for problem in audit.problems:
        console.print(f"[bold red]{problem}[/]", soft_wrap=True)
    if report:
        console.print(f"report: {output / 'report' / 'report.html'}", soft_wrap=True)
    if audit.problems:
        console.print("[bold red]The books do not balance.[/]")
        sys.exit(Exit.FAILED)
    console.print("[bold green]The books balance: nothing lost, twice or early.[/]")


def _clear(output: Path, log: Path) -> None:
    """Makes the folder, and removes what an earlier run left in it."""
    folders = [output / name for name in ("cluster", "report")]
    there = [str(folder) for folder in folders if folder.exists()]
    if there and not log.is_file():
        raise checks.wrong("output", str(output), f"another folder: no run has left {there[0]}")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
