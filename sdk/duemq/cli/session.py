"""The options that every command has: where the nameserver is, and how to print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from duemq import telemetry
from duemq.cli.output import Output

NAMESERVER_DEFAULT = "127.0.0.1:9876"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Session:
    """What the options say.  They may stand before or after the command's name."""

    nameserver: str = NAMESERVER_DEFAULT
    # Whether an address was given, by option or environment.
    nameserver_given: bool = False
    json: bool = False

    @property
    def output(self) -> Output:
        """Where results and errors go."""
        return Output(self.json)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Traces what the command does, when DUEMQ_TRACING says so."""
        exporter = os.environ.get("DUEMQ_TRACING", "off")
        if exporter == "off":
            yield
            return
        telemetry.configure("duemq-cli", exporter, nameserver=self.nameserver)
        try:
            yield
        finally:
            telemetry.shutdown()


def _set_nameserver(context: click.Context, _: click.Parameter, value: str | None) -> None:
    session = context.ensure_object(Session)
    if value:
        session.nameserver = value
        session.nameserver_given = True


def _set_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    session = context.ensure_object(Session)
    session.json = session.json or value


def session_options(command: F) -> F:
    """Adds `--nameserver` and `--json` to a command."""
    nameserver = click.option(
        "--nameserver",
        metavar="HOST:PORT[,…]",
        envvar="DUEMQ_NAMESERVER",
        show_envvar=True,
        expose_value=False,
        is_eager=True,
        callback=_set_nameserver,
        help=f"Where the nameservers are.  [default: {NAMESERVER_DEFAULT}]",
    )
    json = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_json,
        help="Print JSON Lines, one object a line, errors too.",
    )
    return nameserver(json(command))


def yes_option(command: F) -> F:
    """Adds `--yes` to a command that takes something away."""
    return click.option(
        "--yes", is_flag=True, help="Do not ask.  Nobody is asked without a terminal."
    )(command)


def confirmed(session: Session, question: str, *, yes: bool) -> bool:
    """Asks, where there is a terminal to ask at; True without one, with `--yes` or `--json`."""
    if yes or session.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    if click.confirm(question, err=True):
        return True
    session.output.note("nothing was done")
    return False


pass_session = click.make_pass_decorator(Session, ensure=True)
