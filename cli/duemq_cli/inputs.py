"""Where `duemq send` gets its messages from: one argument, lines, a CSV or a JSON Lines file.

Pure but for reading the file.  Every entry of the input yields one `InputLine`, in order; one that
cannot be read yields its error instead, so that the rest is sent and the output keeps the order.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from duemq.errors import InvalidArgument

# Of one line of a file: a body of the broker's greatest default size, escaped as JSON, fits.
LINE_BYTES_MAX = 32 << 20


@dataclass
class InputLine:
    """A message to send, or why there is none."""

    line: int
    body: bytes = b""
    # Columns of a file's row, for the options that name one.
    columns: dict[str, Any] = field(default_factory=dict)
    error: InvalidArgument | None = None


def from_argument(body: str) -> Iterator[InputLine]:
    """The argument itself, byte for byte as it was given."""
    yield InputLine(1, os.fsencode(body))


def from_lines(lines: Iterable[bytes]) -> Iterator[InputLine]:
    """Each line is a body, without its end."""
    for number, line in enumerate(lines, 1):
        yield InputLine(number, line.rstrip(b"\r\n"))


def from_jsonl(lines: Iterable[bytes]) -> Iterator[InputLine]:
    """Each line that is not blank is a JSON value and goes out as it is written."""
    for number, line in enumerate(lines, 1):
        body = line.strip()
        if not body:
            continue
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            yield InputLine(number, error=_wrong(number, f"not JSON: {error}"))
            continue
        yield InputLine(number, body, value if isinstance(value, dict) else {})


def from_csv(lines: Iterable[bytes]) -> Iterator[InputLine]:
    """Each row goes out as a JSON object, its keys from the header line.

    Raises InvalidArgument for a header that cannot be read, or names a column twice.
    """
    csv.field_size_limit(LINE_BYTES_MAX)  # 128 KiB by default
    number = 0  # the reader's own leaves out lines that are not UTF-8

    def numbered() -> Iterator[bytes]:
        nonlocal number
        for line in lines:
            number += 1
            yield line

    # map, not a generator: it goes on after a line that is not UTF-8.
    reader = csv.reader(map(bytes.decode, numbered()), strict=True)
    header: list[str] = []
    while True:
        try:
            row = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            wrong = _wrong(number, f"not CSV: {error}")
            if not header:  # the next row would be taken for it
                raise wrong from error
            yield InputLine(number, error=wrong)
            continue
        if row is None:
            return
        if not header:
            header = [name.removeprefix("\ufeff") for name in row]
            _check_header(header)
        elif row:
            yield _row(number, header, row)


def _check_header(header: list[str]) -> None:
    for name, count in Counter(header).items():
        if name and count > 1:
            raise InvalidArgument(
                f"the header names the column {name!r} {count} times",
                field="file",
                value=name,
                limit="once each",
            )


def _row(number: int, header: list[str], row: list[str]) -> InputLine:
    if len(row) != len(header):
        message = f"{len(row)} columns, the header has {len(header)}"
        return InputLine(number, error=_wrong(number, message))
    columns = dict(zip(header, row, strict=True))
    body = json.dumps(columns, ensure_ascii=False, separators=(",", ":")).encode()
    return InputLine(number, body, columns)


def _wrong(number: int, message: str) -> InvalidArgument:
    return InvalidArgument(f"line {number}: {message}", field="file", value=str(number))


def counted(file: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The lines of a file; tells `advance` how many bytes each took.

    Raises InvalidArgument for a line beyond LINE_BYTES_MAX.
    """
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise InvalidArgument(
                f"line {number} is longer than {LINE_BYTES_MAX} bytes: the rest is not read",
                field="file",
                value=str(number),
                limit=str(LINE_BYTES_MAX),
            )
        advance(len(line))
        yield line
