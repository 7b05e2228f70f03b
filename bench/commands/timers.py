"""Benchmarks of delayed messages."""

from __future__ import annotations

from typing import Any

import click

from duemq.protocol import due
from duemq_cli import times
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_server.bench import suite
from duemq_server.bench.commands.measured import (
    bench,
    count,
    measure,
    measured,
    nameserver_of,
    others,
    rate,
    seconds,
    size,
)
from duemq_server.bench.matrix import table


@measured
@count(200_000)
@size(256)
@click.option(
    "--spread",
    "spread_s",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Seconds within which the second phase's messages are due.",
)
@others("Of another topic, a second, in the second phase; due a second later.")
def timers(**options: Any) -> dict[str, Any]:
    """How fast delayed messages are accepted and fired, and how late they come."""
    return options


@measured
@rate(5_000)
@seconds(20.0)
@size(256)
@click.option(
    "--delay",
    metavar="TIME",
    default="3s",
    show_default=True,
    callback=times.delay,
    help="Each is due so much after it is sent: 5ms, 3s …",
)
@others("Of other topics, a second, meanwhile; due a second later.")
def lateness(delay: str, **options: Any) -> dict[str, Any]:
    """How late delayed messages are at a steady rate of fires."""
    return {**options, "delay_ms": due.delay_ms(delay)}


@measured
@count(1_000_000)
@size(256)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Due within."
)
def pending(**options: Any) -> dict[str, Any]:
    """Memory and restart of the timer service with a large backlog."""
    return options


@bench.command("timers-matrix")
@click.option(
    "--pending",
    type=click.IntRange(1, 100_000_000),
    multiple=True,
    default=(10_000, 1_000_000, 10_000_000),
    show_default=True,
    help="Far timers that wait: a row.  May be given several times.",
)
@click.option(
    "--fires",
    type=click.IntRange(1, 10_000_000),
    default=100_000,
    show_default=True,
    help="More, all due at one moment.",
)
@click.option(
    "--rate",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Of the trickle in another topic, a second.",
)
@size(256)
@click.option(
    "--days",
    type=click.FloatRange(0.11, 3650),
    default=30,
    show_default=True,
    help="Due within, from 0.1 days on: 0.1417 is an hour.",
)
@click.option("--data", metavar="DIR", help="Folder for its own clusters' data.")
@session_options
@pass_session
def timers_matrix(
    session: Session, /, pending: tuple[int, ...], data: str | None, **options: Any
) -> Exit:
    """The timer service with 10 thousand, a million and ten million timers pending.

    A row each, on a cluster of its own: accepted a second until the timer service has them, fired a
    second, lateness of another topic's trickle meanwhile, its memory at rest and at its peak, the
    seconds after kill -9 until it accepts and until the first due one is fired, and bytes of index
    a timer on the disk.  In the table, × is the ratio to the first row.  With --json, an object a
    line.  Ten million take minutes, and some GB of disk.

    \b
    Example:
      duemq bench timers-matrix --pending 10000 --pending 100000
    """
    name = "timers-matrix"
    place = suite.BenchPlace(nameserver_of(session, name), data)
    rows, exits = [], []
    for far in pending:
        report, code = measure(session, {"pending": far, **options}, place, name)
        rows.append((far, report.figures))
        exits.append(code)
    for line in table.lines(rows):
        session.output.line(line)
    return max(exits)


@measured
@count(1_000_000)
@click.option(
    "--near",
    type=click.IntRange(1_000, 300_000),
    default=100_000,
    show_default=True,
    help="Further messages, due within the minute.",
)
@size(64)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Due within."
)
@click.option(
    "--list-size",
    type=click.IntRange(1, 10_000),
    default=10_000,
    show_default=True,
    help="Handles of a list.",
)
@click.option(
    "--callers",
    type=click.IntRange(1, 1_000),
    default=16,
    show_default=True,
    help="At once, of one handle each.",
)
@seconds(5.0)
def cancel(**options: Any) -> dict[str, Any]:
    """How fast pending messages are cancelled, and how late that makes others."""
    return options
