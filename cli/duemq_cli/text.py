"""Text for people: cells, tables, times, and what others wrote, made harmless.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.cells import cell_len

# What moves the cursor, changes colours or hides text: control characters, and those that turn the
# direction of writing.  And what cannot be written: bytes of the command line that are no text.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """Text of others for a terminal, in one line: what it could do there is written out."""
    return _UNSAFE.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def body_text(body: bytes) -> str:
    """A body for a terminal."""
    return printable(body.decode(errors="backslashreplace"))


def shown(value: Any) -> str:
    """A table cell for people."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return printable(str(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table; nothing is cut or broken, however narrow the terminal."""
    header = [column.replace("_", " ") for column in columns]
    cells = [[shown(value) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["─" * width for width in widths], *cells]
    return [
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def duration(ms: int) -> str:
    """A length of time as people read it."""
    if ms < 1_000:
        return f"{ms} ms"
    seconds = ms // 1_000
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 10 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def age(ms: int | None) -> str | None:
    """How long something has waited; None: nothing does, or nobody asked."""
    if ms is not None and ms < 0:
        return "unreadable"
    return duration(ms) if ms else None


def exact_duration(ms: int) -> str:
    """A length of time as the command line takes it: `90s`, `2h`."""
    for unit, length in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % length == 0:
            return f"{ms // length}{unit}"
    return f"{ms}ms"


def local_time(epoch_ms: int) -> str:
    """Epoch milliseconds as people read them, in the local time zone."""
    if not epoch_ms:
        return "-"
    seconds, ms = divmod(epoch_ms, 1000)  # a float would be a millisecond less at times
    try:
        moment = datetime.fromtimestamp(seconds).replace(microsecond=ms * 1000).astimezone()
    except (ValueError, OverflowError):  # it is the year 10000 here by then
        moment = _EPOCH + timedelta(seconds=seconds, milliseconds=ms)
    return moment.isoformat(sep=" ", timespec="milliseconds")
