"""The option --key-prefix: some of a topic's delayed messages."""

from __future__ import annotations

import click

from duemq.errors import InvalidArgument


def _checked(_: click.Context, param: click.Parameter, value: str | None) -> str:
    """Empty if it is not given.  What is given and empty, as of a variable that is not set, would
    be the whole topic: raises InvalidArgument."""
    if value == "":
        raise InvalidArgument(
            f"{param.opts[-1]} is empty, which would be the whole topic: leave it out for that",
            field=param.name or "",
            value=value,
            limit="the beginning of timer keys, one character at least",
        )
    return value or ""


key_prefix_option = click.option(
    "--key-prefix", metavar="P", callback=_checked, help="Whose timer_key begins so."
)
