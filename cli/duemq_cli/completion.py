"""Names for the shell to complete: topics, groups, contexts.

A key press does not wait: what the cluster has not told in TIMEOUT_S is not offered, and errors are
not shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import click

from duemq.administering.blocking import Admin
from duemq.descriptions import GroupSummary, TopicSummary
from duemq.errors import DuemqError
from duemq_cli import contexts as known_contexts
from duemq_cli.session import Session, known

TIMEOUT_S = 1.0


def topics(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the cluster; those of DueMQ itself once a % is typed."""
    system = incomplete.startswith("%")
    return _asked(context, incomplete, lambda admin: admin.topics(system=system))


def groups(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the cluster."""
    return _asked(context, incomplete, lambda admin: admin.groups())


def contexts(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the file."""
    try:
        return [name for name in known_contexts.load().by_name if name.startswith(incomplete)]
    except DuemqError:
        return []


def _asked(
    context: click.Context,
    incomplete: str,
    ask: Callable[[Admin], Sequence[TopicSummary | GroupSummary]],
) -> list[str]:
    given = context.find_object(Session) or Session()
    session = Session(address=given.address, timeout_s=TIMEOUT_S)
    found: list[str] = []
    told = threading.Event()

    def run() -> None:
        try:
            with session.admin() as admin:
                summaries, _ = known(lambda: ask(admin))
                found.extend(each.name for each in summaries if each.name.startswith(incomplete))
                told.set()
        except (DuemqError, OSError):
            told.set()

    # A daemon: the process ends whatever it still waits for.
    threading.Thread(target=run, daemon=True).start()
    told.wait(TIMEOUT_S)
    return sorted(found)
