"""An Arrow batch of rows to messages.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa

from duemq import Outgoing
from duemq.errors import DuemqError, InvalidArgument, NotAllSent

_US_PER_MS = 1_000

# How `send_many` names what is wrong with one of its messages.
_FIELD = re.compile(r"messages\[(\d+)\]\.(.*)")
_NUMBERED = re.compile(r"message \d+: (.*); [^;]*sent", re.DOTALL)


@dataclass(frozen=True)
class RowIds:
    """What the rows of one task get as their ids: `<write>-<partition>-<row>`."""

    property: str
    """Where a message has it; empty: nowhere."""
    prefix: str

    @classmethod
    def of(cls, property_name: str, write_id: str, partition: int) -> RowIds:
        """Of a partition of a write; the same for every attempt at it."""
        return cls(property_name, f"{write_id}-{partition}-")


def by_topic(batch: pa.RecordBatch, topic: str | None) -> list[tuple[str, Sequence[int]]]:
    """The rows of each topic, in their order.  Raises InvalidArgument for a row without one."""
    if topic is not None:
        return [(topic, range(batch.num_rows))]
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(batch.column("topic").to_pylist()):
        if name is None:
            raise _null("topic", row)
        rows.setdefault(name, []).append(row)
    return list(rows.items())


def outgoing(
    batch: pa.RecordBatch, columns: Sequence[str], first_row: int, ids: RowIds
) -> Iterator[bytes | Outgoing]:
    """A message a row.  `first_row`: the number of the batch's first in its partition.

    Raises InvalidArgument for a row without a body.
    """
    bodies = batch.column("body").cast(pa.binary()).to_pylist()
    if None in bodies:
        raise _null("body", bodies.index(None))
    rest = [name for name in columns if name not in ("body", "topic")]
    if not rest and not ids.property:
        yield from bodies
        return
    options = [_values(name, batch.column(name)) for name in rest]
    rows = zip(*options, strict=True) if rest else repeat((), len(bodies))
    for number, (body, values) in enumerate(zip(bodies, rows, strict=True), first_row):
        message = Outgoing(body, **dict(zip(rest, values, strict=True)))
        if ids.property:
            own = {ids.property: f"{ids.prefix}{number}"}
            message.properties = {**message.properties, **own} if message.properties else own
        yield message


def located(
    error: DuemqError, rows: Sequence[int], partition: int, first_row: int, *, topics: bool = False
) -> DuemqError:
    """The same error, naming the row and its column; `rows`: those of the call to `send_many`.

    `topics`: the rows say where to.
    """
    if isinstance(error, NotAllSent):
        return _not_all_sent(error, rows, partition, first_row)
    column, row, said = error.field, 0, error.message
    if found := _FIELD.fullmatch(error.field):
        row, column = rows[int(found[1])], found[2]
        if told := _NUMBERED.fullmatch(error.message):
            said = told[1]
    elif isinstance(error, NullValue):
        row = error.row
    elif topics and column == "topic":
        row = rows[0]
    else:  # about the call
        return error
    return type(error)(
        f"column {column} of row {first_row + row} of partition {partition}: {said}",
        field=column,
        value=error.value,
        limit=error.limit,
    )


def _not_all_sent(
    error: NotAllSent, rows: Sequence[int], partition: int, first_row: int
) -> NotAllSent:
    failures = {rows[position]: each for position, each in error.failures.items()}
    first = min(failures)
    return NotAllSent(
        f"{len(failures)} rows of partition {partition} not stored; the first is row "
        f"{first_row + first}: {failures[first]}",
        receipts=error.receipts,
        failures=failures,
    )


class NullValue(InvalidArgument):
    """A row has null where there must be something."""

    row: int = 0
    """In its batch."""


def _null(column: str, row: int) -> NullValue:
    error = NullValue("null is not allowed", field=column, value="null", limit="a value")
    error.row = row
    return error


def _values(name: str, column: Any) -> list[Any]:
    if name == "properties":
        return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    if name == "deliver_at" and pa.types.is_timestamp(column.type):
        # Rounded up: never early.
        in_us = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        return [None if us is None else -(-us // _US_PER_MS) for us in in_us.to_pylist()]
    return column.to_pylist()
