"""`duemq context`: clusters with a name."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from duemq.settings import Tls, default_tls
from duemq_cli import completion, contexts
from duemq_cli.session import Session, pass_session, session_options, tls_options


@click.group()
def context() -> None:
    """Clusters with a name: the current one is used where no --nameserver is given.

    --nameserver comes first, then DUEMQ_NAMESERVER, then the current context.

    \b
    Example:
      duemq context add staging ns-0.staging:9876,ns-1.staging:9876
      duemq context use staging
    """


@context.command()
@click.argument("name")
@click.argument("address", metavar="HOST:PORT[,…]")
@tls_options
@session_options
@pass_session
def add(session: Session, /, name: str, address: str) -> None:
    """Name a cluster, or give NAME another address.  The first one is the current.

    Files of TLS are kept with the name, with their whole paths.  Nothing is asked of the cluster.
    With --json: context, nameserver, tls, current.
    """
    known = contexts.load()
    known.add(name, address, _whole(default_tls()))
    contexts.save(known)
    _told(session, known, name)


@context.command()
@click.argument("name", shell_complete=completion.contexts)
@session_options
@pass_session
def use(session: Session, /, name: str) -> None:
    """Use NAME from now on.  With --json: context, nameserver, tls, current."""
    known = contexts.load()
    known.use(name)
    contexts.save(known)
    _told(session, known, name)


@context.command("list")
@session_options
@pass_session
def list_contexts(session: Session, /) -> None:
    """List the contexts.  With --json, a line each: context, nameserver, tls, current."""
    known = contexts.load()
    columns = ("context", "nameserver", "tls", "current")
    if session.json:
        rows = [_row(known, name) for name in sorted(known.by_name)]
    else:
        rows = [
            {
                **_row(known, name),
                "tls": "yes" if known.by_name[name].tls else "",
                "current": "*" if name == known.current else "",
            }
            for name in sorted(known.by_name)
        ]
    session.output.table(columns, rows, empty="no contexts: duemq context add NAME HOST:PORT")


@context.command()
@click.argument("name", shell_complete=completion.contexts)
@session_options
@pass_session
def rm(session: Session, /, name: str) -> None:
    """Forget NAME.  With --json: context, removed."""
    known = contexts.load()
    known.remove(name)
    contexts.save(known)
    session.output.record({"context": name, "removed": True}, f"context {name} removed")


def _whole(tls: Tls | None) -> Tls | None:
    """Commands run in any folder."""
    if tls is None:
        return None
    paths = {name: path and os.path.abspath(path) for name, path in asdict(tls).items()}
    return Tls(**paths)


def _row(known: contexts.Contexts, name: str) -> dict[str, object]:
    return {
        "context": name,
        "nameserver": known.by_name[name].nameserver,
        "tls": known.by_name[name].tls is not None,
        "current": name == known.current,
    }


def _told(session: Session, known: contexts.Contexts, name: str) -> None:
    note = "  (in use)" if name == known.current else ""
    session.output.record(
        _row(known, name), f"context {name}: {known.by_name[name].nameserver}{note}"
    )
