"""`duemq bench`, how its commands are made, and the options that many of them have."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import click

from duemq import tune_process
from duemq.errors import Internal
from duemq_cli import interrupts
from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_server.bench import suite
from duemq_server.bench.harness.results import Report
from duemq_server.local_cluster import ClusterFailed
from duemq_server.replication.settings import REPLICAS_MAX

MIB = 1 << 20


@click.group()
def bench() -> None:
    """Measure a cluster: throughput, latency, groups, timers, restart, failover, idle cost.

    Each starts a cluster of its own (and removes it) unless told which by --nameserver, where it
    removes the topics that it makes, also after Ctrl-C (--keep-topics: leaves them), prints its
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
    own_only = name in suite.OWN_CLUSTER_ONLY

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
    @_keep_topics_option(own_only)
    @session_options
    @pass_session
    def command(
        session: Session,
        /,
        data: str | None,
        brokers: int,
        replicas: int,
        keep_topics: bool = False,
        **options: Any,
    ) -> Exit:
        place = suite.BenchPlace(nameserver_of(session, name), data, brokers, replicas, keep_topics)
        return measure(session, function(**options), place, name)[1]

    command.__doc__ = function.__doc__
    command.__click_params__ += getattr(function, "__click_params__", [])
    return bench.command(name)(command)


def _keep_topics_option(own_only: bool) -> Callable[[Any], Any]:
    if own_only:
        return lambda command: command
    return click.option(
        "--keep-topics", is_flag=True, help="Leave the topics that it makes at --nameserver."
    )


def nameserver_of(session: Session, name: str) -> str | None:
    """Of the cluster that a benchmark measures; None: one of its own.

    DUEMQ_NAMESERVER names the cluster that is worked with: no place for a million messages.
    """
    if not session.nameserver_written:
        return None
    if name in suite.OWN_CLUSTER_ONLY:
        session.output.note(f"{name} measures a cluster of its own, not that of --nameserver")
        return None
    return session.nameserver


def measure(
    session: Session, parameters: dict[str, Any], place: suite.BenchPlace, name: str
) -> tuple[Report, Exit]:
    """Runs a benchmark and prints what it found."""
    people = not session.json
    left: list[str] = []

    def tell_left(text: str) -> None:
        session.output.error(text)
        left.append(text)

    tune_process()  # as sdk/README.md advises who moves many messages
    try:
        with interrupts.handled(signal.SIGTERM, _interrupt):  # its cluster and data go first
            report = suite.run(
                name,
                parameters,
                place,
                before=lambda r: r.print_parameters() if people else None,
                tell_left=tell_left,
            )
    except ClusterFailed as error:  # its own
        raise Internal(str(error)) from error
    if people:
        report.print_figures()
    else:
        report.print_json()
    for fault in report.faults:
        session.output.note(f"FAILED: {fault}")
    return report, Exit.FAILED if report.faults or left else Exit.OK


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler: as Ctrl-C."""
    raise KeyboardInterrupt


def count(default: int) -> Callable[[Any], Any]:
    """How many messages."""
    return click.option(
        "--count", type=click.IntRange(1), default=default, show_default=True, help="Messages."
    )


def size(default: int) -> Callable[[Any], Any]:
    """How large they are."""
    return click.option(
        "--size",
        type=click.IntRange(8, 4 * MIB),
        default=default,
        show_default=True,
        help="Bytes of a body.",
    )


def rate(default: int) -> Callable[[Any], Any]:
    """How many a second."""
    return click.option(
        "--rate", type=click.IntRange(1), default=default, show_default=True, help="A second."
    )


def seconds(default: float) -> Callable[[Any], Any]:
    """For how long."""
    return click.option(
        "--seconds",
        type=click.FloatRange(1, 3600),
        default=default,
        show_default=True,
        help="How long.",
    )


def others(what: str) -> Callable[[Any], Any]:
    """How many others meanwhile; `what` says which."""
    return click.option("--others", type=click.IntRange(0), default=0, show_default=True, help=what)
