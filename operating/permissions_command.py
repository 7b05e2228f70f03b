"""`duemq permissions`: what a file of permissions says, before a service reads it."""

from __future__ import annotations

import click

from duemq_cli.exits import Exit
from duemq_cli.session import Session, pass_session, session_options
from duemq_server.serving.permissions.permissions_file import PermissionsFile
from duemq_server.serving.permissions.rights import AllowRule

COLUMNS = ("names", "right", "of")
PATTERNS = ("send", "receive", "groups", "schedules")
FLAGS = ("admin", "service")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--name",
    "names",
    multiple=True,
    help="What who has this name may do, and with others of --name.  [default: everybody]",
)
@session_options
@pass_session
def permissions(session: Session, file: str, names: tuple[str, ...]) -> Exit:
    """Check a FILE of permissions, and show who may do what.

    Asks no cluster.  The exit code is 2 if services would not take the file.  With --json, a line
    a right: names, right (send, receive, groups, schedules, admin, service), of (names of topics,
    groups or schedules, or how they begin and *).

    \b
    Examples:
      duemq permissions permissions.toml
      duemq permissions permissions.toml --name shop.example.org
    """
    entries = PermissionsFile(file).policy().entries
    rows = [row for entry in entries if not names or entry.has_any(names) for row in _rows(entry)]
    if not session.output.as_json:
        rows = [
            {
                name: ", ".join(value) if isinstance(value, list) else value
                for name, value in row.items()
            }
            for row in rows
        ]
    session.output.table(COLUMNS, rows, empty="they may do nothing")
    return Exit.OK


def _rows(entry: AllowRule) -> list[dict[str, object]]:
    rights = [(name, list(getattr(entry, name))) for name in PATTERNS]
    rights += [(name, ["*"]) for name in FLAGS if getattr(entry, name)]
    return [{"names": list(entry.names), "right": name, "of": of} for name, of in rights if of]
