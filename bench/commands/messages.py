"""Benchmarks of sending and consuming messages."""

from __future__ import annotations

from typing import Any

import click

from duemq_server.bench.commands.measured import (
    count,
    measured,
    rate,
    seconds,
    size,
)


@measured
@click.option(
    "--call",
    type=click.Choice(["list", "each"]),
    default="list",
    show_default=True,
    help="One call with an iterable, or one call and receipt a message.",
)
@count(1_000_000)
@size(1024)
def send(**options: Any) -> dict[str, Any]:
    """Durable sends of one producer."""
    return options


@measured
@count(10_000)
@size(1024)
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
@count(1_000_000)
@size(1024)
def consume(**options: Any) -> dict[str, Any]:
    """Draining a backlog with a push consumer."""
    return options


@measured
@rate(5_000)
@seconds(20.0)
@size(1024)
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
@count(1_000_000)
@size(1024)
def group(**options: Any) -> dict[str, Any]:
    """A group of processes draining a backlog."""
    return options


@measured
@_members
@rate(5_000)
@seconds(40.0)
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
@size(1024)
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
@count(1_000_000)
@size(1024)
def filter(**options: Any) -> dict[str, Any]:
    """How fast messages are looked through that a filter leaves out."""
    return options


@measured
@count(200_000)
@size(1024)
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
