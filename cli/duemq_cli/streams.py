"""The standard streams, each of which may be closed: a service manager, or `<&-`, does that."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import BinaryIO, TextIO

import click


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sits at it."""
    return stream is not None and stream.isatty()


def can_be_asked() -> bool:
    """Whether there is a terminal to ask at."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def input_bytes() -> BinaryIO:
    """Standard input.  Raises UsageError if there is none."""
    if sys.stdin is None:
        raise click.UsageError("Standard input is closed: there is nothing to read.")
    return sys.stdin.buffer


def writes_utf8(text: str) -> bool:
    """Whether standard output writes this as UTF-8, which programs expect."""
    try:
        return text.encode(getattr(sys.stdout, "encoding", None) or "utf-8") == text.encode()
    except UnicodeEncodeError:
        return False


def write_all() -> None:
    """From now on what standard output has no character for is written out, and is no error."""
    if sys.stdout is not None and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def give_up(stream: TextIO | None) -> None:
    """What could not be written there is not tried again, also as the interpreter ends."""
    if stream is None:
        return
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # it may be no file
        os.dup2(nowhere.fileno(), stream.fileno())
