"""Names for the shell to complete: topics, groups, contexts.

A key press does not wait: what the cluster has not told in TIMEOUT_S is not offered, and errors are
not shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import click

from duemq.cli import contexts as known_contexts
from duemq.cli.session import Session, known
from duemq.errors import DuemqError

TIMEOUT_S = 1.0

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def topics(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the cluster; those of DueMQ itself once a % is typed."""
    return _asked(
        context,
        incomplete,
        lambda session: [
            each.name
            for each in known(lambda: session.admin().topics(system=incomplete.startswith("%")))[0]
        ],
    )


def groups(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the cluster."""
    return _asked(
        context,
        incomplete,
        lambda session: [each.name for each in known(lambda: session.admin().groups())[0]],
    )


def contexts(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the file."""
    try:
        return [name for name in known_contexts.load().by_name if name.startswith(incomplete)]
    except DuemqError:
        return []


def _asked(
    context: click.Context, incomplete: str, ask: Callable[[Session], list[str]]
) -> list[str]:
    given = context.find_object(Session) or Session()
    session = Session(address=given.address, timeout_s=TIMEOUT_S)
    found: list[str] = []

    def run() -> None:
        try:
            found.extend(name for name in ask(session) if name.startswith(incomplete))
        except (DuemqError, OSError):
            return

    # A daemon: the process ends whatever it still waits for.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return sorted(found)
