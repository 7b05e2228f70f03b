"""Benchmarks of the services: at rest, after a restart, when a replica dies or is new."""

from __future__ import annotations

from typing import Any

import click

from duemq_server.bench.commands.measured import (
    MIB,
    measured,
    rate,
    seconds,
    size,
)
from duemq_server.replication.settings import REPLICAS_MAX


@measured
@click.option(
    "--log-bytes",
    type=click.IntRange(MIB),
    default=5 * 10**9,
    show_default=True,
    help="Size of the broker's log.",
)
@size(1024)
def restart(**options: Any) -> dict[str, Any]:
    """A broker's restart after kill -9 with a large log."""
    return options


@measured
@seconds(30.0)
def idle(**options: Any) -> dict[str, Any]:
    """Memory and CPU of each process when nothing happens."""
    return options


@measured
@rate(500)
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
@size(256)
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
@rate(200)
@seconds(10.0)
@size(1024)
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
