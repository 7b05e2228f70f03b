"""Commands that other distributions bring: entry points of the group `duemq.commands`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

GROUP = "duemq.commands"
# A command of ours → the distribution that brings it.
KNOWN = {
    "up": "duemq-server",
    "replica": "duemq-server",
    "broker": "duemq-server",
    "permissions": "duemq-server",
    "bench": "duemq-server",
    "demo": "duemq-server",
    "trace": "duemq-analytics",
}


def names() -> list[str]:
    """Of all that are known or installed, ours first."""
    return list(dict.fromkeys([*KNOWN, *sorted(_installed())]))


def load(name: str) -> click.Command | None:
    """The command of that name; one that says what to install if it is not here; None: no such.

    Raises TypeError for an entry point that is no command of click.
    """
    found = _installed().get(name)
    if found is None:
        return _missing(name, f"pip install {KNOWN[name]}") if name in KNOWN else None
    try:
        command = found.load()
    except ModuleNotFoundError as error:
        return _missing(name, f"{error.name} is not installed")
    if not isinstance(command, click.Command):
        raise TypeError(f"entry point {name} = {found.value} of {GROUP} is no click.Command")
    return command


def _installed() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP)}


def _missing(name: str, remedy: str) -> click.Command:
    distribution = KNOWN.get(name, "another distribution")

    def refuse() -> None:
        raise click.ClickException(f"duemq {name} needs {distribution}: {remedy}")

    return click.Command(
        name,
        callback=refuse,
        help=f"Needs {distribution}: {remedy}.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
