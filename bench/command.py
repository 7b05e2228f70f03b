"""The command line of the benchmarks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import click

from duemq import tune_process
from duemq.protocol import due
from duemq_cli import interrupts, times
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_server.bench import suite
from duemq_server.bench.harness.results import Report
from duemq_server.bench.matrix import table
from duemq_server.replication.settings import REPLICAS_MAX

MIB = 1 << 20


@click.group()
def bench() -> None:
    """Measure a cluster: throughput, latency, groups, timers, restart, failover, idle cost.

    Each starts a cluster of its own (and removes it) unless told which by --nameserver, prints its
    parameters first, measures its floor in the same run (the bare disk, no queue), counts what
    arrived, and fails if anything was lost, came twice or came early.  Those that kill or weigh
    processes do so with a cluster of their own alone.

    \b
    Examples:
      duemq bench send --call each
      duemq bench lateness --rate 5000 --json
    """


def measured(function: Callable[..., dict[str, Any]]) -> click.Command:
    """A command whose function turns options into the benchmark's parameters."""
    name = function.__name__.replace("_", "-")

    @click.option("--data", metavar="DIR", help="Folder for its own cluster's data.")
    @click.option(
        "--brokers",
        type=click.IntRange(1, 16),
        default=suite.BROKERS.get(name, 1),
        show_default=True,
        help="Of its own.",
    )
    @click.option(
        "--replicas",
        type=click.IntRange(1, REPLICAS_MAX),
        default=suite.REPLICAS.get(name, 1),
        show_default=True,
        help="Of each broker of its own.",
    )
    @session_options
    @pass_session
    def command(
        session: Session, /, data: str | None, brokers: int, replicas: int, **options: Any
    ) -> Exit:
        # DUEMQ_NAMESERVER names the cluster that is worked with: no place for a million messages.
        nameserver = session.nameserver if session.nameserver_written else None
        if name in suite.OWN_CLUSTER_ONLY:
            nameserver = None
        place = suite.Place(nameserver, data, brokers, replicas)
        return _run(session, function(**options), place, name)

    command.__doc__ = function.__doc__
    command.__click_params__ += getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    return bench.command(name)(command)


def _run(session: Session, parameters: dict[str, Any], place: suite.Place, name: str) -> Exit:
    return _measure(session, parameters, place, name)[1]


def _measure(
    session: Session, parameters: dict[str, Any], place: suite.Place, name: str
) -> tuple[Report, Exit]:
    people = not session.json
    tune_process()  # as sdk/README.md advises who moves many messages
    with interrupts.handled(signal.SIGTERM, _interrupt):  # its cluster and their data go first
        report = suite.run(
            name, parameters, place, before=lambda r: r.print_parameters() if people else None
        )
    if people:
        report.print_figures()
    else:
        report.print_json()
    for fault in report.faults:
        session.output.note(f"FAILED: {fault}")
    return report, Exit.FAILED if report.faults else Exit.OK


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler: as Ctrl-C."""
    raise KeyboardInterrupt


def _count(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--count", type=click.IntRange(1), default=default, show_default=True, help="Messages."
    )


def _size(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--size",
        type=click.IntRange(8, 4 * MIB),
        default=default,
        show_default=True,
        help="Bytes of a body.",
    )


def _rate(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--rate", type=click.IntRange(1), default=default, show_default=True, help="A second."
    )


def _seconds(default: float) -> Callable[[Any], Any]:
    return click.option(
        "--seconds",
        type=click.FloatRange(1, 3600),
        default=default,
        show_default=True,
        help="How long.",
    )


def _others(what: str) -> Callable[[Any], Any]:
    return click.option("--others", type=click.IntRange(0), default=0, show_default=True, help=what)


@measured
@click.option(
    "--call",
    type=click.Choice(["list", "each"]),
    default="list",
    show_default=True,
    help="One call with an iterable, or one call and receipt a message.",
)
@_count(1_000_000)
@_size(1024)
def send(**options: Any) -> dict[str, Any]:
    """Durable sends of one producer."""
    return options


@measured
@_count(10_000)
@_size(1024)
def latency(**options: Any) -> dict[str, Any]:
    """One durable send at a time."""
    return options


@measured
@click.option(
    "--callback",
    type=click.Choice(["batch", "each"]),
    default="batch",
    show_default=True,
    help="One callback a list of messages, or one a message.",
)
@_count(1_000_000)
@_size(1024)
def consume(**options: Any) -> dict[str, Any]:
    """Draining a backlog with a push consumer."""
    return options


@measured
@_rate(5_000)
@_seconds(20.0)
@_size(1024)
def e2e(**options: Any) -> dict[str, Any]:
    """From send to callback, at a steady rate."""
    return options


def _members(function: Any) -> Any:
    """The shape of a group's benchmark."""
    members = click.option(
        "--members", type=click.IntRange(1, 64), default=3, show_default=True, help="Processes."
    )
    queues = click.option(
        "--queues", type=click.IntRange(1, 1024), default=48, show_default=True, help="In total."
    )
    return members(queues(function))


@measured
@_members
@_count(1_000_000)
@_size(1024)
def group(**options: Any) -> dict[str, Any]:
    """A group of processes draining a backlog."""
    return options


@measured
@_members
@_rate(5_000)
@_seconds(40.0)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(1, 3600),
    default=10.0,
    show_default=True,
    help="Seconds from one join or leave to the next.",
)
@click.option(
    "--session-timeout",
    "session_timeout_s",
    type=click.FloatRange(1, 300),
    default=10.0,
    show_default=True,
    help="Seconds of silence until a member counts as dead.",
)
@_size(1024)
def rebalance(**options: Any) -> dict[str, Any]:
    """A steady stream while members join, leave and die."""
    return options


@measured
@click.option(
    "--by",
    type=click.Choice(["tag", "sql"]),
    default="tag",
    show_default=True,
    help="A tag, or an expression over two properties.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=1_000,
    show_default=True,
    help="The filter takes one message in so many.",
)
@_count(1_000_000)
@_size(1024)
def filter(**options: Any) -> dict[str, Any]:
    """How fast messages are looked through that a filter leaves out."""
    return options


@measured
@_count(200_000)
@_size(256)
@click.option(
    "--spread",
    "spread_s",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Seconds within which the second phase's messages are due.",
)
@_others("Of another topic, a second, in the second phase; due a second later.")
def timers(**options: Any) -> dict[str, Any]:
    """How fast delayed messages are accepted and fired, and how late they come."""
    return options


@measured
@_rate(5_000)
@_seconds(20.0)
@_size(256)
@click.option(
    "--delay",
    metavar="TIME",
    default="3s",
    show_default=True,
    callback=times.delay,
    help="Each is due so much after it is sent: 5ms, 3s …",
)
@_others("Of other topics, a second, meanwhile; due a second later.")
def lateness(delay: str, **options: Any) -> dict[str, Any]:
    """How late delayed messages are at a steady rate of fires."""
    return {**options, "delay_ms": due.delay_ms(delay)}


@measured
@_count(1_000_000)
@_size(256)
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
@_size(256)
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
    place = suite.Place(directory=data)
    rows, exits = [], []
    for count in pending:
        report, code = _measure(session, {"pending": count, **options}, place, "timers-matrix")
        rows.append((count, report.figures))
        exits.append(code)
    for line in table.lines(rows):
        session.output.line(line)
    return max(exits)


@measured
@_count(1_000_000)
@click.option(
    "--near",
    type=click.IntRange(1_000, 300_000),
    default=100_000,
    show_default=True,
    help="Further messages, due within the minute.",
)
@_size(64)
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
@_seconds(5.0)
def cancel(**options: Any) -> dict[str, Any]:
    """How fast pending messages are cancelled, and how late that makes others."""
    return options


@measured
@click.option(
    "--log-bytes",
    type=click.IntRange(MIB),
    default=5 * 10**9,
    show_default=True,
    help="Size of the broker's log.",
)
@_size(1024)
def restart(**options: Any) -> dict[str, Any]:
    """A broker's restart after kill -9 with a large log."""
    return options


@measured
@_seconds(30.0)
def idle(**options: Any) -> dict[str, Any]:
    """Memory and CPU of each process when nothing happens."""
    return options


@measured
@_rate(500)
@click.option(
    "--times",
    type=click.IntRange(1, 1_000),
    default=10,
    show_default=True,
    help="A way of dying: SIGTERM, kill -9, SIGSTOP.",
)
@click.option(
    "--min-insync",
    type=click.IntRange(0, REPLICAS_MAX),
    default=1,
    show_default=True,
    help="Setting of the brokers.  More than --replicas less one: who is left waits for the dead.",
)
@_size(256)
def failover(**options: Any) -> dict[str, Any]:
    """How long messages stand still when the replica that leads dies."""
    return options


@measured
@click.option(
    "--log-bytes",
    type=click.IntRange(MIB),
    default=10**9,
    show_default=True,
    help="What the replica must get.",
)
@_rate(200)
@_seconds(10.0)
@_size(1024)
@click.option(
    "--min-insync",
    type=click.IntRange(0, REPLICAS_MAX),
    default=2,
    show_default=True,
    help="Setting of the brokers; --replicas must be more.",
)
@click.option(
    "--catch-up-rate",
    type=click.IntRange(0),
    default=64 * MIB,
    show_default=True,
    help="Setting of the brokers, bytes a second; 0: no limit.",
)
def catch_up(**options: Any) -> dict[str, Any]:
    """What sends feel of a replica whose disk is new."""
    return options


@measured
@_count(200_000)
@_size(1024)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=4,
    show_default=True,
    help="How often each share is measured, in turn.",
)
def tracing(**options: Any) -> dict[str, Any]:
    """What tracing costs while none, a tenth or all of the messages are sampled."""
    return options
